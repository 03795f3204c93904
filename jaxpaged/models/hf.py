"""What a Hugging Face directory holds beside its weights: JSON files and a tokenizer."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file holds, which must be an object. Raises `InputError`."""
    where = f"model={str(file.parent)!r}"
    if not file.is_file():
        raise InputError(f"{where} must contain a {file.name}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise InputError(f"{where}: {file.name} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: {file.name} must be a JSON object")
    return value


def tokenizer(path: Path) -> Any:
    """The directory's tokenizer, one of transformers'; None where it has none. Its own code is never run."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # of JSON, of the tokenizers library, of transformers
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model={str(path)!r}: its tokenizer is code of its own (auto_map), which is never run"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"model={str(path)!r}: its tokenizer cannot be read: {reason}") from error


def import_transformers() -> Any:
    """Transformers, without the announcement that PyTorch is missing: here that is as it should be."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
