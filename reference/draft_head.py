"""Heads that draft, in NumPy: one layer over embeddings and features of a served model, without a cache.

Weights come by their role, as in `reference.model`. Entry p of a head is made of the features at position p
and of token p + 1; it scores token p + 2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import model
from .parts import Weights, linear, norm


def features(config: Any, weights: Weights, taps: Sequence[np.ndarray]) -> np.ndarray:
    """Return features, [num_tokens, hidden_size], of hidden states of the served model.

    taps: of an EAGLE-3 head those behind several layers; of an MTP layer the one behind the last norm.
    """
    if config.draft_head.kind == "mtp":
        [hidden] = taps
        return hidden
    together = np.concatenate(taps, axis=-1)
    if config.draft_head.fuse_norm:
        together = norm(config, weights, "fuse_norm", together)
    return linear(weights, "fuse", together)


def taps(config: Any, weights: Weights, tokens: Sequence[int], behind: Sequence[int]) -> list[np.ndarray]:
    """Return a served model's hidden states after the given layers."""
    states = [model.embed(config, weights, list(tokens))]
    for number, kind in enumerate(config.layers):
        states.append(model.layer(config, weights, f"layers.{number}", kind, states[-1]))
    return [states[number] for number in behind]


def entries(
    config: Any, weights: Weights, embedded: np.ndarray, given: np.ndarray, cache: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden states behind the last norm, and the head's own features, of entries from 0 on.

    embedded: of the token behind each position. given: the features there. cache: is told K and V.
    """
    c, head, [kind] = config, config.draft_head, config.layers
    normed = norm(c, weights, "hidden_norm", given)
    if head.kind == "mtp":
        embedded = np.concatenate([np.zeros_like(embedded[:1]), embedded[1:]])
        both = [norm(c, weights, "embedded_norm", embedded), normed]
        x = linear(weights, "fuse", np.concatenate(both, axis=-1))
        x = model.layer(c, weights, "layers.0", kind, x, cache)
    else:
        both = [norm(c, weights, "layers.0.attention_norm", embedded), normed]
        residual = normed if head.norm_before_residual else given
        together = np.concatenate(both, axis=-1)
        x = residual + model.attention(c, weights, "layers.0", kind, together, cache)
        x = x + model.mlp(c, weights, "layers.0", norm(c, weights, "layers.0.mlp_norm", x))
    hidden = norm(c, weights, "norm", x)
    return hidden, hidden if head.hands_normed else x


def drafts(
    config: Any,
    weights: Weights,
    table: np.ndarray,
    lm_head: np.ndarray,
    targets: np.ndarray | None,
    tokens: Sequence[int],
    given: np.ndarray,
    num: int,
) -> list[int]:
    """Return the next tokens that a head would choose, greedily, one after the other.

    table: of embeddings. lm_head: scores choices. targets: the token that each choice is; None: the same.
    given: features of all tokens but the last.
    """
    line = list(tokens)
    while len(line) < len(tokens) + num:
        hidden, new_hidden = entries(config, weights, table[line[1:]], given)
        choice = int(np.argmax(hidden[-1] @ lm_head.T))
        line.append(choice if targets is None else int(targets[choice]))
        given = np.concatenate([given, new_hidden[-1:]])
    return line[len(tokens) :]
