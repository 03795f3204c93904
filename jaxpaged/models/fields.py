"""A model's config file as families read it: one field at a time, and nothing that matters left unread."""

import math
from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxpaged.checks import InputError, check, checked_bool, checked_int, checked_number, is_int, shown
from jaxpaged.models.config import LayerKind
from jaxpaged.models.ropes import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

# Hugging Face's names of activations.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
# Fields that must be neutral unless the family reads them. Other values mean other arithmetic.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1),
    "rope_interleave": (None, False),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False),
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
    "use_bidirectional_attention": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "clip_qkv": (None,),
    "rope_scaling": (None, {}),
    "n_routed_experts": (None, 0, 1),
    "n_shared_experts": (None, 0),
    "shared_intermediate_size": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "moe_num_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
    "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1),
    "n_group": (None, 1),
    "lm_head_bias": (None, False),
    "moe_num_experts": (None, 0, 1),
    "num_shared_experts": (None, 0),
    "num_shared_expert": (None, 0),
    "mlp_layer_types": (None, []),
    "layer_rope_theta": (None,),
    "num_attention_heads_per_layer": (None,),
    "v_head_dim": (None,),
    "attention_value_scale": (None, 1),
    "gating": (None, False),
    "use_post_norm": (None, False),
    "moe_router_logit_softcapping": (None, 0),
    "route_scale": (None, 1),
    "router_scaling_factor": (None, 1),
    "moe_routed_scaling_factor": (None, 1),
    "mup_enabled": (None, False),
    "position_embedding_type": (None, "absolute", "rope"),
}


