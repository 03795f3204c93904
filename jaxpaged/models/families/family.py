"""What a family of models says of itself."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.fields import Fields
from jaxpaged.models.weights import Form, Names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
    """How GGUF files have a family: llama.cpp's names are the same in all, its forms are not.

    `read`: where a file is not read as the family's configs are. `fields` makes a Hugging Face config of the
    metadata that only this family has, from a function that gives a value by its name without the
    architecture's, or None.
    """

    architecture: str
    read: Callable[[Fields], ModelConfig] | None = None
    fields: Callable[[Callable[[str], Any]], dict[str, Any]] = lambda read: {}
    forms: Mapping[str, Form] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one `model_type`: how its config is read, and what its files call the weights."""

    model_type: str  # as Hugging Face's configs say
    models: str  # for people: those that it has
    read: Callable[[Fields], ModelConfig]
    names: Callable[[ModelConfig], Names]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what transformers takes
    gguf: Gguf | None = None
