"""A model that keeps K and V in blocks of some layout: what it says depends on how they are kept.

One sequence alone, in the order in which the engine computes it: its prompt in tiles of neighbouring tokens,
the answer token by token. The K and V of what is computed at once are written first, then each token looks at
what the blocks give back, up to itself.
"""

import numpy as np

from . import model
from .layouts import Arrays, Oracle


class Cache:
    """Blocks 1, 2, ... of one sequence, for each layer."""

    def __init__(self, layout: Oracle, empty: Arrays) -> None:
        self.num_tokens = 0
        self._layout, self._empty = layout, empty
        self._arrays: dict[str, Arrays] = {}

    def add(self, layer: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        layout, arrays = self._layout, self._arrays.get(layer, dict(self._empty))
        end = self.num_tokens + len(k)
        slots = np.arange(self.num_tokens, end) + layout.block_size
        arrays = self._arrays[layer] = layout.write(arrays, k, v, slots)
        blocks = [layout.read(arrays, 1 + block) for block in range((end - 1) // layout.block_size + 1)]
        keys, values = (np.concatenate(each)[:end] for each in zip(*blocks, strict=True))
        return keys, values


def generate(
    config: model.Config,
    weights: model.Weights,
    layout: Oracle,
    empty: Arrays,
    prompt: list[int],
    max_tokens: int,
    tile_len: int,
) -> list[int]:
    """Return the greedy answer. `empty`: one layer's arrays, with blocks for all tokens beside block 0."""
    cache, tokens = Cache(layout, empty), list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        end = min(cache.num_tokens + tile_len, len(prompt))
        if cache.num_tokens >= len(prompt):
            end = len(tokens)
        scores = model.logits(config, weights, tokens[:end], cache)[-1]
        cache.num_tokens = end
        if end == len(tokens):
            tokens.append(int(np.argmax(scores)))
    return tokens[len(prompt) :]
