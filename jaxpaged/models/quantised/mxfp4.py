"""Experts' weights in MXFP4, as gpt-oss is published: codes of e2m1, and for 32 a scale, a power of two.

A tensor has those of all experts, `NAME_blocks` [experts, outputs, groups, 16] and `NAME_scales` [experts,
outputs, groups], a byte each. Here expert i has a weight of its own, `NAME.i`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models.files.gguf.blocks import MXFP4, powers
from jaxpaged.models.names import Shape
from jaxpaged.models.quantised.codes import CodedRows, CodeFormat, TensorSlice, wide
from jaxpaged.models.quantised.on_load import FromFile

BLOCKS, SCALES = "_blocks", "_scales"
BYTES = MXFP4.group_size * MXFP4.bits // 8


class Tensors(Mapping[str, Any]):
    """A file's tensors as those of a model that is not quantised: each expert's weight alone, as float32,
    made when it is asked for. `quantisation` keeps them as they are.

    Raises `InputError`, when a weight is asked for, if its tensors are of another shape or type.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        stems = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
        self._experts = {
            f"{stem}.{expert}": (stem, expert)
            for stem in stems
            for expert in range(len(tensors[stem + BLOCKS]))
        }
        parts = {stem + ending for stem in stems for ending in (BLOCKS, SCALES)}
        self._names = {*self._experts, *(name for name in tensors if name not in parts)}

    def quantisation(self) -> FromFile:
        """Return what keeps the weights as they are in the file."""

        def kind_of(name: str, shape: Shape) -> CodeFormat | None:
            return MXFP4 if name in self._experts else None

        return FromFile(kind_of, self._rows)

    def __getitem__(self, name: str) -> Any:
        if name not in self._experts:
            return self._tensors[name]
        stem, _ = self._experts[name]
        num_outputs, num_groups = self._tensors[stem + BLOCKS].shape[1:3]
        shape = num_outputs, num_groups * MXFP4.group_size
        return wide(MXFP4, self._rows(name, shape, TensorSlice.whole(shape)), shape[1])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _rows(self, name: str, shape: Shape, part: TensorSlice) -> CodedRows:
        stem, expert = self._experts[name]
        count, (num_outputs, num_inputs) = len(self._tensors[stem + BLOCKS]), shape
        sizes = count, num_outputs, num_inputs // MXFP4.group_size
        groups = part.groups(MXFP4.group_size)
        blocks = self._bytes(stem + BLOCKS, (*sizes, BYTES))[expert, part.span(), groups]
        exponents = part.of(np.asarray(self._bytes(stem + SCALES, sizes)[expert, part.span(), groups]))
        if np.any(exponents == 255):
            raise InputError(f"weight {stem + SCALES!r} has NaN in it, must be finite")
        byte_codes = part.of(np.asarray(blocks))
        codes = np.stack([byte_codes & 15, byte_codes >> 4], axis=-1).reshape(len(byte_codes), -1)
        return CodedRows(codes, powers(exponents), None)

    def _bytes(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._tensors:
            raise InputError(f"the weights lack {name!r}, which quantization_config asks for")
        tensor: np.ndarray = self._tensors[name]
        if tensor.dtype != np.uint8 or tensor.shape != shape:
            rule = f"must be uint8 and {shape}"
            raise InputError(f"weight {name!r} is {tensor.dtype.name} and {tensor.shape}, {rule}")
        return tensor
