"""Models whose safetensors files have weights of few bits, as config.json's `quantization_config` says.

Activations are never quantised here: scales that a file has for them, or for K and V, are not read.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.names import Names, Shape, stored_shapes, without_prefix
from jaxpaged.models.quantised import mxfp4
from jaxpaged.models.quantised.codes import CodeFormat, TensorSlice, wide
from jaxpaged.models.quantised.methods import METHODS, Found, Method, Module, Said
from jaxpaged.models.quantised.on_load import FromFile

MXFP4 = "mxfp4"
# Scales of activations, K and V. They are not read.
UNREAD = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")


class Tensors(Mapping[str, np.ndarray]):
    """A file's tensors as those of a model that is not quantised: each module's weight as float32, made when
    it is asked for. `quantisation` keeps them as they are.

    Raises `InputError` for a quantization_config that is not served.
    """

    def __init__(
        self, tensors: Mapping[str, np.ndarray], said: Said, config: ModelConfig, names: Names
    ) -> None:
        self._method, self._said = read(said), said
        self._tensors = without_prefix(names, tensors)
        self._shapes = dict(stored_shapes(config, names))
        endings = tuple(f".{mark}" for mark in self._method.marks)
        stems = {name.rpartition(".")[0] for name in self._tensors if name.endswith(endings)}
        self._modules = {
            f"{stem}.weight": Module(stem, self._tensors, names.num_chunks(config, stem)) for stem in stems
        }
        parts = {f"{stem}.{part}" for stem in stems for part in (*self._method.parts, *UNREAD)}
        plain = (name for name in self._tensors if name not in parts and not name.endswith(OF_CACHES))
        self._names = {*(name for name in plain if not self._is_empty_bias(name)), *self._modules}

    def quantisation(self) -> FromFile:
        """Return the quantisation that keeps the weights as they are in the file."""

        def kind_of(name: str, shape: Shape) -> CodeFormat | None:
            return self._found(name, shape)[0] if name in self._modules else None

        return FromFile(kind_of, lambda name, shape, part: self._found(name, shape)[1](part))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._modules:
            return self._tensors[name]
        shape = self._shapes.get(name)
        if shape is None:
            raise InputError(f"weight {name!r} is none that the model config asks for: it is another model")
        kind, rows = self._found(name, shape)
        return wide(kind, rows(TensorSlice.whole(shape)), shape[1])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _found(self, name: str, shape: Shape) -> Found:
        return self._method.found(self._modules[name], shape, self._said)

    def _is_empty_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros that the model lacks: tools for GPTQ files add them."""
        stem, _, ending = name.rpartition(".")
        is_one = ending == "bias" and name not in self._shapes and f"{stem}.weight" in self._modules
        return is_one and not np.any(self._tensors[name])


def opened(
    tensors: Mapping[str, np.ndarray], said: Said, config: ModelConfig, names: Names
) -> "Tensors | mxfp4.Tensors":
    """Return a file's tensors as those of a model that is not quantised; their `quantisation` keeps them."""
    if said["quant_method"] == MXFP4:
        return mxfp4.Tensors(tensors)
    return Tensors(tensors, said, config, names)


def check_served(said: Any, of_family: Collection[str]) -> None:
    """Raise `InputError` for a quantization_config that is not served.

    `of_family`: the methods that need names of their own, and have them in the model's family.
    """
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if method == MXFP4:
        rule = f"another for a model that is not gpt-oss: one of {', '.join(METHODS)}"
        check("quantization_config: quant_method", method, rule, method in of_family)
    else:
        read(said)


def read(said: Any) -> Method:
    """Return the method that a quantization_config names. Raises `InputError` for what is not served."""
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    is_of_mlx = isinstance(said, Mapping) and method is None and {"bits", "group_size"} <= said.keys()
    rule = "taken from a file in AWQ, GPTQ, fp8 or GGUF: without quant_method it is MLX's, which is not read"
    check("quantization_config", said, rule, not is_of_mlx)
    known_method = METHODS.get(method) if isinstance(method, str) else None
    known = ", ".join((*METHODS, MXFP4))
    check("quantization_config: quant_method", method, f"one of {known}", known_method is not None)
    assert known_method is not None
    known_method.check(said)
    return known_method
