"""Numbers of pooling models as bytes, in types and orders of vLLM's: servers write them, clients read."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxpaged.checks import checked_choice

type EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
type Endianness = Literal["native", "big", "little"]
EMBED_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
ENDIANNESS = ("native", "big", "little")
_OF_SIZE: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


@dataclasses.dataclass
class MetadataItem:
    """A place of one text's numbers in a body of bytes: bytes [start, end), of this type, order and shape."""

    index: int
    embed_dtype: EmbedDtype
    endianness: Endianness
    start: int
    end: int
    shape: tuple[int, ...]


def to_bytes(values: Any, embed_dtype: str = "float32", endianness: str = "native") -> bytes:
    """Return numbers as bytes of a type and an order. Raises `InputError` for one that is not known."""
    numbers = np.asarray(values, np.float32).astype(_dtype(embed_dtype))
    raw = np.ascontiguousarray(numbers).view(_OF_SIZE[numbers.itemsize])
    return (raw.byteswap() if _is_swapped(endianness) else raw).tobytes()


def from_bytes(
    binary: bytes, shape: tuple[int, ...], embed_dtype: str = "float32", endianness: str = "native"
) -> np.ndarray:
    """Return the array of such bytes, in its own type. Raises `InputError`."""
    dtype = _dtype(embed_dtype)
    raw = np.frombuffer(binary, _OF_SIZE[dtype.itemsize])
    return (raw.byteswap() if _is_swapped(endianness) else raw).view(dtype).reshape(shape)


def build_metadata_items(
    embed_dtype: EmbedDtype, endianness: Endianness, shape: tuple[int, ...], n_request: int
) -> list[MetadataItem]:
    """Return the byte ranges of `n_request` arrays of one shape that follow one another."""
    size = math.prod(shape) * _dtype(embed_dtype).itemsize
    return [
        MetadataItem(i, embed_dtype, endianness, i * size, (i + 1) * size, shape) for i in range(n_request)
    ]


def joined(
    arrays: Sequence[np.ndarray], embed_dtype: EmbedDtype, endianness: Endianness
) -> tuple[bytes, list[MetadataItem]]:
    """Return the bytes of several arrays, and the place of each."""
    parts = [to_bytes(array, embed_dtype, endianness) for array in arrays]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    places = [
        MetadataItem(i, embed_dtype, endianness, end - len(part), end, array.shape)
        for i, (array, part, end) in enumerate(zip(arrays, parts, ends, strict=True))
    ]
    return b"".join(parts), places


def binary2tensor(binary: bytes, shape: tuple[int, ...], embed_dtype: str, endianness: str) -> Any:
    """Return bytes as a tensor of torch, which must be installed, in their type. Raises `InputError`."""
    import torch

    array = from_bytes(binary, shape, embed_dtype, endianness)
    types = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    raw = array.view({1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize])
    return torch.from_numpy(raw.copy()).view(getattr(torch, types.get(embed_dtype, embed_dtype)))


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[Any]:
    """Return the texts' numbers in a body of the server as tensors of torch, in the order of the texts."""
    return [
        binary2tensor(body[item.start : item.end], tuple(item.shape), item.embed_dtype, item.endianness)
        for item in sorted(items, key=lambda item: item.index)
    ]


def _dtype(name: str) -> np.dtype[Any]:
    return EMBED_DTYPES[checked_choice("embed_dtype", name, tuple(EMBED_DTYPES))]


def _is_swapped(endianness: str) -> bool:
    return checked_choice("endianness", endianness, ENDIANNESS) not in ("native", sys.byteorder)
