"""Readers for bytes that anybody may have written: JSON, array types and .npz files, each bounded before it
is read.

NumPy's own readers are not for strangers: a type's name alone ("m8[s/0]") ends the process, and an array's
header says how much memory is taken. Nothing here imports, calls or unpickles what the bytes name.
"""

import ast
import json
import math
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.checks import InputError, shown

MAX_JSON_DEPTH = 32  # lists and objects inside each other
MAX_ARCHIVE_BYTES = 2**32  # of all arrays of an .npz file together, unpacked
MAX_ARRAYS = 4096  # in an .npz file
NPY_MAGIC = b"\x93NUMPY"
HEADER_KEYS = {"descr", "fortran_order", "shape"}

# The types of numbers that an array may have, by their names.
DTYPES: dict[str, np.dtype] = {
    dtype.name: dtype
    for dtype in (
        *(np.dtype(name) for name in ("bool", "float16", "float32", "float64")),
        *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4)),
        *(np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
    )
}
# The same as .npy files call them, little-endian.
_DESCRIPTIONS = {dtype.str: dtype for dtype in DTYPES.values() if dtype.isbuiltin == 1}
_TEXT = re.compile(r"<U([0-9]{1,9})")
_TOKENS = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL
)  # strings, and brackets outside of them


def dtype_named(name: object) -> np.dtype:
    """Return the type of numbers of this name. Raises `InputError` for any other name."""
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"dtype={shown(name)} must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def read_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON whose lists and objects are at most `MAX_JSON_DEPTH` deep.

    Raises `InputError` for text that is deeper, no JSON, or not UTF-8. The depth is counted before parsing:
    brackets inside strings do not count.
    """
    try:
        text = text if isinstance(text, str) else bytes(text).decode()
        if _depth(text) > MAX_JSON_DEPTH:
            raise InputError(f"JSON must have at most {MAX_JSON_DEPTH} lists and objects inside each other")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"JSON cannot be read: {error}") from error


def _depth(text: str) -> int:
    """Return how deep brackets are nested, those of strings left out."""
    depth = deepest = 0
    for match in _TOKENS.finditer(text):
        first = match.group()[0]
        depth += (first in "[{") - (first in "]}")
        deepest = max(deepest, depth)
    return deepest


def read_npz(path: str | os.PathLike[str], max_bytes: int = MAX_ARCHIVE_BYTES) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name: numbers of `DTYPES` that NumPy has itself, or text.

    path: a file as `np.savez` writes it.
    max_bytes: bound on the bytes of all arrays together. What the archive says of its sizes is checked before
        anything is unpacked, and no more than that is unpacked.

    Raises `InputError` for a file that announces more, or holds other types; for a damaged one what zipfile,
    zlib and `ast.literal_eval` raise; `OSError` if it cannot be opened.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        return _read_archive(archive, max_bytes)


def _read_archive(archive: zipfile.ZipFile, max_bytes: int) -> dict[str, np.ndarray]:
    members = archive.infolist()
    if len(members) > MAX_ARRAYS:
        raise InputError(f"the archive has {len(members)} arrays, must have at most {MAX_ARRAYS}")
    num_bytes = sum(member.file_size for member in members)
    if num_bytes > max_bytes:
        raise InputError(f"the archive's arrays have {num_bytes} bytes, must have at most {max_bytes}")
    arrays = {}
    for member in members:
        with archive.open(member) as content:
            arrays[member.filename.removesuffix(".npy")] = _read_array(content.read(member.file_size))
    return arrays


def _read_array(data: bytes) -> np.ndarray:
    """Return the array of an .npy file's bytes; its header is read as a literal, never evaluated."""
    version = data[len(NPY_MAGIC)] if data.startswith(NPY_MAGIC) and len(data) > len(NPY_MAGIC) else 0
    start = {1: 10, 2: 12, 3: 12}.get(version)
    if start is None or len(data) < start:
        raise ValueError("an array of the archive is no .npy file")
    end = start + int.from_bytes(data[8:start], "little")
    if end > min(len(data), 2**16):
        raise InputError("an array's header is longer than 64 KiB or than its file")
    header = ast.literal_eval(data[start:end].decode("latin1"))
    if not isinstance(header, Mapping) or header.keys() != HEADER_KEYS:
        raise InputError(f"an array's header is {shown(header)}")
    dtype, shape = _described(header["descr"]), header["shape"]
    is_shape = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or len(shape) > 16 or header["fortran_order"] not in (True, False):
        raise InputError(f"an array's header is {shown(header)}")
    if math.prod(shape) * dtype.itemsize != len(data) - end:
        raise InputError(f"an array of {dtype.name}{shape} does not have {len(data) - end} bytes")
    array = np.frombuffer(data, dtype, offset=end)
    return array.reshape(shape, order="F" if header["fortran_order"] else "C").copy()


def _described(text: object) -> np.dtype:
    """Return the type that an .npy file's header names: one of `DTYPES`, or text of a fixed length."""
    if isinstance(text, str) and text in _DESCRIPTIONS:
        return _DESCRIPTIONS[text]
    if isinstance(text, str) and (match := _TEXT.fullmatch(text)):
        return np.dtype(("<U", int(match.group(1))))
    raise InputError(f"an array's type is {shown(text)}, must be a number or text")
