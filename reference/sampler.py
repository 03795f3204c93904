"""The sampler's distribution in NumPy, one row at a time: what a token's chance is after every option."""

import numpy as np


def probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Chance of each token of one row, [vocab], in float64. Temperature 0 gives all to the first likeliest.

    Filters apply in the order top_k, top_p, min_p, each to what the one before has left. Tokens are ranked by
    logit, equal ones by their id, the lower first; the likeliest always stays.
    """
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / temperature
    ranked = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if top_k:
        ranked = ranked[:top_k]
    chance = np.exp(scaled - scaled.max())
    chance /= sum(chance[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if kept and ((top_p < 1 and mass >= top_p) or chance[token] < min_p * chance[ranked[0]]):
            break
        kept.append(token)
        mass += chance[token]
    result = np.zeros(len(logits))
    result[kept] = chance[kept] / chance[kept].sum()
    return result
