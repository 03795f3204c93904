"""Messages between processes: plain values and arrays as bytes, and back. Nothing in them is code.

A message is the length of a JSON text (8 bytes, big-endian), the text, and the bytes of all arrays one after
the other. The text has a pair [form, content] for each value: "=" a plain one, "list", "tuple", "dict" of
others, "array" or "number" (a NumPy scalar) with type and shape, and "of" one of the frozen dataclasses that
both ends have listed, by its name.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, shown
from jaxpaged.untrusted import dtype_named, read_json

LENGTH_BYTES = 8
PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, classes: Sequence[type] = ()) -> list[bytes | memoryview]:
    """Return a message in chunks.

    value: None, numbers, text, NumPy arrays, lists, tuples, mappings with text for keys, and frozen
    dataclasses of
        `classes`, inside each other.

    Raises `TypeError` for anything else.
    """
    arrays: list[memoryview] = []
    text = json.dumps(_described(value, {kind.__name__: kind for kind in classes}, arrays)).encode()
    return [len(text).to_bytes(LENGTH_BYTES, "big"), text, *arrays]


def _described(value: Any, classes: Mapping[str, type], arrays: list[memoryview]) -> list[Any]:
    def each(values: Any) -> list[Any]:
        return [_described(one, classes, arrays) for one in values]

    if type(value) in PLAIN:
        return ["=", value]
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        dtype_named(array.dtype.name)
        arrays.append(memoryview(array.reshape(-1).view(np.uint8)))
        return ["array" if isinstance(value, np.ndarray) else "number", array.dtype.name, np.shape(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, each(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return ["dict", list(value), each(value.values())]
    if classes.get(type(value).__name__) is type(value):
        return ["of", type(value).__name__, each(getattr(value, name) for name in _fields(type(value)))]
    raise TypeError(f"a value of type {type(value).__name__} cannot go into a message")


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def decode(data: bytes | bytearray, classes: Sequence[type] = ()) -> Any:
    """Return the value of a message. Raises `InputError` for anything that `encode` has not made."""
    try:
        start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        described = read_json(data[LENGTH_BYTES:start])
        reader = _Reader(memoryview(data)[start:], {kind.__name__: kind for kind in classes})
        value = reader.value(described)
        if reader.rest:
            raise InputError(f"{len(reader.rest)} bytes are left")
        return value
    except InputError as error:
        raise InputError(f"a message cannot be read: {error}") from error
    except Exception as error:  # values of any type where others belong
        raise InputError(f"a message cannot be read: {type(error).__name__}: {error}") from error


@dataclasses.dataclass
class _Reader:
    """Makes values of their descriptions; `rest` are the bytes of arrays that are still to come."""

    rest: memoryview
    classes: Mapping[str, type]

    def value(self, described: Any) -> Any:
        form, *content = described
        if form == "=" and len(content) == 1 and type(content[0]) in PLAIN:
            return content[0]
        if form in ("array", "number"):
            array = self._array(*content)
            return array if form == "array" else array.reshape(())[()]
        if form in ("list", "tuple"):
            [values] = content
            return (list if form == "list" else tuple)(map(self.value, values))
        if form == "dict":
            keys, values = content
            return {str(key): self.value(one) for key, one in zip(keys, values, strict=True)}
        if form == "of" and content[0] in self.classes:
            kind, values = self.classes[content[0]], content[1]
            return kind(**{name: self.value(one) for name, one in zip(_fields(kind), values, strict=True)})
        raise InputError(f"{shown(described)} describes no value")

    def _array(self, dtype_name: Any, shape: Any) -> np.ndarray:
        dtype = dtype_named(dtype_name)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise InputError(f"shape={shown(shape)} must be sizes")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self.rest):
            raise InputError(f"an array of {dtype_name}{shown(shape)} has more than {len(self.rest)} bytes")
        flat, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return np.frombuffer(flat, np.uint8).view(dtype).reshape(shape).copy()
