"""Weights of Tunix's models by Hugging Face's names and shapes: of Llama 3, Qwen 2 and Qwen 3.

Tunix has a matrix as [inputs, outputs], with heads as an axis of their own; Hugging Face as
[outputs, inputs], with the heads' numbers in one row. A value here is a view of Tunix's array where NumPy can
have one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxpaged.checks import InputError

LORA_A, LORA_B = "_lora_a", "_lora_b"
WHOLE = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
}
# By what follows "layers.N." in Tunix's names: what follows "model.layers.N." in Hugging Face's.
IN_LAYER = {
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
    "attn.q_norm.w": "self_attn.q_norm.weight",
    "attn.k_norm.w": "self_attn.k_norm.weight",
    **{f"attn.{x}_proj.w": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"attn.{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"mlp.{x}_proj.kernel": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "mlp.router.kernel": "mlp.gate.weight",
}
EXPERTS = {f"mlp.{x}_proj": f"mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")}


def from_tunix(
    params: Any, *, base: Mapping[str, np.ndarray] | None = None, lora_alpha: float | None = None
) -> dict[str, np.ndarray]:
    """Return a model's weights by Hugging Face's names, in its shapes.

    params: a state of `flax.nnx` or mappings of names, as Tunix's models have them; any subset.
    base: matrices under LoRA that `params` lack, by Tunix's names, as `under_lora` gives them.
    lora_alpha: alpha of LoRA's rule. The product of LoRA's factors, scaled by alpha over their rank, is added
        to their matrix. None: there must be no factors.

    Raises `InputError` for names that are none of Tunix's, and for factors without their matrix or alpha.
    """
    flat = dict(named(params))
    factors = {name: flat.pop(name) for name in list(flat) if name.endswith((LORA_A, LORA_B))}
    for name in (name for name in factors if name.endswith(LORA_A)):
        matrix, other = name.removesuffix(LORA_A), name.removesuffix(LORA_A) + LORA_B
        weight = flat.get(matrix, None if base is None else base.get(matrix))
        if weight is None or other not in factors:
            raise InputError(f"weight {name!r} must come with {matrix if weight is None else other!r}")
        flat[matrix] = _merged(name, weight, factors[name], factors[other], lora_alpha)
    return {name: value for said, array in flat.items() for name, value in _in_hugging_face(said, array)}


def under_lora(params: Any) -> dict[str, np.ndarray]:
    """Return copies of the matrices that have LoRA's factors beside them, by Tunix's names."""
    flat = dict(named(params))
    names = (name.removesuffix(LORA_A) for name in flat if name.endswith(LORA_A))
    return {name: flat[name].copy() for name in names if name in flat}


def named(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a state of `flax.nnx`, or of mappings, by their paths joined by dots."""
    if not isinstance(params, Mapping | nnx.State):
        raise InputError(f"params of type {type(params).__name__} must be a state of flax.nnx, or a mapping")
    for path, value in nnx.to_flat_state(nnx.State(params) if isinstance(params, Mapping) else params):
        array = value.get_value() if isinstance(value, nnx.Variable) else value
        yield ".".join(map(str, path)), np.asarray(array)


def _merged(name: str, weight: np.ndarray, a: np.ndarray, b: np.ndarray, alpha: float | None) -> np.ndarray:
    """Add LoRA's product to a matrix, in float32. `a` ends with the rank, and `b` begins with it."""
    if alpha is None:
        raise InputError(f"lora_alpha must be the adapter's alpha: the model has {name!r}")
    rank = a.shape[-1]
    product = a.reshape(-1, rank).astype(np.float32) @ b.reshape(rank, -1).astype(np.float32)
    added = weight.astype(np.float32) + np.float32(alpha / rank) * product.reshape(weight.shape)
    return np.asarray(added.astype(weight.dtype))


def _in_hugging_face(said: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield Hugging Face names and arrays for one weight of Tunix; a stack of experts is split into single
    ones.
    """
    if said in WHOLE:
        yield WHOLE[said], array.T if said == "lm_head.w" else array
        return
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", said)
    number, rest = match.groups() if match else ("", "")
    if rest in EXPERTS:
        for expert, weight in enumerate(array):
            yield f"model.layers.{number}.{EXPERTS[rest].format(expert)}", weight.T
    elif rest in IN_LAYER:
        yield f"model.layers.{number}.{IN_LAYER[rest]}", _reshaped(rest, array)
    else:
        raise InputError(f"weight {said!r} is none that Tunix's Llama 3, Qwen 2 or Qwen 3 has")


def _reshaped(rest: str, array: np.ndarray) -> np.ndarray:
    """Return a layer's weight in Hugging Face's shape."""
    if array.ndim == 3:  # with heads: the output's axes, or the input's
        rows = array.shape[0] if not rest.startswith("attn.o_proj") else array.shape[0] * array.shape[1]
        return array.reshape(rows, -1).T
    return array.reshape(-1) if rest.endswith("_bias") else array.T
