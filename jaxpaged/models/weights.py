"""A decoder's weights by their role in it, made of a file's tensors one by one, as they are asked for.

A role has one shape in every model; `Names` says what a family's files call it, and in which form it lies
there.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.models import layers
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.form import form_of
from jaxpaged.models.quantised import Cut, Quantisation, Segment, zeros
from jaxpaged.parallel.shards import Shards
from pallas_kernels import native

type Shape = tuple[int, ...]
type Tensors = Mapping[str, Any]  # by the name in the file, read when asked for
type Pieces = list[np.ndarray]  # what a role is made of in a file: q, k and v, for example


@dataclasses.dataclass(frozen=True)
class Form:
    """How a role's weight lies in a file.

    `restored` gives the decoder's outputs in its order, in as many pieces as it takes for all to be views
    where they can: a share then reads its own alone.
    """

    stored: Callable[[ModelConfig, Shape], Shape]  # the shape there, from the one in the decoder
    restored: Callable[[ModelConfig, Pieces], Pieces]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """What the files of a family call things.

    `table`: by role, the names of its pieces, without ".weight" and ".bias"; or by role and ending, in full.
    "{layer}" and "{expert}" stand for numbers; experts without one lie side by side in one tensor. A file may
    lack `prefix` in all its names. `spare` are endings of tensors that are no weights.
    """

    table: Mapping[str, str | tuple[str, ...]]
    forms: Mapping[str, Form] = dataclasses.field(default_factory=dict)  # by role and ending
    prefix: str = ""
    spare: tuple[str, ...] = ()

    def pieces(self, role: str) -> tuple[str, ...]:
        """The names' templates of one role, with its ending."""
        names = self.table.get(role)
        if names is not None:
            return (names,) if isinstance(names, str) else names
        stem, _, ending = role.rpartition(".")
        names = self.table[stem]
        return tuple(f"{name}.{ending}" for name in ((names,) if isinstance(names, str) else names))


def once(config: ModelConfig) -> dict[str, Shape]:
    """The shapes of what a decoder has once, by role."""
    hidden, c = (config.hidden_size,), config
    shapes: dict[str, Shape] = {"embedding.weight": (c.vocab_size, *hidden)}
    if c.num_positions is not None:
        shapes["positions.weight"] = (c.num_positions, *hidden)
    if c.embedding_norm:
        shapes |= _norm("embedding_norm", hidden, c)
    shapes |= _norm("norm", hidden, c)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, *hidden)
    return shapes


def in_layer(config: ModelConfig) -> dict[str, Shape]:
    """The shapes of what each layer has, by role."""
    c, hidden, mlp = config, config.hidden_size, config.intermediate_size
    heads, kv_heads = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    before, after = c.norm_place in ("before", "both"), c.norm_place in ("after", "both")
    shapes: dict[str, Shape] = {}
    for name, exists in (
        ("attention_norm", before),
        ("attention_out_norm", after),
        ("mlp_norm", before and not c.shared_norm),
        ("mlp_out_norm", after),
    ):
        if exists:
            shapes |= _norm(name, (hidden,), c)
    shapes |= _linear("qkv", (heads + 2 * kv_heads, hidden), c.qkv_bias)
    shapes |= _linear("o", (hidden, heads), c.o_bias)
    if c.qk_norm is not None:
        is_head = c.qk_norm == "head"
        shapes["q_norm.weight"] = (c.head_dim if is_head else heads,)
        shapes["k_norm.weight"] = (c.head_dim if is_head else kv_heads,)
    if c.sinks:
        shapes["sinks"] = (c.num_q_heads,)
    if c.experts is not None:
        return shapes | _linear("router", (c.experts.num_experts, hidden), c.experts.router_bias)
    first = ("gate_up", 2 * mlp) if c.gated else ("up", mlp)
    return (
        shapes
        | _linear(first[0], (first[1], hidden), c.mlp_bias)
        | _linear("down", (hidden, mlp), c.mlp_bias)
    )