class Fields:
    """A config's fields, with a family's defaults for those that are null or missing."""

    def __init__(self, said: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._said, self._read = dict(defaults or {}), {"model_type"}
        if said.get("rope_scaling") is not None:  # the older name of the same field
            self._said.pop("rope_parameters", None)
        self._said |= {name: value for name, value in said.items() if value is not None}
        self._given = {name for name, value in said.items() if value is not None}
        self._nulls = {name for name, value in said.items() if value is None}

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self._said.get(name, default)

    def alias(self, **names: str) -> None:
        """Read fields by the names that older files have for them: `new="old"`. They go before a default."""
        for name, old in names.items():
            self._read.add(old)
            is_said = old in self._given or (old in self._said and name not in self._said)
            if is_said and name not in self._given:
                self._said[name] = self._said[old]

    def is_null(self, name: str) -> bool:
        """Return whether the file says null where leaving the field out would mean something else."""
        return name in self._nulls

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise InputError(f"model config: {name} must be given")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.required(name) if default is None else self.get(name, default)
        return checked_int(f"model config: {name}", value, "an int >= 1", 1)

    def count(self, name: str, default: int) -> int:
        value = self.get(name, default)
        return checked_int(f"model config: {name}", value, "an int >= 0", 0)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.required(name) if default is None else self.get(name, default)
        return checked_number(f"model config: {name}", value, "a number > 0", 0, above=True)

    def flag(self, name: str, default: bool = False) -> bool:
        return checked_bool(f"model config: {name}", self.get(name, default))

    def only(self, name: str, *values: object, default: Any = None) -> None:
        """Refuse anything but these values: it is another arithmetic, which is not supported."""
        value = self.get(name, default)
        rule = " or ".join([*(shown(each) for each in values), "left out"])
        rule += ": anything else is another arithmetic, which is not supported"
        check(f"model config: {name}", value, rule, value is None or value in values)

    def activation(self, name: str, default: str) -> str:
        value = self.get(name, default)
        rule = f"one of {', '.join(ACTIVATIONS)}"
        check(f"model config: {name}", value, rule, isinstance(value, str) and value in ACTIVATIONS)
        return ACTIVATIONS[value]

    def token_ids(self, name: str = "eos_token_id") -> tuple[Any, ...]:
        """Return none, one or several, as a config may say; `ModelConfig` checks each.

        Numbers that are no tokens of the vocabulary are left out, with a warning: such a token never comes.
        """
        value = self.get(name)
        ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        size = self.size("vocab_size")
        strange = [each for each in ids if is_int(each) and not 0 <= each < size]
        if strange:
            logging.warning("%s=%s: %s is no token of %d, and ends nothing", name, value, strange, size)
        return tuple(each for each in ids if each not in strange)

    def rope(self, head_dim: int, *, theta: float = 10000.0, part: float | None = None) -> Rope:
        """Return RoPE of all layers. Transformers 5 gathers its numbers in `rope_parameters`; older configs
        spread them, and what `rope_scaling` says beside the former goes before it.

        `part` of each head's coordinates are turned, unless the config says otherwise; None: all.
        """
        scaling, parameters = self.get("rope_scaling"), self.get("rope_parameters")
        name, said = ("rope_parameters", parameters) if parameters else ("rope_scaling", scaling)
        if isinstance(scaling, Mapping) and scaling and isinstance(parameters, Mapping) and parameters:
            said = self._both(scaling, parameters)
        spread = {"rope_theta": self.get("rope_theta", theta)}
        if part is not None:
            spread["partial_rotary_factor"] = self.get("partial_rotary_factor", part)
        return self.rope_of(name, said or {}, spread, head_dim, is_partial=part is not None)

    def _both(self, scaling: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return what two objects say of RoPE; of a family's defaults only what is not scaling is kept."""
        if "rope_parameters" not in self._given:
            return dict(scaling)
        renamed = {"rope_type": scaling["type"]} if "type" in scaling else {}
        if any(parameters.get(key) != value for key, value in {**scaling, **renamed}.items()):
            logging.warning("rope_scaling=%s goes before rope_parameters=%s", scaling, parameters)
        return {**parameters, **renamed, **scaling}

    def rope_of(
        self,
        name: str,
        said: object,
        spread: Mapping[str, Any],
        head_dim: int,
        *,
        is_partial: bool = False,
    ) -> Rope:
        """Read the RoPE of one JSON object."""
        if not isinstance(said, Mapping):
            raise InputError(f"model config: {name}={shown(said)} must be a JSON object or null")
        given = Fields(said, spread)
        if not is_partial:
            given.only("partial_rotary_factor", 1)
        part = given.positive("partial_rotary_factor", 1.0)
        theta = given.positive("rope_theta")
        dim = int(head_dim * part)
        return Rope(theta=theta, dim=dim, scaling=self._scaling(given, dim))

    def _scaling(self, given: "Fields", dim: int) -> RopeScaling | None:
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return None
        if kind == "dynamic":
            given.only("alpha")
            factor = given.positive("factor", 1.0)
            rule = "at least 1, with more than 2 coordinates that turn"
            check("model config: factor", factor, rule, factor == 1 or (factor > 1 and dim > 2))
            original = self.size("max_position_embeddings")
            return DynamicScaling(factor=factor, original_max_len=original) if factor > 1 else None
        if kind == "linear":
            return LinearScaling(given.positive("factor"))
        if kind == "llama3":
            return self._llama3(given)
        if kind == "yarn":
            return self._yarn(given)
        if kind in ("longrope", "su"):
            return self._long(given)
        known = "'default', 'dynamic', 'linear', 'llama3', 'yarn' or 'longrope'"
        raise InputError(f"model config: rope_type={shown(kind)} must be {known}")

    def _original(self, given: "Fields") -> int:
        """Return how many positions a model had before its scaling: the config's own number goes first."""
        name = "original_max_position_embeddings"
        return self.size(name, given.size(name, self.size("max_position_embeddings")))

    def _llama3(self, given: "Fields") -> Llama3Scaling:
        scaling = Llama3Scaling(
            factor=given.positive("factor"),
            low_freq_factor=given.positive("low_freq_factor"),
            high_freq_factor=given.positive("high_freq_factor"),
            original_max_len=self._original(given),
        )
        high, low = scaling.high_freq_factor, scaling.low_freq_factor
        check("model config: high_freq_factor", high, f"more than low_freq_factor={low}", high > low)
        return scaling

    def _yarn(self, given: "Fields") -> YarnScaling:
        max_len = self.size("max_position_embeddings")
        original = self._original(given)
        factor = given.positive("factor", max_len / original)
        scales = [given.get(name) for name in ("mscale", "mscale_all_dim")]

        def attention_factor(scale: float = 1.0) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        default = attention_factor()
        if all(scales):
            first, second = (
                checked_number("model config: mscale", each, "a number > 0", 0, above=True) for each in scales
            )
            default = attention_factor(first) / attention_factor(second)
        return YarnScaling(
            factor=factor,
            original_max_len=original,
            beta_fast=given.positive("beta_fast", 32.0),
            beta_slow=given.positive("beta_slow", 1.0),
            truncate=given.flag("truncate", True),
            attention_factor=given.positive("attention_factor", default),
            mscale_all_dim=checked_number(
                "model config: mscale_all_dim", given.get("mscale_all_dim", 0.0), "a number >= 0", 0
            ),
        )

    def _long(self, given: "Fields") -> LongScaling:
        max_len = self.size("max_position_embeddings")
        original = self._original(given)
        factor = given.positive("factor", max_len / original)
        default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

        def factors(name: str) -> tuple[float, ...]:
            value = given.required(name)
            check(f"model config: {name}", value, "a list of numbers", isinstance(value, list | tuple))
            rule = "a number > 0"
            return tuple(checked_number(f"model config: {name}", x, rule, 0, above=True) for x in value)

        return LongScaling(
            short_factors=factors("short_factor"),
            long_factors=factors("long_factor"),
            original_max_len=original,
            attention_factor=given.positive("attention_factor", default),
        )

    def layer_kinds(
        self,
        types: list[str],
        *,
        full: LayerKind,
        sliding: LayerKind | None = None,
        chunked: LayerKind | None = None,
        others: Mapping[str, LayerKind] | None = None,
    ) -> tuple[LayerKind, ...]:
        """Return a kind for each layer, by the file's `layer_types` or by the types given for it.

        others: kinds that have names of a family's own.
        """
        types = self.get("layer_types", types)
        known = {"sliding_attention": sliding, "chunked_attention": chunked, "full_attention": full}
        kinds = {name: kind for name, kind in known.items() if kind is not None} | dict(others or {})
        rule = f"a list of {' and '.join(map(repr, kinds))}, one for each layer"
        num_layers = self.size("num_hidden_layers")
        ok = isinstance(types, list) and len(types) == num_layers
        ok = ok and all(isinstance(kind, str) and kind in kinds for kind in types)
        check("model config: layer_types", types, rule, ok)
        return tuple(kinds[kind] for kind in types)

    def has_read(self, name: str) -> bool:
        return name in self._read

    def refuse_rest(self) -> None:
        """Refuse what no one has read, if it changes the arithmetic."""
        for name, neutral in NEUTRAL.items():
            value = self._said.get(name)
            rule = (
                f"{shown(neutral[-1])} or left out: anything else is another arithmetic, which is not "
                "supported"
            )
            check(f"model config: {name}", value, rule, name in self._read or value in neutral)
