"""The numbers that make one Llama-like model another, read from a Hugging Face config or a GGUF file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, check, checked_bool, checked_int, checked_number, shown

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
        """Raises `InputError` for what no model can be: numbers come from files, and may be anything."""
        for name in _SIZES:
            self._set(name, checked_int(f"model config: {name}", getattr(self, name), "an int >= 1", 1))
        for name in ("rms_norm_eps", "rope_theta"):
            value = checked_number(
                f"model config: {name}", getattr(self, name), "a number > 0", 0, above=True
            )
            self._set(name, value)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            checked_bool(f"model config: {name}", getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_q_heads={self.num_q_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        window = self.sliding_window
        if window is not None:
            window = checked_int("model config: sliding_window", window, "None or an int >= 1", 1)
        self._set("sliding_window", window)
        check("model config: head_dim", self.head_dim, "even", self.head_dim % HEAD_DIM_MULTIPLE == 0)
        rule = f"a token id, an int in [0, {self.vocab_size})"
        for token in self.eos_token_ids:
            checked_int("model config: eos_token_id", token, rule, 0, self.vocab_size - 1)
        ids = tuple(sorted({int(token) for token in self.eos_token_ids}))
        self._set("eos_token_ids", ids)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretch of the slow RoPE frequencies, from `original_max_len` positions to `factor` times."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config (as a dictionary) of `model_type` "llama" or "mistral".

    Raises `InputError` for other model types, for values of the wrong type, and for whatever changes the
    arithmetic in a way that is not supported.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise InputError(
            f"model config: model_type={shown(model_type)} must be 'llama' or 'mistral': no other family is "
            "supported"
        )
    hf = DEFAULTS[model_type] | dict(hf)
    # Transformers 5 gathers RoPE's numbers in `rope_parameters`; older configs spread them.
    rope = {"rope_theta": _get(hf, "rope_theta", 10000.0)} | _rope_parameters(hf)
    _refuse_unsupported(hf | rope)
    num_q_heads, hidden_size = _size(hf, "num_attention_heads"), _size(hf, "hidden_size")
    return ModelConfig(
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(hf, "intermediate_size"),
        num_layers=_size(hf, "num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=_size(hf, "num_key_value_heads", num_q_heads),
        head_dim=_size(hf, "head_dim", hidden_size // num_q_heads),
        rms_norm_eps=_get(hf, "rms_norm_eps", 1e-6),
        rope_theta=rope["rope_theta"],
        rope_scaling=_rope_scaling(rope),
        max_model_len=_size(hf, "max_position_embeddings"),
        tie_word_embeddings=_get(hf, "tie_word_embeddings", False),
        attention_bias=_get(hf, "attention_bias", False),
        mlp_bias=_get(hf, "mlp_bias", False),
        sliding_window=_sliding_window(hf),
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
    )


def _get(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value; the default too where a config says null."""
    value = hf.get(name)
    return default if value is None else value


def _required(hf: Mapping[str, Any], name: str) -> Any:
    if hf.get(name) is None:
        raise InputError(f"model config: {name} must be given")
    return hf[name]


def _size(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _required(hf, name) if default is None else _get(hf, name, default)
    return checked_int(f"model config: {name}", value, "an int >= 1", 1)


def _token_ids(value: object) -> tuple[Any, ...]:
    """None, one or several, as a config may say; `ModelConfig` checks each."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


# What a config of these families may say only if it means nothing: with anything else the arithmetic is
# another.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1),
    "rope_interleave": (None, False),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_sinks": (None, False),
    "alibi": (None, False),
    "use_parallel_residual": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
}


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    quantization = hf.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise InputError(
            f"model config: quantization_config with quant_method={shown(method)} must be left out: "
            "quantised weights of safetensors files are not supported yet"
        )
    for name, neutral in _NEUTRAL.items():
        value = hf.get(name)
        rule = (
            f"{shown(neutral[-1])} or left out: anything else is another arithmetic, which is not supported"
        )
        check(f"model config: {name}", value, rule, value in neutral)


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    parameters = hf.get(name) or {}
    check(f"model config: {name}", parameters, "a JSON object or null", isinstance(parameters, Mapping))
    return {key: value for key, value in parameters.items() if value is not None}


def _sliding_window(hf: Mapping[str, Any]) -> Any:
    """A Mistral's window, the same in every layer. A Llama has none; what says otherwise is refused."""
    window, is_used = hf.get("sliding_window"), _get(hf, "use_sliding_window", True)
    checked_bool("model config: use_sliding_window", is_used)
    if hf["model_type"] == "llama":
        if window is not None and is_used:
            raise InputError(
                f"model config: sliding_window={shown(window)} must be null for model_type 'llama'"
            )
        window = None
    elif window is not None and not is_used:
        raise InputError(
            f"model config: use_sliding_window={is_used} contradicts sliding_window={shown(window)}: remove "
            "the former, or set the latter to null"
        )
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(each != kind for each in kinds):
        raise InputError(
            f"model config: layer_types must all be {kind!r} with sliding_window={shown(window)}: "
            "layers of several kinds are not supported"
        )
    return window


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"model config: rope_type={shown(kind)} must be 'default' or 'llama3'")

    def number(name: str) -> float:
        value = _required(rope, name)
        return checked_number(f"model config: {name}", value, "a number > 0", 0, above=True)

    scaling = RopeScaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_len=_size(rope, "original_max_position_embeddings"),
    )
    rule = f"more than low_freq_factor={scaling.low_freq_factor}"
    check(
        "model config: high_freq_factor",
        scaling.high_freq_factor,
        rule,
        scaling.high_freq_factor > scaling.low_freq_factor,
    )
    return scaling