def in_expert(config: ModelConfig) -> dict[str, Shape]:
    """The shapes of what each expert of a layer has, by role."""
    e, hidden, mlp = config.experts, config.hidden_size, config.intermediate_size
    if e is None:
        return {}
    gate_up, down = (2 * mlp, hidden), (hidden, mlp)
    return _linear("experts.gate_up", gate_up, e.bias) | _linear("experts.down", down, e.bias)


def _norm(name: str, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
    return _linear(name, shape, config.norm_bias)


def _linear(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})


def num_weights(config: ModelConfig) -> int:
    """Numbers in all its weights."""
    num_experts = config.experts.num_experts if config.experts else 0

    def total(shapes: Mapping[str, Shape]) -> int:
        return sum(math.prod(shape) for shape in shapes.values())

    each = total(in_layer(config)) + num_experts * total(in_expert(config))
    return total(once(config)) + config.num_layers * each


def stored_shapes(config: ModelConfig, names: Names) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor that a file of this model has."""
    for role, shape in once(config).items():
        yield from _stored(config, names, role, shape)
    for layer in range(config.num_layers):
        for role, shape in in_layer(config).items():
            yield from _stored(config, names, role, shape, layer=layer)
        for role, shape in in_expert(config).items():
            num_experts = config.experts.num_experts if config.experts else 0
            if "{expert}" not in names.pieces(role)[0]:
                for name, its in _stored(config, names, role, shape, layer=layer):
                    yield name, (num_experts, *its)
                continue
            for expert in range(num_experts):
                yield from _stored(config, names, role, shape, layer=layer, expert=expert)


def _stored(
    config: ModelConfig, names: Names, role: str, shape: Shape, **numbers: int
) -> Iterator[tuple[str, Shape]]:
    pieces, form = names.pieces(role), names.forms.get(role)
    for name, its in zip(pieces, piece_shapes(config, role, shape, len(pieces)), strict=True):
        yield name.format(**numbers), form.stored(config, its) if form else its


def piece_shapes(config: ModelConfig, role: str, shape: Shape, count: int) -> list[Shape]:
    """The shapes of a role's pieces: of queries, keys and values, or of gate and up."""
    if count == 1:
        return [shape]
    kv = config.num_kv_heads * config.head_dim
    sizes = [shape[0] - 2 * kv, kv, kv] if role.startswith("qkv") else [shape[0] // 2] * 2
    return [(size, *shape[1:]) for size in sizes]


@runtime_checkable
class Share(Protocol):
    """A part of a decoder that is one itself: see `parallel/shares.py`."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shards(self) -> Shards: ...

    def source(self, role: str) -> str:
        """The role in the whole decoder that a role in this one is made from."""

    def taken(self, role: str, pieces: Sequence[Any]) -> list[Any]:
        """This part's of a role's pieces, as views."""

    def part(self, role: str, shape: Shape) -> tuple[list[tuple[int, int]] | None, tuple[int, int] | None]:
        """Which outputs and which inputs of a weight these are; None: all."""

    def padding(self, role: str) -> int:
        """Rows of zeros behind them."""


class Parts:
    """A decoder's weights as it asks for them: of its dtype, by role; quantised where `quantisation` says so.
    With a `share` the decoder is that part of the one that `config` describes, and nothing else is read: but
    groups, blocks and words that it cuts through are read whole, a GGUF file that is widened is read tensor
    by tensor, and of what is quantised on load all inputs of `o` and `down` are.

    Raises `InputError` for weights that are not the config's: at once if one is missing or too many, and when
    it is read if it is of another shape or type, or not finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        names: Names,
        tensors: Tensors,
        dtype: jnp.dtype,
        quantisation: Quantisation | None = None,
        share: Share | None = None,
        loop_over_layers: bool | None = None,
    ) -> None:
        self._describe(config, names, dtype, quantisation, share, loop_over_layers)
        self._tensors = without_prefix(names, tensors)
        check_names(config, names, self._tensors)

    def _describe(
        self,
        config: ModelConfig,
        names: Names | None,
        dtype: jnp.dtype,
        quantisation: Quantisation | None,
        share: Share | None,
        loop_over_layers: bool | None,
    ) -> None:
        self.form = form_of(jnp.dtype(dtype), loop_over_layers)
        self._whole, self._share, self.dtype, self._quantisation = (
            config,
            share,
            jnp.dtype(dtype),
            quantisation,
        )
        self.config = config if share is None else share.config  # of the decoder that is made
        self.shards = None if share is None else share.shards
        self._of_experts: dict[str, tuple[Segment, ...] | None] = {}
        if names is not None:
            self._names = names

    def get(self, role: str) -> layers.Weight | None:
        """What the decoder has once; None where it has no such weight."""
        shape = once(self._whole).get(self._source(role))
        return None if shape is None else self._made(role, shape, self._segments(role, shape))

    def each(self, role: str) -> layers.Each | None:
        """Every layer's; None where layers have no such weight."""
        shape = in_layer(self._whole).get(role)
        if shape is None:
            return None
        segments = [self._segments(role, shape, layer=i) for i in range(self.config.num_layers)]
        if None in segments:  # one of them is not quantised: so are all
            segments = [None] * len(segments)

        def of(numbers: Sequence[int], groups: Any = ()) -> layers.Each:
            def make() -> Iterator[layers.Weight]:
                return (self._made(role, shape, segments[i], layer=i) for i in numbers)

            return layers.Each(len(numbers), make, groups)

        ways = list(dict.fromkeys(segments))
        numbers = [[i for i, its in enumerate(segments) if its == way] for way in ways]
        return of(range(len(segments)), [(its, of(its)) for its in numbers] if len(ways) > 1 else ())

    def of_experts(self, role: str, numbers: Sequence[int]) -> layers.Each | None:
        """Every expert's of these layers, a layer's side by side."""
        shape = in_expert(self._whole).get(role)
        if shape is None or self.config.experts is None:
            return None
        num_experts = self.config.experts.num_experts

        def make() -> Iterator[layers.Weight]:
            for layer in numbers:
                yield from self._experts(role, shape, layer, num_experts)

        return layers.Each(len(numbers) * num_experts, make)

    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[layers.Weight]:
        [first, *_] = self._names.pieces(role)
        if "{expert}" in first:
            segments = self._expert_segments(role, shape, num_experts)
            for i in range(num_experts):
                yield self._made(role, shape, segments, layer=layer, expert=i)
            return
        pieces = [
            self._read(name, (num_experts, *its))
            for name, its in _stored(self._whole, self._names, role, shape, layer=layer)
        ]
        segments = self._expert_segments(role, shape, num_experts)
        for expert in range(num_experts):
            yield self._joined(role, [piece[expert] for piece in pieces], segments)

    def _expert_segments(self, role: str, shape: Shape, num_experts: int) -> tuple[Segment, ...] | None:
        """How all experts of all layers are kept, for which a program has one way; None if they differ."""
        if self._quantisation is None:
            return None
        if role not in self._of_experts:
            count = num_experts if "{expert}" in self._names.pieces(role)[0] else 1
            numbers = itertools.product(range(self.config.num_layers), range(count))
            ways = {self._segments(role, shape, layer=layer, expert=expert) for layer, expert in numbers}
            self._of_experts[role] = ways.pop() if len(ways) == 1 else None
        return self._of_experts[role]

    def _segments(self, role: str, shape: Shape, **numbers: int) -> tuple[Segment, ...] | None:
        """How a role's outputs are kept; None where they are not quantised."""
        if self._quantisation is None:
            return None
        source = self._source(role)
        stored = _stored(self._whole, self._names, source, shape, **numbers)
        segments = self._quantisation.segments(source, shape, stored, self._cut(role, shape))
        for kind, _ in segments or ():  # now XLA knows their products, in programs kept whole, too
            native.serves(self.dtype, native.quantised_function(is_float=kind.is_float))
        return segments

    def _made(
        self, role: str, shape: Shape, segments: tuple[Segment, ...] | None, **numbers: int
    ) -> layers.Weight:
        source = self._source(role)
        stored = list(_stored(self._whole, self._names, source, shape, **numbers))
        if segments is not None and self._quantisation is not None:
            restored = functools.partial(self._restored, role)
            kept = self._quantisation.of_blocks(stored, restored, self.dtype, self._cut(role, shape))
            if kept is not None:
                return kept
        return self._joined(role, [self._read(name, its) for name, its in stored], segments)

    def _joined(
        self, role: str, pieces: Pieces, segments: tuple[Segment, ...] | None = None
    ) -> layers.Weight:
        pieces, share = self._restored(role, pieces), self._share
        shape = sum(map(len, pieces)), *pieces[0].shape[1:]
        cut, quantised = self._cut(role, shape), None
        if cut is not None and (cut.inputs is None or segments is None):
            assert share is not None
            pieces = _padded(share.taken(role, pieces), share.padding(role), pieces[0])
            cut = None
        if share is not None:
            for piece in pieces:
                _check_numbers(role, piece)
        whole = _concatenated(pieces)
        if segments is not None and self._quantisation is not None:  # of inputs after all have been seen
            quantised = self._quantisation.of_numbers(self._source(role), whole, self.dtype, cut)
        return quantised or whole.astype(self.dtype, copy=False)

    def _source(self, role: str) -> str:
        """The role in the whole decoder."""
        return role if self._share is None else self._share.source(role)

    def _cut(self, role: str, shape: Shape) -> Cut | None:
        """What the share takes of a weight."""
        share = self._share
        return None if share is None else Cut(*share.part(role, shape), share.padding(role))

    def _restored(self, role: str, pieces: Pieces) -> Pieces:
        form = self._names.forms.get(role)
        return pieces if form is None else form.restored(self._whole, pieces)

    def _read(self, name: str, shape: Shape) -> np.ndarray:
        weight = self._tensors[name]
        _check_form(name, weight, shape)
        if self._share is None:
            _check_numbers(name, weight)
        return weight


