"""The numbers that make one Llama-like model another, read from a Hugging Face config or a GGUF file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.config import InputError

HEAD_DIM_MULTIPLE = 2  # RoPE turns pairs
# The model types that are Llamas, and what transformers takes for numbers that their configs leave out.
DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: "RopeScaling | None" = None
    max_model_len: int  # positions the model was trained for
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # tokens that a token sees in every layer, itself among them; None: all
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_model_len",
        ):
            if getattr(self, field) < 1:
                raise InputError(f"model config: {field}={getattr(self, field)} must be at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_q_heads={self.num_q_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InputError(f"model config: sliding_window={self.sliding_window} must be at least 1")
        if self.head_dim % HEAD_DIM_MULTIPLE:
            raise InputError(f"model config: head_dim={self.head_dim} must be even")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretch of the slow RoPE frequencies, from `original_max_len` positions to `factor` times."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config (as a dictionary) of `model_type` "llama" or "mistral".

    Raises `InputError` for other model types, activations, kinds of RoPE scaling or of sliding window.
    """
    model_type = hf.get("model_type")
    if model_type not in DEFAULTS:
        raise InputError(
            f"model config: model_type={model_type!r} must be 'llama' or 'mistral': no other family is "
            "supported"
        )
    hf = DEFAULTS[model_type] | dict(hf)
    if hf.get("hidden_act", "silu") != "silu":
        raise InputError(f"model config: hidden_act={hf['hidden_act']!r} must be 'silu'")
    # Transformers 5 gathers RoPE's numbers in `rope_parameters`; older configs spread them.
    rope = {"rope_theta": hf.get("rope_theta", 10000.0)} | dict(
        hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    )
    eos = hf.get("eos_token_id")
    num_q_heads = hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_q_heads=num_q_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_q_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_q_heads,
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope),
        max_model_len=hf["max_position_embeddings"],
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        sliding_window=_sliding_window(hf),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def _sliding_window(hf: Mapping[str, Any]) -> int | None:
    """A Mistral's window, the same in every layer. A Llama has none; what says otherwise is refused."""
    window, is_used = hf.get("sliding_window"), hf.get("use_sliding_window", True)
    if hf["model_type"] == "llama":
        if window is not None and is_used:
            raise InputError(f"model config: sliding_window={window} must be null for model_type 'llama'")
        window = None
    elif window is not None and not is_used:
        raise InputError(
            f"model config: use_sliding_window={is_used} contradicts sliding_window={window}: remove the "
            "former, or set the latter to null"
        )
    kind = "full_attention" if window is None else "sliding_attention"
    if set(hf.get("layer_types") or ()) - {kind}:
        raise InputError(
            f"model config: layer_types must all be {kind!r} with sliding_window={window}: "
            "layers of several kinds are not supported"
        )
    return window


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"model config: rope_type={kind!r} must be 'default' or 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_len=int(rope["original_max_position_embeddings"]),
    )
