"""EAGLE-3 heads as they are published: a directory with a config and safetensors."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, is_int, shown
from jaxpaged.models import loading
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.drafting.description import DraftHead
from jaxpaged.models.drafting.stored import StoredHead
from jaxpaged.models.families import llama
from jaxpaged.models.fields import Fields
from jaxpaged.models.files import hf, safetensors_files
from jaxpaged.models.names import Names, Tensors, without_prefix
from jaxpaged.models.quantised.on_load import on_load

LAYER = "layers.{layer}"
OFFSETS = "d2t"  # of each of the head's choices: the model's token, less the choice's number
TAPS = "eagle_aux_hidden_state_layer_ids"
NAMES = Names(
    table={
        "embedding": "embed_tokens",
        "norm": "norm",
        "lm_head": "lm_head",
        "fuse": "fc",
        "fuse_norm": "input_norm",
        "hidden_norm": "layers.0.hidden_norm",
        "attention_norm": f"{LAYER}.input_layernorm",
        "qkv": tuple(f"{LAYER}.self_attn.{x}_proj" for x in "qkv"),
        "o": f"{LAYER}.self_attn.o_proj",
        "mlp_norm": f"{LAYER}.post_attention_layernorm",
        "gate_up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        "down": f"{LAYER}.mlp.down_proj",
    },
    inside=(("model.midlayer.", "layers.0."), ("midlayer.", "layers.0."), ("model.", "")),
    ignored=(OFFSETS, "t2d"),
)
DEFAULTS = {"max_position_embeddings": 2048}
# Fields of configs that make another arithmetic than ours, with what is neutral.
NEUTRAL = {"fc_norm": False, "parallel_drafting": False, "use_aux_hidden_state": True}


def open_head(name: str, served: ModelConfig, quantization: str | None = None) -> StoredHead:
    """Find a head for the served model: a directory, or a hub id. Raises `InputError`."""
    path = loading.resolve(name)
    check("model", name, "the directory or the hub id of an EAGLE-3 head", path.is_dir())
    rule = "None, 'int8', 'int4' or 'fp8' for a head that drafts"
    check("quantization", quantization, rule, quantization is None or on_load(quantization) is not None)
    said = hf.read_object(path / "config.json")
    tensors = without_prefix(NAMES, safetensors_files.load(path))
    try:
        config = described(said, tensors, served)
        targets = targets_of(config, tensors)
    except InputError as error:
        raise InputError(f"model={str(path)!r}: {error}") from error
    return StoredHead(path, config, NAMES, tensors, quantization, targets)


def described(said: Mapping[str, Any], names: Collection[str], served: ModelConfig) -> ModelConfig:
    """Return the description of a head for the served model, from its config and its tensors' names.

    Raises `InputError` for what no head is, and for whatever changes the arithmetic in a way that is not
    supported.
    """
    f = Fields(_spread(said), DEFAULTS)
    kind = f.get("model_type", "llama")
    check("model config: model_type", kind, "'llama' for a head that drafts", kind == "llama")
    config = llama.read_llama(f)
    f.refuse_rest()
    for name, neutral in NEUTRAL.items():
        f.only(name, neutral)
    layers = config.num_layers
    check("model config: num_hidden_layers", layers, "1 for a head that drafts", layers == 1)
    given, served_size = f.size("target_hidden_size", config.hidden_size), served.hidden_size
    what = "hidden_size" if f.get("target_hidden_size") is None else "target_hidden_size"
    rule = f"{served_size}, the served model's"
    check(f"model config: {what}", given, rule, given == served_size)
    if "embed_tokens.weight" not in names or "lm_head.weight" not in names:  # it shares the served model's
        check("model config: hidden_size", config.hidden_size, rule, config.hidden_size == served_size)
    vocab_size = config.vocab_size
    rule = f"{served.vocab_size}, the served model's"
    check("model config: vocab_size", vocab_size, rule, vocab_size == served.vocab_size)
    choices = f.size("draft_vocab_size", vocab_size)
    needs_all = OFFSETS not in names or "lm_head.weight" not in names
    rule = f"{vocab_size}, all tokens, without {OFFSETS} or lm_head" if needs_all else f"at most {vocab_size}"
    ok = choices == vocab_size or (choices < vocab_size and not needs_all)
    check("model config: draft_vocab_size", choices, rule, ok)
    behind = _behind(f, served.num_layers)
    head = DraftHead(
        kind="eagle3",
        behind=behind,
        reads_last=served.num_layers in behind,
        given_size=given,
        num_choices=choices,
        fuse_norm=f.flag("norm_before_fc"),
        norm_before_residual=f.flag("norm_before_residual"),
        hands_normed=f.flag("norm_output"),
        own_embedding="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
    )
    return dataclasses.replace(config, draft_head=head, eos_token_ids=(), tie_word_embeddings=False)


def targets_of(config: ModelConfig, tensors: Tensors) -> np.ndarray | None:
    """Return the model's tokens that a head chooses from; None: all, in their order. Raises `InputError`."""
    if OFFSETS not in tensors:
        return None
    assert config.draft_head is not None
    offsets, count = np.asarray(tensors[OFFSETS]), config.draft_head.num_choices
    is_one_each = offsets.shape == (count,) and offsets.dtype.kind == "i"
    what = f"{offsets.dtype.name}{list(offsets.shape)}"
    check(f"weight {OFFSETS!r}", what, f"integers, one for each of {count} choices", is_one_each)
    targets = offsets + np.arange(count)
    is_known = bool(targets.min() >= 0 and targets.max() < config.vocab_size)
    is_known = is_known and len(np.unique(targets)) == count
    rule = f"offsets to different tokens below {config.vocab_size}"
    check(f"weight {OFFSETS!r}", what, rule, is_known)
    return targets


def _spread(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the fields of its parts: of the layer in the form of `speculators`, of EAGLE's."""
    if (kind := said.get("speculators_model_type")) is not None:
        check("model config: speculators_model_type", kind, "'eagle3'", kind == "eagle3")
        said = {"norm_before_residual": True} | _part(said, "transformer_layer_config") | {**said}
        said["model_type"] = _part(said, "transformer_layer_config").get("model_type", "llama")
    return {**said} | _part(said, "eagle_config")


def _part(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = said.get(name) or {}
    if not isinstance(part, Mapping):
        raise InputError(f"model config: {name}={shown(part)} must be a JSON object or null")
    return dict(part)


def _behind(f: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the numbers of layers behind which hidden states are read: by default low, mid and high."""
    numbers = f.get(TAPS) or [2, num_layers // 2, num_layers - 3]
    is_some = isinstance(numbers, list) and all(is_int(each) and 0 <= each <= num_layers for each in numbers)
    rule = f"a list of different ints in [0, {num_layers}], numbers of the served model's layers"
    check(f"model config: {TAPS}", numbers, rule, is_some and len({*numbers}) == len(numbers))
    return tuple(sorted(numbers))