class Abstract(Parts):
    """Zeros in place of the weights: for shapes, and for tracing. `names` are needed where some are
    quantised.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        names: Names | None = None,
        quantisation: Quantisation | None = None,
        share: Share | None = None,
        loop_over_layers: bool | None = None,
    ) -> None:
        self._describe(config, names, dtype, quantisation, share, loop_over_layers)

    def _made(
        self, role: str, shape: Shape, segments: tuple[Segment, ...] | None, **numbers: int
    ) -> layers.Weight:
        if segments is not None:
            cut = self._cut(role, shape)
            return zeros(segments, shape[1] if cut is None else cut.width(shape[1]), self.dtype)
        whole = jnp.zeros(shape, self.dtype)  # traced, where it is called in a trace
        if self._share is None:
            return whole
        return jnp.concatenate(_padded(self._share.taken(role, [whole]), self._share.padding(role), whole))

    def _experts(self, role: str, shape: Shape, layer: int, num_experts: int) -> Iterator[layers.Weight]:
        segments = self._expert_segments(role, shape, num_experts)
        yield from (self._made(role, shape, segments) for _ in range(num_experts))


def _concatenated(pieces: Pieces) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _padded(taken: list[Any], padding: int, like: Any) -> list[Any]:
    """What a share takes of a role, and rows of zeros."""
    return [*taken, np.zeros((padding, *like.shape[1:]), like.dtype)] if padding else taken


def without_prefix(names: Names, tensors: Tensors) -> Tensors:
    """The tensors with the prefix in their names, where the file lacks it."""
    prefix = names.prefix
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return tensors
    return _Renamed(tensors, prefix)


class _Renamed(Mapping[str, Any]):
    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def __getitem__(self, name: str) -> Any:
        if not name.startswith(self._prefix):
            raise KeyError(name)
        return self._tensors[name.removeprefix(self._prefix)]

    def __contains__(self, name: object) -> bool:
        prefix = self._prefix
        return isinstance(name, str) and name.startswith(prefix) and name[len(prefix) :] in self._tensors

    def __iter__(self) -> Iterator[str]:
        return (f"{self._prefix}{name}" for name in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def check_weights(config: ModelConfig, names: Names, tensors: Tensors) -> None:
    """Read all of them, and refuse any that is not the config's, as `Parts` does."""
    tensors = without_prefix(names, tensors)
    check_names(config, names, tensors)
    for name, shape in stored_shapes(config, names):
        _check(name, np.asarray(tensors[name]), shape)


