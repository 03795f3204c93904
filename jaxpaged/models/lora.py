"""Low-rank adapters: room for some beside a decoder's weights, and what is read into it from PEFT's files.

What an adapter adds to a product is found by PEFT's names, those of modules of Hugging Face's model, and
brought into the decoder's order of outputs. Its scale is part of b.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxpaged.checks import InputError, check, checked_int, checked_number, shown
from jaxpaged.lora import LoRARequest
from jaxpaged.models.adapter_slots import products
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.files import hf, safetensors_files
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.names import TRANSPOSED, Form, Names, in_layer, layers_with, piece_shapes
from jaxpaged.models.patterns import Patterns
from jaxpaged.models.shards import Shard
from pallas_kernels import native
from pallas_kernels.ops import low_rank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROLES = ("qkv", "o", "gate_up", "up", "down")
# Config fields that would change more than products' outputs, with their neutral values.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
}
# Initialisations that also change the model's own weights.
CHANGING_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
FRONT = "base_model.model."
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

type Arrays = Mapping[
    str, tuple[np.ndarray, np.ndarray]
]  # by role: a and b of one adapter, packed as in `LowRank`


class Room(NamedTuple):
    """For adapters of one role."""

    in_features: int
    widths: tuple[int, ...]  # of the pieces that Hugging Face has it in
    modules: tuple[str, ...]  # module names, with "{layer}" for the layer's number


def rooms(config: ModelConfig, names: Names) -> dict[str, Room]:
    """Return, by role, the products that adapters may change: not those of experts, nor the head, nor what
    only some of the layers have.
    """
    shapes, slots = in_layer(config), {}
    for role in ROLES:
        shape = shapes.get(f"{role}.weight")
        if shape is not None and len(layers_with(config, role)) == config.num_layers:
            modules = tuple(name.removesuffix(".weight") for name in names.pieces(f"{role}.weight"))
            pieces = piece_shapes(config, role, shape, len(modules))
            slots[role] = Room(shape[1], tuple(width for width, _ in pieces), modules)
    return slots


def make_room(model: Decoder, names: Names, num_adapters: int, rank: int) -> None:
    """Let the model's products have so many adapters of at most this rank, which add nothing yet."""
    native.serves(model.dtype, "low_rank")  # registers the target, also for programs from disk
    adaptable = products(model)
    for role, room in rooms(model.config, names).items():
        sizes = _sizes(model.config, room, num_adapters, adaptable[role].num_pieces)
        adaptable[role].adapters = AdapterParam(low_rank.zeros(*sizes, rank, model.dtype))


def _sizes(
    config: ModelConfig, room: Room, num_adapters: int, num_pieces: int
) -> tuple[int, int, int, tuple[int, ...]]:
    """Return the first sizes of `low_rank.zeros`: each piece of a layer's inputs has matrices of its own."""
    return config.num_layers * num_pieces, num_adapters, room.in_features // num_pieces, room.widths


