"""GGUF files as they lie on disk: one file, or one in several parts, its header and its tensors.

llama.cpp's tool splits a large file into parts named `NAME-00001-of-00003.gguf`. The first has the header.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models.files import hf

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
TOKENS = "tokenizer.ggml.tokens"


class _Reader(gguf.GGUFReader):
    """Sees its mapped file as a plain array: slices of `np.memmap` take thrice as long, and a vocabulary has
    a quarter of a million.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)


class GgufFile:
    """A file's header and tensors; of one in parts those of all."""

    def __init__(self, paths: tuple[Path, ...], readers: list[gguf.GGUFReader]) -> None:
        self.paths = paths
        self.fields = readers[0].fields
        self.tensors = [tensor for reader in readers for tensor in reader.tensors]
        self._tokens: list[str] | None = None

    def get(self, name: str) -> Any:
        """Return what the header says under a name; None where it does not."""
        entry = self.fields.get(name)
        if entry is None:
            return None
        if name != TOKENS:
            return _value(self.paths[0], name, entry)
        if self._tokens is None:  # up to 250,000 tokens are decoded once
            self._tokens = _value(self.paths[0], name, entry)
        return self._tokens


def read_header(path: Path) -> GgufFile:
    """Parse a file's header, and those of its other parts.

    Raises `InputError` if it is not a whole GGUF file, or not the first of its parts, or if one is missing.
    """
    first = _read(path)
    count = _number(path, first, "split.count")
    if count <= 1:
        return GgufFile((path,), [first])
    paths = _parts(path, _number(path, first, "split.no"), count)
    readers = [first, *map(_read, paths[1:])]
    for number, (part, reader) in enumerate(zip(paths, readers, strict=True)):
        numbers = _number(part, reader, "split.no"), _number(part, reader, "split.count")
        if numbers != (number, count):
            rule = (
                f"must be part {number + 1} of {count}, its header says part {numbers[0] + 1} of {numbers[1]}"
            )
            raise InputError(f"model={str(path)!r}: {part.name} {rule}")
    file = GgufFile(paths, readers)
    if (whole := _number(path, first, "split.tensors.count")) != len(file.tensors):
        raise InputError(
            f"model={str(path)!r} must have {whole} tensors in its {count} parts, they have "
            f"{len(file.tensors)}"
        )
    return file


def _parts(path: Path, number: int, count: int) -> tuple[Path, ...]:
    """Return the files of all parts. Raises `InputError` where this is not the first, or one is missing."""
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        form = f"NAME-00001-of-{count:05}.gguf"
        raise InputError(f"model={str(path)!r} is the first of {count} parts: it must be called {form}")
    paths = tuple(path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if number != 0:
        raise InputError(
            f"model={str(path)!r} is part {number + 1} of {count}: give the first, {paths[0].name}, which "
            "finds the others"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise InputError(
            f"model={str(path)!r} is the first of {count} parts: {', '.join(missing)} must lie beside it"
        )
    return paths


def _number(path: Path, reader: gguf.GGUFReader, name: str) -> int:
    """Return an integer of the header, such as the number of parts; 0 if the header has no such key."""
    entry = reader.fields.get(name)
    value = 0 if entry is None else _value(path, name, entry)
    if not isinstance(value, int):
        raise InputError(f"model={str(path)!r}: {name}={value!r} must be an int")
    return value


def _value(path: Path, name: str, entry: gguf.ReaderField) -> Any:
    """Decode a value of a header. Raises `InputError` if it cannot be: text that is not UTF-8, say."""
    try:
        return entry.contents()
    except Exception as error:  # the reader has no error class of its own
        raise InputError(
            f"model={str(path)!r}: {name} of the GGUF file must be readable: {type(error).__name__}: {error}"
        ) from error


def _read(path: Path) -> gguf.GGUFReader:
    hf.refuse_pointer(path)
    try:
        reader = _Reader(path)
    except Exception as error:  # the reader has no error class of its own
        raise InputError(
            f"model={str(path)!r} must be a whole GGUF file: {type(error).__name__}: {error}"
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise InputError(
            f"model={str(path)!r} must be little-endian: its byte order is big-endian, for other machines; "
            "gguf-convert-endian, a command of the gguf package, turns it"
        )
    return reader


def field(reader: GgufFile, path: Path, name: str, default: Any = None) -> Any:
    """Return what a header says under a name, or the default. Raises `InputError` without either."""
    value = reader.get(name)
    if value is not None:
        return value
    if default is None:
        raise InputError(f"model={str(path)!r}: the GGUF file lacks {name!r}")
    return default
