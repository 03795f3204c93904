"""A model that keeps K and V in blocks of some layout: what it says depends on how they are kept.

One sequence alone, in the order in which the engine computes it: its prompt in tiles of neighbouring tokens,
the answer token by token. The K and V of what is computed at once are written first, then each token looks at
what the blocks give back, up to itself.
"""

import numpy as np

from reference import model
from reference.layouts import Arrays, Oracle


def generate(
    config: model.Config,
    weights: model.Weights,
    layout: Oracle,
    empty: Arrays,
    prompt: list[int],
    max_tokens: int,
    tile_len: int,
) -> list[int]:
    """The greedy answer. `empty`: one layer's arrays, with blocks for all tokens beside block 0."""
    caches = [dict(empty) for _ in range(config.num_layers)]
    tokens = list(prompt)
    for first in range(0, len(prompt), tile_len):
        scores = _scores(
            config, weights, layout, caches, tokens, range(first, min(first + tile_len, len(prompt)))
        )
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(scores)))
        scores = _scores(config, weights, layout, caches, tokens, range(len(tokens) - 1, len(tokens)))
    return tokens[len(prompt) :]


def _scores(
    config: model.Config,
    weights: model.Weights,
    layout: Oracle,
    caches: list[Arrays],
    tokens: list[int],
    positions: range,
) -> np.ndarray:
    """Compute the tokens at these positions; the scores of what follows the last."""
    x = weights["model.embed_tokens.weight"][[tokens[position] for position in positions]]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = model.rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            model.linear(weights, f"{prefix}.self_attn.{name}_proj", normed).reshape(
                len(x), -1, config.head_dim
            )
            for name in "qkv"
        )
        q, k = (_turned(config, each, positions) for each in (q, k))
        slots = np.array(positions) + layout.block_size  # the sequence has blocks 1, 2, ...
        caches[layer] = layout.write(caches[layer], k, v, slots)
        seen = [
            layout.read(caches[layer], 1 + block) for block in range(positions[-1] // layout.block_size + 1)
        ]
        keys, values = (np.concatenate(each) for each in zip(*seen, strict=True))
        out = np.empty_like(q)
        group = config.num_q_heads // config.num_kv_heads
        for i, position in enumerate(positions):
            first = 0 if config.sliding_window is None else max(position + 1 - config.sliding_window, 0)
            for head in range(config.num_q_heads):
                its = slice(first, position + 1), head // group
                score = keys[its] @ q[i, head] / np.sqrt(config.head_dim)
                weight = np.exp(score - score.max())
                out[i, head] = weight / weight.sum() @ values[its]
        x = x + model.linear(weights, f"{prefix}.self_attn.o_proj", out.reshape(len(x), -1))
        normed = model.rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + model.mlp(weights, f"{prefix}.mlp", normed)
    x = model.rms_norm(x[-1:], weights["model.norm.weight"], config.rms_norm_eps)
    head_name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return (x @ weights[f"{head_name}.weight"].T)[0]


def _turned(config: model.Config, x: np.ndarray, positions: range) -> np.ndarray:
    """RoPE of tokens that do not begin their sequence."""
    padded = np.concatenate([np.zeros((positions[0], *x.shape[1:]), x.dtype), x])
    return model.rope(padded, config)[positions[0] :]
