"""Acceptance by arithmetic: how often a draft is right, and what that gives, for random pairs of models.

    python -m benchmarks.acceptance

A pair is two distributions of the next token. The model's has Zipf's shape over the vocabulary; the draft's
has its logits with normal noise. Both models draw with the same noise of (seed, position), in the Gumbel-max
way, so a draft is right when both take the same token. Its probability is the sum over tokens i of
1 / sum over j of max(p_j / p_i, q_j / q_i). No way to draw can do better than 1 less the distance of p and q.

What that gives: with k drafts of a model that takes `cost` of a step each, and `slot` for each row that
verifies one, a step takes 1 + k (cost + slot) and gives (1 - a^(k + 1)) / (1 - a) tokens.
"""

import numpy as np
from absl import app, flags

from benchmarks.record import Results, start

VOCAB = flags.DEFINE_integer("vocab", 2048, "tokens")
PAIRS = flags.DEFINE_integer("pairs", 24, "random pairs at each noise")
COST = flags.DEFINE_float("cost", 0.25, "time of a draft's pass, in steps of the model")
SLOT = flags.DEFINE_float("slot", 0.01, "time of a row that verifies a draft, in steps of the model")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def same_noise(p: np.ndarray, q: np.ndarray) -> float:
    """Return the probability that both take the same token with the same noise."""
    larger = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / larger.sum(axis=1)).sum())


def times_as_fast(a: float, k: int) -> float:
    tokens = sum(a**i for i in range(k + 1))
    return tokens / (1 + k * (COST.value + SLOT.value))


def main(argv: list[str]) -> None:
    start(argv)
    rng = np.random.default_rng(0)
    results = Results("acceptance", OUT.value, vocab=VOCAB.value, cost=COST.value, slot=SLOT.value)
    for temperature in (1.0, 0.5):
        for noise in (0.1, 0.25, 0.5, 1.0):
            accepted, bound, greedy = [], [], []
            for _ in range(PAIRS.value):
                logits = -1.2 * np.log(rng.permutation(VOCAB.value) + 1.0)
                its = logits + noise * rng.normal(size=VOCAB.value)
                p, q = softmax(logits / temperature), softmax(its / temperature)
                accepted.append(same_noise(p, q))
                bound.append(1 - np.abs(p - q).sum() / 2)
                greedy.append(float(p.argmax() == q.argmax()))
            a = float(np.mean(accepted))
            most, best = max((times_as_fast(a, k), k) for k in range(1, 8))
            results.put(
                {
                    "temperature": temperature,
                    "noise of logits": noise,
                    "same noise": round(a, 3),
                    "most possible": round(float(np.mean(bound)), 3),
                    "greedy": round(float(np.mean(greedy)), 3),
                    "drafts": best,
                    "times as fast": round(most, 2),
                }
            )
    for k in (1, 2, 3, 4):
        shares = np.linspace(0, 1, 1001)
        least = next((a for a in shares if times_as_fast(float(a), k) >= 1.25), None)
        results.put(
            {"drafts": k, "acceptance for 1.25 times as fast": None if least is None else round(least, 2)}
        )


if __name__ == "__main__":
    app.run(main)
