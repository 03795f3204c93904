"""Files of a Hugging Face directory beside its weights: JSON and a tokenizer."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, shown

POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer file
PROCESSORS = ("chat_template.json", "processor_config.json")  # files that may have a wrapper's chat template
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

# Special tokens that a class of tokenizers has where its files say nothing.
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

MAX_JSON_BYTES = 2**26  # the index of the largest models has some 10 MB


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file as `read_value` does. Raises `InputError` if it does not hold an object."""
    value = read_value(file)
    if not isinstance(value, dict):
        raise InputError(f"model={str(file.parent)!r}: {file.name} must be a JSON object")
    return value


def read_value(file: Path) -> Any:
    """Read a JSON file of at most `MAX_JSON_BYTES`; a byte-order mark may begin it. Raises `InputError`."""
    where = f"model={str(file.parent)!r}"
    if not file.is_file():
        raise InputError(f"{where} must contain a {file.name}{_instead(file.parent)}")
    refuse_pointer(file)
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise InputError(f"{where}: {file.name} has {size} bytes, must have at most {MAX_JSON_BYTES}")
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise InputError(f"{where}: {file.name} cannot be read as JSON: {error}") from error


def refuse_pointer(file: Path) -> None:
    """Raise `InputError` for a file in whose place lies Git LFS's pointer to it."""
    try:
        with file.open("rb") as opened:
            begins = opened.read(len(POINTER))
    except OSError:  # the reader reports the error
        return
    if begins == POINTER:
        raise InputError(
            f"model={str(file.parent)!r}: {file.name} is a Git LFS pointer, not the file itself: fetch that "
            "with git lfs pull"
        )


def _instead(path: Path) -> str:
    """Return what a directory without a config is for, as the end of a sentence."""
    gguf_names = sorted(file.name for file in path.glob("*.gguf"))
    if gguf_names:
        return f": it holds GGUF files, of which model names one, such as {str(path / gguf_names[0])!r}"
    if (path / "params.json").is_file():
        return ": it holds a model in its makers' own form (params.json), which is not read"
    return ""


def tokenizer(path: Path) -> Any:
    """Return the directory's tokenizer, one of transformers'; None where it has none.

    A tokenizer.json is taken as it stands: classes of transformers make some of its parts anew, and then give
    other ids. Code of its own is never run. Raises `InputError` if it cannot be read.
    """
    tokenizer_files = [path / name for name in TOKENIZERS if (path / name).is_file()]
    if not tokenizer_files:
        return None
    for file in tokenizer_files:
        refuse_pointer(file)
    transformers = import_transformers()
    try:
        made = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        made = _as_in_file(made, path) if (path / TOKENIZERS[0]).is_file() else made
    except Exception as error:  # errors of JSON, the tokenizers library and transformers
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model={str(path)!r}: its tokenizer is code of its own (auto_map), which is never run"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"model={str(path)!r}: its tokenizer cannot be read: {reason}") from error
    if not made.chat_template:
        made.chat_template = _template_of_processor(path)
    return made


def _template_of_processor(path: Path) -> str | dict[str, str] | None:
    """Return the chat template among a processor's settings, where wrappers have it, or several by name.

    Raises `InputError` for one that is no text.
    """
    for name in PROCESSORS:
        template = read_object(path / name).get("chat_template") if (path / name).is_file() else None
        if isinstance(template, list) and all(isinstance(each, dict) for each in template):
            template = {each.get("name"): each.get("template") for each in template}
        if not template:
            continue
        texts = [*template, *template.values()] if isinstance(template, dict) else [template]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(
                f"model={str(path)!r}: {name}: chat_template={shown(template)} must be a text, "
                "or texts by name"
            )
        return template
    return None


def _as_in_file(made: Any, path: Path) -> Any:
    """Return a tokenizer with tokenizer.json's own parts, and the special tokens that the class gives it."""
    plain = import_transformers().PreTrainedTokenizerFast
    if type(made) is plain:
        return made
    file, config = path / TOKENIZERS[0], path / "tokenizer_config.json"
    said = read_object(config) if config.is_file() else {}
    unsaid = {name: getattr(made, name, None) for name in SPECIAL if said.get(name) is None}
    unsaid = {name: token for name, token in unsaid.items() if token is not None}
    if unsaid:
        from tokenizers import Tokenizer

        known = Tokenizer.from_file(str(file)).get_vocab()
        unsaid = {name: token for name, token in unsaid.items() if token in known}
    return plain.from_pretrained(path, **unsaid)


def import_transformers() -> Any:
    """Import transformers without its announcement that PyTorch is missing, which is not needed here."""
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