def check_names(config: ModelConfig, names: Names, found: Iterable[str]) -> None:
    """Refuse files in which a weight is missing, or that have one too many."""
    wanted = dict(stored_shapes(config, names))
    found = set(found)
    for name in wanted:
        if name not in found:
            raise InputError(f"the weights lack {name!r}, which the model config asks for")
    # Tables that old files have beside the weights, and a head that is tied, which some files repeat.
    head = f"{names.table['lm_head']}.weight" if config.tie_word_embeddings else None
    for name in sorted(found - wanted.keys()):
        if name != head and not name.endswith(("rotary_emb.inv_freq", *names.spare)):
            raise InputError(
                f"weight {name!r} is none that the model config asks for: the model is another one"
            )


def _check(name: str, weight: np.ndarray, shape: Shape) -> None:
    _check_form(name, weight, shape)
    _check_numbers(name, weight)


def _check_form(name: str, weight: np.ndarray, shape: Shape) -> None:
    if tuple(weight.shape) != shape:
        raise InputError(f"weight {name!r} has shape {tuple(weight.shape)}, must be {shape}")
    if weight.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
        raise InputError(
            f"weight {name!r} has type {weight.dtype.name}, must be float32, bfloat16 or float16, or of a "
            "kind that config.json's quantization_config names, with its scales"
        )


