"""Config and weights from one GGUF file, without PyTorch.

The `gguf` package parses the file and dequantises; here its metadata becomes a Hugging Face config, which the
family reads as any other. The names of llama.cpp's tensors are the same in most families.

llama.cpp keeps no sliding window for the architectures "llama", "qwen2" and "starcoder2": a file that it made
of a Mistral does not say that the model has one, and a token then sees all before it, here as there. A window
that a file does name is used.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import ARCHITECTURES, of_architecture
from jaxpaged.models.families.family import Family, Gguf, Metadata, rope_scaling
from jaxpaged.models.fields import Fields
from jaxpaged.models.files.gguf import blocks
from jaxpaged.models.files.gguf.ends import end_tokens
from jaxpaged.models.files.gguf.keys import check_keys
from jaxpaged.models.files.gguf.reader import TOKENS, GgufFile, field, read_header
from jaxpaged.models.lengths import lengthened
from jaxpaged.models.names import Names
from jaxpaged.models.overrides import check_read, overridden
from jaxpaged.models.quantised.codes import CodedRows, CodeFormat, TensorSlice
from jaxpaged.models.quantised.on_load import EXPERTS, FromFile
from jaxpaged.models.ropes import LinearScaling, LongScaling

BLOCK = "blk.{layer}"
TABLE: dict[str, str | tuple[str, ...]] = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "embedding_norm": "token_embd_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "attention_norm": f"{BLOCK}.attn_norm",
    "qkv": (f"{BLOCK}.attn_q", f"{BLOCK}.attn_k", f"{BLOCK}.attn_v"),
    "q_norm": f"{BLOCK}.attn_q_norm",
    "k_norm": f"{BLOCK}.attn_k_norm",
    "sinks": f"{BLOCK}.attn_sinks.weight",
    "o": f"{BLOCK}.attn_output",
    "attention_out_norm": f"{BLOCK}.post_attention_norm",
    "mlp_norm": f"{BLOCK}.ffn_norm",
    "gate_up": (f"{BLOCK}.ffn_gate", f"{BLOCK}.ffn_up"),
    "up": f"{BLOCK}.ffn_up",
    "down": f"{BLOCK}.ffn_down",
    "router": f"{BLOCK}.ffn_gate_inp",
    "correction": f"{BLOCK}.exp_probs_b.bias",
    "experts.gate_up": (f"{BLOCK}.ffn_gate_exps", f"{BLOCK}.ffn_up_exps"),
    "experts.down": f"{BLOCK}.ffn_down_exps",
    "shared.gate_up": (f"{BLOCK}.ffn_gate_shexp", f"{BLOCK}.ffn_up_shexp"),
    "shared.down": f"{BLOCK}.ffn_down_shexp",
    "shared_gate": f"{BLOCK}.ffn_gate_inp_shexp",
    "mlp_out_norm": f"{BLOCK}.post_ffw_norm",
}
# Hugging Face's fields, with llama.cpp's metadata of the same meaning in all architectures.
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
# Tensors of divisors of RoPE's frequencies: for all sequences, for short ones and for long ones.
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
MOST_BEYOND = 8
# Keys of windows, by the fields that they become.
PATTERN = "attention.sliding_window_pattern"
WINDOWS = {"sliding_window": "attention.sliding_window", "layer_types": PATTERN}
LAYER_NORM = "attention.layer_norm_epsilon"
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def open_file(path: Path) -> GgufFile:
    """Parse the file's header. Raises `InputError` if it is not a whole GGUF file of a known architecture."""
    reader = read_header(path)
    family(reader, path)
    return reader


def family(reader: GgufFile, path: Path) -> tuple[Family, Gguf]:
    """Return the family of the file's architecture. Raises `InputError` if it is unknown."""
    architecture = field(reader, path, "general.architecture")
    known = of_architecture(architecture, {tensor.name for tensor in reader.tensors})
    if known is None:
        names = ", ".join(map(repr, ARCHITECTURES))
        raise InputError(f"model={str(path)!r}: general.architecture={architecture!r} must be one of {names}")
    return known


