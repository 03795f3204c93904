"""Family: the description of a family of models."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names

type Metadata = Callable[[str], Any]  # a value by its name, less the architecture's in front; None without it
FUSED: dict[str, str | tuple[str, ...]] = {"qkv": "blk.{layer}.attn_qkv"}  # queries, keys and values in one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
    """A family's form in GGUF files. Names are llama.cpp's in most families; forms differ.

    `read`: where a file is not read as the family's configs are. `metadata`: by the config's field, the name
    of what says it, where that is not so in all families. `fields` makes the rest of a Hugging Face config.
    `marker`: a tensor by which its files are told from others of the same architecture.
    """

    architecture: str
    read: Callable[[Fields], ModelConfig] | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Callable[[Metadata], dict[str, Any]] = lambda read: {}
    forms: Mapping[str, Form] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    marker: str | None = None


def rotated_part(read: Metadata) -> dict[str, Any]:
    """Read the part of each head that RoPE turns, for families in which it may be less than all."""
    head_dim = read("attention.key_length") or read("embedding_length") / read("attention.head_count")
    dim = read("rope.dimension_count") or head_dim
    # The next larger number: times the head's width it is not rounded to one less.
    return {"partial_rotary_factor": math.nextafter(dim / head_dim, math.inf)}


def rope_scaling(read: Metadata) -> dict[str, Any]:
    """Return a file's scaling of RoPE as Hugging Face's configs have it.

    As in llama.cpp, a factor without a type is linear, and old files call it `rope.scale_linear`.
    """
    factor = read("rope.scaling.factor") or read("rope.scale_linear")
    return {
        "rope_type": read("rope.scaling.type") or ("linear" if factor else "default"),
        "factor": factor,
        "original_max_position_embeddings": read("rope.scaling.original_context_length"),
        "beta_fast": read("rope.scaling.yarn_beta_fast"),
        "beta_slow": read("rope.scaling.yarn_beta_slow"),
        "attention_factor": read("rope.scaling.yarn_attn_factor"),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`: how its config is read, and what its files call the weights."""

    model_type: str  # as Hugging Face's configs say
    models: str  # for people: those that it has
    read: Callable[[Fields], ModelConfig]
    names: Callable[[ModelConfig], Names]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what transformers takes
    # Whether `max_position_embeddings` already counts every scaling of RoPE.
    has_final_length: bool = False
    gguf: tuple[Gguf, ...] = ()
    # By a `quant_method` whose files call the weights otherwise, or have them in another form: what they do.
    quantised_names: Mapping[str, Names] = dataclasses.field(default_factory=dict)