def nothing(
    config: ModelConfig, names: Names, rank: int, dtype: jnp.dtype, shard: Shard | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return the arrays of an adapter that changes nothing; `config` is the shard's."""

    def of(role: str, room: Room) -> tuple[np.ndarray, np.ndarray]:
        sizes = _sizes(config, room, 1, _num_pieces(role, shard))
        one = jax.eval_shape(lambda: low_rank.zeros(*sizes, rank, dtype))
        a, b = (np.zeros((x.shape[0], *x.shape[2:]), dtype) for x in (one.a, one.b))
        return a, b

    return {role: of(role, room) for role, room in rooms(config, names).items()}


def _num_pieces(role: str, shard: Shard | None) -> int:
    return 1 if shard is None else len(shard.pieces(f"{role}.weight"))


def read(
    request: LoRARequest,
    config: ModelConfig,
    names: Names,
    max_rank: int,
    dtype: jnp.dtype,
    shard: Shard | None = None,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read an adapter's arrays; with `shard` those of that shard.

    Raises `InputError`, one sentence, if it is not for this model, or none.
    """
    path = Path(request.lora_path)
    try:
        return _read(path, config, names, max_rank, dtype, shard)
    except InputError as error:
        said = str(error).removeprefix(f"model={str(path)!r}").removeprefix(":").lstrip()
        raise InputError(f"lora_path={str(path)!r}: {said}") from error


def _read(
    path: Path, config: ModelConfig, names: Names, max_rank: int, dtype: jnp.dtype, shard: Shard | None
) -> dict[str, Any]:
    for file in (CONFIG, WEIGHTS):
        if not (path / file).is_file():
            raise InputError(f"there must be a directory with {file}")
    adapter_config = _AdapterConfig(hf.read_object(path / CONFIG))
    narrow = config if shard is None else shard.config
    arrays, narrow_locations = nothing(narrow, names, max_rank, dtype, shard), dict(_locations(narrow, names))
    widths = {role: room.widths for role, room in rooms(config, names).items()}
    for location, (module, sides) in _found(path, config, names):
        rank, scale = adapter_config.rank_and_scale(module)
        check(f"the rank of {module!r}", rank, f"at most max_lora_rank={max_rank}", rank <= max_rank)
        a = _checked(f"{module}.lora_A", sides["A"], (rank, location.in_features))
        b = _checked(f"{module}.lora_B", sides["B"], (location.width, rank)) * np.float32(scale)
        form = names.forms.get(f"{location.role}.weight")
        if form is not None and form is not TRANSPOSED:  # transposing does not reorder b
            b = _restored(form, config, widths[location.role], location.piece, b)
        if shard is not None:
            a, b = _of_shard(shard, location, widths[location.role], a, b)
            location = narrow_locations[module]
        packed_b = low_rank.pack(b.T).astype(dtype)
        if not np.isfinite(packed_b.astype(np.float32)).all():
            raise InputError(f"{module}.lora_B, scaled by {scale:g}, must be finite in {dtype.name}")
        inputs = np.split(a.T, _num_pieces(location.role, shard))
        for number, input_rows in enumerate(inputs, start=location.layer * len(inputs)):
            all_a, all_b = (x[number] for x in arrays[location.role])
            packed_a = low_rank.pack(input_rows).astype(dtype)
            all_a[location.piece * low_rank.num_panels(max_rank) :][: len(packed_a)] = packed_a
            all_b[location.first_panel :][: len(packed_b), :rank] = packed_b
    return arrays


def _restored(
    form: Form, config: ModelConfig, widths: tuple[int, ...], piece: int, b: np.ndarray
) -> np.ndarray:
    """Return one piece's b with its outputs in the decoder's order."""
    if len(widths) == 1:
        return np.concatenate(form.restored(config, [b]))
    pieces = [np.zeros((width, b.shape[1]), b.dtype) for width in widths]
    pieces[piece] = b
    return form.restored(config, pieces)[piece]


def _of_shard(
    shard: Shard, location: "_Location", widths: tuple[int, ...], a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slices of A and B for one shard of a module."""
    outputs, inputs = shard.ranges(f"{location.role}.weight", (sum(widths), location.in_features))
    first = sum(widths[: location.piece])
    if inputs is not None:
        a = a[:, slice(*inputs)]
    if outputs is not None:
        slices = [slice(max(start - first, 0), max(stop - first, 0)) for start, stop in outputs]
        b = np.concatenate([b[each] for each in slices])
    return a, b


class _Location(NamedTuple):
    """The location of a module's matrices in the arrays."""

    role: str
    layer: int
    piece: int
    in_features: int
    width: int
    first_panel: int  # first panel of b


def _locations(config: ModelConfig, names: Names) -> Iterator[tuple[str, _Location]]:
    """Yield each module's name and its location in the arrays."""
    for role, room in rooms(config, names).items():
        first = 0
        for piece, (module, width) in enumerate(zip(room.modules, room.widths, strict=True)):
            for layer in range(config.num_layers):
                location = _Location(role, layer, piece, room.in_features, width, first)
                yield module.format(layer=layer), location
            first += low_rank.num_panels(width)


def _found(
    path: Path, config: ModelConfig, names: Names
) -> Iterator[tuple[_Location, tuple[str, dict[str, np.ndarray]]]]:
    """Yield each module's location in the arrays, its name and its two matrices.

    Modules outside of the decoder, such as those of a vision tower, are left out, as the model's own are.
    """
    tensors, locations = safetensors_files.load(path), dict(_locations(config, names))
    modules: dict[str, dict[str, np.ndarray]] = {}
    unread = {name for name in tensors if names.is_spare(name.removeprefix(FRONT))}
    if unread:
        logging.warning("%s: %d tensors are left out: %s, ...", path, len(unread), min(unread))
    for name in tensors:
        if name in unread:
            continue
        match = TENSOR.fullmatch(name)
        module = match["module"] if match else name
        possible = (module, names.prefix + module, names.name_of(module))
        whole = next((each for each in possible if each in locations), None)
        if match is None or whole is None:
            roles = sorted({each.rpartition(".")[2] for each in locations})
            raise InputError(
                f"{shown(name)} must be lora_A or lora_B of {', '.join(roles)} in a layer of the model"
            )
        modules.setdefault(whole, {})[match["side"]] = tensors[name]
    if not modules:
        rest = " of the model's text part" if unread else ""
        raise InputError(f"{WEIGHTS} must have at least one tensor{rest}")
    for module, sides in modules.items():
        if missing := {"A", "B"} - sides.keys():
            raise InputError(f"{module!r} lacks its lora_{min(missing)}")
        yield locations[module], (module, sides)


def _checked(name: str, matrix: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the matrix in float32. Raises `InputError` for another shape or type."""
    if matrix.shape != shape:
        raise InputError(f"{name} has shape {matrix.shape}, must be {shape}")
    if matrix.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(f"{name} has type {matrix.dtype.name}, must be float32, bfloat16 or float16")
    wide = np.asarray(matrix, np.float32)
    if not np.isfinite(wide).all():
        raise InputError(f"{name} has NaN or infinity in it, must be finite")
    return wide


class _AdapterConfig:
    """The contents of adapter_config.json, checked."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        check(f"{CONFIG}: peft_type", fields.get("peft_type"), "'LORA'", fields.get("peft_type") == "LORA")
        for name, neutral in NEUTRAL.items():
            value = fields.get(name)
            rule = f"{neutral[0]!r}: more is not supported"
            check(f"{CONFIG}: {name}", value, rule, value is None or value in neutral)
        began = fields.get("init_lora_weights")
        changes = isinstance(began, str) and began.lower().startswith(CHANGING_WEIGHTS)
        check(f"{CONFIG}: init_lora_weights", began, "one that leaves the model's weights alone", not changes)
        self._fields = fields
        self._patterns = {
            name: Patterns(f"{CONFIG}: {name}", fields.get(name) or {})
            for name in ("rank_pattern", "alpha_pattern")
        }

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of one module, by the patterns if one matches."""
        rank = checked_int(f"{CONFIG}: r", self._of(module, "rank_pattern", "r", 8), "a positive int", 1)
        alpha = self._of(module, "alpha_pattern", "lora_alpha", 8)
        alpha = checked_number(f"{CONFIG}: lora_alpha", alpha, "a number", -math.inf)
        return rank, alpha / (math.sqrt(rank) if self._fields.get("use_rslora") else rank)

    def _of(self, module: str, patterns: str, name: str, default: int) -> Any:
        return self._patterns[patterns].value(module, self._fields.get(name, default))