def model_config(reader: GgufFile, path: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the description that a file's header gives.

    overrides: what a user says in place of the Hugging Face config that the header becomes.
    """
    known, entry = family(reader, path)

    def read(name: str) -> Any:
        return reader.get(f"{entry.architecture}.{name}")

    used: set[str] = set()

    def use(name: str) -> Any:
        used.add(name)
        return read(name)

    tensors = {tensor.name for tensor in reader.tensors}
    keys = FIELDS | dict(entry.metadata)
    said = {ours: read(theirs) for ours, theirs in keys.items()}
    epsilon = LAYER_NORM if LAYER_NORM in entry.metadata.values() else FIELDS["rms_norm_eps"]
    for theirs in (*(FIELDS[ours] for ours in REQUIRED), epsilon):
        field(reader, path, f"{entry.architecture}.{theirs}")
    has_bias = not tensors.isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
    said |= {
        "vocab_size": len(field(reader, path, TOKENS)),
        "tie_word_embeddings": "output.weight" not in tensors,
        **dict.fromkeys(("attention_bias", "bias", "use_bias", "use_qkv_bias", "qkv_bias"), has_bias),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "sliding_window": read("attention.sliding_window") or None,
        "eos_token_id": end_tokens(reader, path),
    }
    scaling = rope_scaling(read)
    scalings = {"none": None, "linear": scaling if scaling["factor"] else None, "yarn": scaling}
    if LONG_FACTORS in tensors:  # the factors are all that the file has
        scalings["longrope"] = None
    rule = f"one of {', '.join(map(repr, scalings))}"
    kind = "none" if scaling["rope_type"] == "default" else scaling["rope_type"]
    check(f"model={str(path)!r}: rope.scaling.type", kind, rule, kind in scalings)
    said["rope_scaling"] = scalings[kind]
    # Hugging Face's defaults do not hold for llama.cpp: a missing field means its absence.
    said |= entry.fields(use)
    if PATTERN not in used and read(PATTERN) is not None:
        said["layer_types"] = _layer_types(path, read(PATTERN), said["num_hidden_layers"])
    fields = Fields(overridden(said, overrides or {}))
    config = (entry.read or known.read)(fields)
    check_read(fields, overrides or {})
    if not known.has_final_length:
        config = lengthened(config)
    config = _with_factors(reader, path, config, use)
    used |= {theirs for ours, theirs in (keys | WINDOWS).items() if fields.has_read(ours)}
    if fields.has_read("rope_scaling"):
        rope_scaling(use)
        used.add("rope.scale_linear")  # the newer name goes first
    begin = f"{entry.architecture}."
    header = {name.removeprefix(begin): reader.get(name) for name in reader.fields if name.startswith(begin)}
    check_keys(header, path, entry.architecture, used, config)
    return config


def _layer_types(path: Path, pattern: object, num_layers: int) -> list[str]:
    """Return layers' types, which a file names one by one, or says of how many the last has no window."""
    if isinstance(pattern, list):
        rule = f"a number, or {num_layers} of which each says whether a layer has a window"
        check(f"model={str(path)!r}: {PATTERN}", pattern, rule, len(pattern) >= num_layers)
        has_window = [bool(each) for each in pattern[:num_layers]]
    else:
        every = checked_int(f"model={str(path)!r}: {PATTERN}", pattern, "an int >= 0, or a list", 0)
        has_window = [every == 0 or i % every < every - 1 for i in range(num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in has_window]


def _with_factors(reader: GgufFile, path: Path, config: ModelConfig, read: Metadata) -> ModelConfig:
    """Return the config with the file's divisors of RoPE's frequencies: for Llama 3.1 and Phi-3."""
    weights = load_weights(reader, path)

    def factors(name: str) -> tuple[float, ...]:
        values = tuple(float(factor) for factor in weights[name])
        check(f"model={str(path)!r}: {name}", values, "numbers > 0", all(value > 0 for value in values))
        return values

    if ROPE_FACTORS in weights:
        same = factors(ROPE_FACTORS)
        scaling = LongScaling(short_factors=same, long_factors=same, original_max_len=config.max_model_len)
    elif LONG_FACTORS in weights and SHORT_FACTORS in weights:
        scaling = LongScaling(
            short_factors=factors(SHORT_FACTORS),
            long_factors=factors(LONG_FACTORS),
            original_max_len=read("rope.scaling.original_context_length") or config.max_model_len,
            attention_factor=read("rope.scaling.attn_factor") or 1.0,
        )
    else:
        return config

    def scaled(kind: LayerKind) -> LayerKind:
        if kind.rope is None:
            return kind
        new_scaling, before = scaling, kind.rope.scaling
        if isinstance(before, LinearScaling):  # a common factor beside the factor of each frequency
            short, long = (
                tuple(before.factor * factor for factor in factors)
                for factors in (scaling.short_factors, scaling.long_factors)
            )
            new_scaling = dataclasses.replace(scaling, short_factors=short, long_factors=long)
        elif before is not None:
            raise InputError(
                f"model={str(path)!r}: {ROPE_FACTORS} must not be there with rope.scaling.type=yarn"
            )
        return dataclasses.replace(kind, rope=dataclasses.replace(kind.rope, scaling=new_scaling))

    return dataclasses.replace(config, layers=tuple(map(scaled, config.layers)))


def names(reader: GgufFile, path: Path) -> Names:
    """Return what the file calls the weights, and in which form they lie in it.

    Experts' weights lie side by side in one tensor, of which each is a weight of its own here: so they can be
    kept quantised, and no more of a tensor is dequantised than one expert's.
    """
    entry, config = family(reader, path)[1], model_config(reader, path)
    # In some families, blocks after the last layer predict further tokens.
    beyond = tuple(f"{BLOCK}.".format(layer=config.num_layers + i) for i in range(MOST_BEYOND))
    whole = Names(
        table=TABLE | dict(entry.names),
        forms=entry.forms,
        spare=(ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS),
        ignored=beyond if reader.fields.get(f"{entry.architecture}.nextn_predict_layers") else (),
    )
    roles = [f"{role}.weight" for role in EXPERTS]
    alone = {role: tuple(_of_expert(name, "{expert}") for name in whole.pieces(role)) for role in roles}
    return dataclasses.replace(whole, table=dict(whole.table) | alone)


def _of_expert(name: str, expert: int | str) -> str:
    return f"{name.removesuffix('.weight')}.{expert}.weight"


class _Stored(NamedTuple):
    """A tensor as it lies in the file: its rows, or bytes of its blocks."""

    data: np.ndarray
    tensor_type: gguf.GGMLQuantizationType


def _stored(reader: GgufFile) -> dict[str, _Stored]:
    """Return all tensors by name, with one entry for each expert."""
    stored = {}
    for tensor in reader.tensors:
        if tensor.data.ndim == 3 and tensor.name.endswith(".weight"):
            for i, data in enumerate(tensor.data):
                stored[_of_expert(tensor.name, i)] = _Stored(data, tensor.tensor_type)
        else:
            stored[tensor.name] = _Stored(tensor.data, tensor.tensor_type)
    return stored


def load_weights(reader: GgufFile, path: Path) -> Mapping[str, np.ndarray]:
    """Return all tensors by name, each dequantised to float32 when it is asked for."""
    return _Tensors(reader, path)


def quantisation(reader: GgufFile) -> FromFile:
    """Return what keeps the file's quantised weights as they are."""
    tensors = _stored(reader)

    def kind_of(name: str, shape: tuple[int, ...]) -> CodeFormat | None:
        return blocks.FORMATS.get(tensors[name].tensor_type.name) if name in tensors else None

    def rows_of(name: str, shape: tuple[int, ...], part: TensorSlice) -> CodedRows:
        tensor = tensors[name]
        stored_shape = blocks.shape_of(tensor.data, tensor.tensor_type.name)
        if stored_shape != shape:
            raise InputError(f"weight {name!r} has shape {stored_shape}, must be {shape}")
        return blocks.part_of(tensor.data, tensor.tensor_type.name, name, part)

    return FromFile(kind_of, rows_of)


class _Tensors(Mapping[str, np.ndarray]):
    def __init__(self, reader: GgufFile, path: Path) -> None:
        self._tensors, self._path = _stored(reader), path

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, NotImplementedError) as error:
            raise InputError(f"model={str(self._path)!r}: tensor {name!r} cannot be read: {error}") from error
        return np.asarray(values, np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