def _check_numbers(name: str, weight: np.ndarray) -> None:
    if not _is_finite(weight):
        raise InputError(f"weight {name!r} has NaN or infinity in it, must be finite")


def _is_finite(weight: np.ndarray) -> bool:
    """Without a copy of the weight's size: it may be a large one."""
    flat = weight.reshape(-1)
    if (
        weight.dtype.name == "bfloat16"
    ):  # NumPy has no arithmetic of its own for it: look for exponents of ones
        bits = flat.view(np.uint16)
        return not any(np.any((bits[i : i + _CHUNK] & 0x7F80) == 0x7F80) for i in range(0, bits.size, _CHUNK))
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))


_CHUNK = 1 << 18  # numbers looked at together: what fits a processor's cache


def random_weights(config: ModelConfig, names: Names, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights that keep activations near 1 in size: for tests and for benchmarks of shapes."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: Shape) -> np.ndarray:
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        return noise * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)

    return {name: draw(name, shape) for name, shape in stored_shapes(config, names)}


def by_role(config: ModelConfig, names: Names, tensors: Tensors) -> dict[str, np.ndarray]:
    """All weights in memory, as NumPy's of float32: "norm.weight", "layers.0.qkv.weight",
    "layers.0.experts.1.down.bias". For oracles, which know no file.
    """
    parts = Parts(config, names, tensors, jnp.dtype("float32"))
    found: dict[str, Any] = {role: parts.get(role) for role in once(config)}
    for role in in_layer(config):
        found |= {f"layers.{i}.{role}": weight for i, weight in enumerate(parts.each(role) or ())}
    for role in in_expert(config):
        name = role.removeprefix("experts.")
        for layer in range(config.num_layers):
            each = enumerate(parts.of_experts(role, [layer]) or ())
            found |= {f"layers.{layer}.experts.{i}.{name}": weight for i, weight in each}
    return {role: np.asarray(weight) for role, weight in found.items()}


def _same(config: ModelConfig, shape: Shape) -> Shape:
    return shape


def reordered(order: Callable[[ModelConfig, np.ndarray], Pieces]) -> Form:
    """One tensor of the same shape, its rows in another order."""
    return Form(_same, lambda config, pieces: order(config, pieces[0]))


def _grouped(config: ModelConfig, weight: np.ndarray) -> Pieces:
    """From each kv head's queries, key and value together, to all queries, all keys, all values."""
    c = config
    groups = weight.reshape(
        c.num_kv_heads, c.num_q_heads // c.num_kv_heads + 2, c.head_dim, *weight.shape[1:]
    )
    rest = weight.shape[1:]
    return [*(group[:-2].reshape(-1, *rest) for group in groups), *groups[:, -2], *groups[:, -1]]


GROUPED_QKV = reordered(_grouped)
TRANSPOSED = Form(lambda config, shape: shape[::-1], lambda config, pieces: [piece.T for piece in pieces])
