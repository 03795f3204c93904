"""Names of a decoder's weights: the roles that it has, and what the files of a family call them.

A role has one shape in every model; `Names` says what its pieces are called, and in which form they lie
there.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.drafting.description import DraftHead

# Old files also hold tables of rotary embeddings, which follow from the config.
ROTARY_TABLES = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))

type Shape = tuple[int, ...]
type Tensors = Mapping[str, Any]  # tensors by their names in the file, read on access
type Pieces = list[np.ndarray]  # what a role is made of in a file: q, k and v, for example


@dataclasses.dataclass(frozen=True)
class Form:
    """The layout of a role's weight in a file.

    `restored` gives the decoder's outputs in its order, in as many pieces as it takes for all to be views
    where they can: a share then reads its own alone.
    """

    stored: Callable[[ModelConfig, Shape], Shape]  # shape in the file, from the shape in the decoder
    restored: Callable[[ModelConfig, Pieces], Pieces]


type Stored = list[tuple[str, Shape]]  # a role's tensors in a file: name and shape


@dataclasses.dataclass(frozen=True)
class FormOfLayers:
    """The layout of weights of which layers have less than the decoder, each by itself.

    stored: of a role with its ending, and a layer, the tensors in the file, from those in the decoder.
    restored: the pieces in the decoder's shapes.
    """

    stored: Callable[[ModelConfig, str, int, Stored], Stored]
    restored: Callable[[ModelConfig, str, int, Pieces], Pieces]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of weights in the files of a family.

    `table`: by role, the names of its pieces, without ".weight" and ".bias"; or by role and ending, in full.
    "{layer}" and "{expert}" stand for numbers; experts without one lie side by side in one tensor. A file may
    lack `prefix` in all its names. `spare` are endings of tensors that are no weights. `inside`: beginnings
    of names in files that hold more than the decoder, and what stands for each here; `ignored`: beginnings
    of those of everything else that such files hold. `of_layers`: see `FormOfLayers`. `filled`: numbers that
    a role has everywhere and no file holds, such as the ones of a norm without weights. `chunks`: by the
    endings of products' names, into how many parts of as many outputs a file divides them.
    """

    table: Mapping[str, str | tuple[str, ...]]
    forms: Mapping[str, Form] = dataclasses.field(default_factory=dict)  # forms by role and ending
    prefix: str = ""
    spare: tuple[str, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    of_layers: FormOfLayers | None = None
    filled: Mapping[str, float] = dataclasses.field(default_factory=dict)
    chunks: Mapping[str, Callable[[ModelConfig], int]] = dataclasses.field(default_factory=dict)

    def num_chunks(self, config: ModelConfig, name: str) -> int:
        """Return into how many parts a file divides a product's outputs."""
        return next((number(config) for end, number in self.chunks.items() if name.endswith(end)), 1)

    def name_of(self, name: str) -> str:
        """Return what the decoder calls a tensor or module of a file."""
        for begin, ours in self.inside:
            if name.startswith(begin):
                return ours + name.removeprefix(begin)
        return name

    def is_spare(self, name: str) -> bool:
        """Return whether files may have a tensor of this name that is no weight of the decoder."""
        return name.endswith((*ROTARY_TABLES, *self.spare)) or name.startswith(self.ignored)

    def pieces(self, role: str) -> tuple[str, ...]:
        """Return the templates of the names of one role's tensors, with its ending."""
        names = self.table.get(role)
        if names is not None:
            return (names,) if isinstance(names, str) else names
        stem, _, ending = role.rpartition(".")
        names = self.table[stem]
        return tuple(f"{name}.{ending}" for name in ((names,) if isinstance(names, str) else names))


def once(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the weights that a decoder has once, by role."""
    hidden, c, head = (config.hidden_size,), config, config.draft_head
    shapes: dict[str, Shape] = {}
    if head is None or head.own_embedding:
        shapes["embedding.weight"] = (c.vocab_size, *hidden)
    if c.num_positions is not None:
        shapes["positions.weight"] = (c.num_positions, *hidden)
    if c.embedding_norm:
        shapes |= _norm("embedding_norm", hidden, c)
    shapes |= _norm("norm", hidden, c)
    if c.altup is not None:
        streams = ((c.altup.num_streams - 1) * c.hidden_size, *hidden)
        shapes |= {"altup_begin.weight": streams, "altup_end.weight": streams}
    if c.layer_inputs is not None:
        width, vocab = c.layer_inputs.width, c.layer_inputs.vocab_size
        shapes["layer_inputs_table.weight"] = (vocab, c.num_layers * width)
        shapes["layer_inputs_product.weight"] = (c.num_layers * width, *hidden)
        shapes["layer_inputs_norm.weight"] = (width,)
    if head is not None:
        return shapes | _draft_head(head, hidden, c)
    if not c.tie_word_embeddings:
        shapes |= _linear("lm_head", (c.vocab_size, *hidden), c.lm_head_bias)
    return shapes


def _draft_head(head: DraftHead, hidden: Shape, config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of what a head that drafts has once, beside embedding and last norm."""
    shapes: dict[str, Shape] = {"fuse.weight": (*hidden, head.fuse_inputs)}
    if head.fuse_norm:
        shapes |= _norm("fuse_norm", (head.fuse_inputs,), config)
    if head.kind == "mtp":
        shapes |= _norm("embedded_norm", hidden, config)
    shapes |= _norm("hidden_norm", hidden, config)
    if head.own_lm_head:
        shapes["lm_head.weight"] = (head.num_choices, *hidden)
    return shapes


def in_layer(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of what layers have, by role; `layers_with` says which layers have it."""
    shapes = _in_layer(config)
    if config.has_uniform_parts:
        return shapes
    return {role: shape for role, shape in shapes.items() if layers_with(config, role)}


def _in_layer(config: ModelConfig) -> dict[str, Shape]:
    c, hidden, e = config, config.hidden_size, config.experts
    heads, kv_heads = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    before, after = bool(c.layers_normed("before")), bool(c.layers_normed("after"))
    shapes: dict[str, Shape] = {}
    for name, exists in (
        ("attention_norm", before),
        ("attention_out_norm", after),
        ("mlp_norm", before and not c.shared_norm),
        ("mlp_out_norm", after),
    ):
        if exists:
            shapes |= _norm(name, (hidden,), c)
    inputs = hidden if c.draft_head is None or c.draft_head.kind == "mtp" else 2 * hidden
    if c.mixer is not None:
        shapes |= c.mixer.weights(hidden)
    if c.latent is not None:
        heads = c.num_q_heads * c.latent.v_dim
        shapes |= c.latent.weights(hidden, c.num_q_heads)
    else:
        shapes |= _linear("qkv", (heads + 2 * kv_heads, inputs), c.qkv_bias)
    if any(kind.shares_kv is not None for kind in c.layers):
        shapes |= _linear("q", (heads, hidden), c.qkv_bias)
    shapes |= _linear("o", (hidden, heads), c.o_bias)
    if c.output_gate is not None:
        shapes["attention_gate.weight"] = (heads if c.output_gate == "element" else c.num_q_heads, hidden)
    shapes |= _altup(c)
    if c.layer_scale:
        shapes["layer_scale"] = (1,)
    if c.qk_norm not in (None, "plain"):
        for name, count in (("q_norm", c.num_q_heads), ("k_norm", c.num_kv_heads)):
            forms = {"head": (c.head_dim,), "each": (count, c.head_dim), "all": (count * c.head_dim,)}
            shapes[f"{name}.weight"] = forms[c.qk_norm or ""]
    if c.sinks:
        shapes["sinks"] = (c.num_q_heads,)
    if e is None:
        return shapes | _mlp("", c.intermediate_size, c)
    shapes |= _linear("router", (e.num_experts, hidden), e.router_bias)
    if e.correction:
        shapes["correction"] = (e.num_experts,)
    if e.shared_size:
        shapes |= _mlp("shared.", e.shared_size, c)
    if e.beside:
        norms = ("router_norm", "experts_norm", "experts_out_norm", "shared_out_norm")
        for name in norms:
            shapes |= _norm(name, (hidden,), c)
        shapes["expert_scale"] = (e.num_experts,)
    if e.shared_gate:
        shapes["shared_gate.weight"] = (1, hidden)
    if e.latent_size:
        shapes |= _linear("experts_in", (e.latent_size, hidden), c.mlp_bias)
        shapes |= _linear("experts_out", (hidden, e.latent_size), c.mlp_bias)
    return shapes | _mlp("", e.dense_size, c) if e.dense_layers else shapes


_ATTENTION = ("latent", "qkv", "q", "o", "q_norm", "k_norm", "sinks", "attention_gate")
_NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
_EXPERTS = ("router", "correction", "experts", "shared", "shared_gate", "experts_in", "experts_out")
_FEED_FORWARD = ("gate_up", "up", "down", "xielu", *_EXPERTS)


def layers_with(config: ModelConfig, role: str) -> Sequence[int]:
    """Return the numbers of the layers that have a role, in order."""
    stem = role.split(".")[0]
    if stem == "mixer":
        return config.state_layers
    if stem in ("qkv", "k_norm", "q"):
        shares = stem == "q"
        return [i for i in config.attention_layers if (config.layers[i].shares_kv is not None) == shares]
    if stem in _ATTENTION:
        return config.attention_layers
    if stem in _NORMS:
        those = config.mixing_layers if stem.startswith("attention") else config.feeding_layers
        normed = config.layers_normed("after" if stem.endswith("out_norm") else "before")
        return those if len(normed) == config.num_layers else [i for i in those if i in normed]
    if stem not in _FEED_FORWARD:
        return range(config.num_layers)
    dense = config.experts.dense_layers if config.experts is not None else ()
    if dense and stem in ("gate_up", "up", "down"):
        return sorted(dense)
    if stem in _EXPERTS:
        return [layer for layer in config.feeding_layers if layer not in dense]
    return config.feeding_layers


def _altup(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a layer's parts around attention and feed-forward, of Gemma 3n."""
    hidden, shapes = config.hidden_size, dict[str, Shape]()
    if (altup := config.altup) is not None:
        count, rank = altup.num_streams, altup.laurel_rank
        shapes |= {
            "altup_router.weight": (count, hidden),
            "altup_router_norm.weight": (hidden,),
            "altup_predict.weight": (count * count, count),
            "altup_correct.weight": (count, count),
            "laurel_left.weight": (rank, hidden),
            "laurel_right.weight": (hidden, rank),
            "laurel_norm.weight": (hidden,),
        }
        if altup.scaled:
            shapes["altup_scale"] = (hidden,)
    if (inputs := config.layer_inputs) is not None:
        shapes |= {
            "layer_input_gate.weight": (inputs.width, hidden),
            "layer_input_out.weight": (hidden, inputs.width),
            "layer_input_norm.weight": (hidden,),
        }
    return shapes


def _mlp(prefix: str, width: int, config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of one feed-forward part."""
    c, hidden = config, config.hidden_size
    first = ("gate_up", 2 * width) if c.gated else ("up", width)
    shapes = _linear(f"{prefix}{first[0]}", (first[1], hidden), c.mlp_bias)
    shapes |= _linear(f"{prefix}down", (hidden, width), c.mlp_bias)
    if c.activation == "xielu":
        shapes |= {f"xielu.{name}": (1,) for name in ("alpha_p", "alpha_n", "beta", "eps")}
    return shapes


def in_expert(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the weights that each expert of a layer has, by role."""
    e, width = config.experts, config.intermediate_size
    if e is None:
        return {}
    given = e.latent_size or config.hidden_size
    name, outputs = ("gate_up", 2 * width) if config.gated else ("up", width)
    up = _linear(f"experts.{name}", (outputs, given), e.bias)
    return up | _linear("experts.down", (given, width), e.bias)


def _norm(name: str, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
    return _linear(name, shape, config.norm_bias)


def _linear(name: str, shape: Shape, has_bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})


def num_weights(config: ModelConfig) -> int:
    """Return how many numbers all its weights have."""
    num_experts = config.experts.num_experts if config.experts else 0

    def total(shapes: Mapping[str, Shape], times: int = 1) -> int:
        return sum(
            times * len(layers_with(config, role)) * math.prod(shape) for role, shape in shapes.items()
        )

    its_own = sum(math.prod(shape) for shape in once(config).values())
    return its_own + total(in_layer(config)) + total(in_expert(config), num_experts)


def every_weight(config: ModelConfig) -> Iterator[tuple[str, Shape, dict[str, int]]]:
    """Yield role and shape of every weight of a decoder, with the numbers of its layer and expert, if any."""
    for role, shape in once(config).items():
        yield role, shape, {}
    of_layer, of_expert = in_layer(config), in_expert(config)
    num_experts = config.experts.num_experts if config.experts else 0
    for layer in range(config.num_layers):
        for role, shape in of_layer.items():
            if layer in layers_with(config, role):
                yield role, shape, {"layer": layer}
        for role, shape in of_expert.items():
            if layer in layers_with(config, role):
                for expert in range(num_experts):
                    yield role, shape, {"layer": layer, "expert": expert}


def stored_shapes(config: ModelConfig, names: Names) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor that a file of this model has."""
    num_experts = config.experts.num_experts if config.experts else 0
    for role, shape, numbers in every_weight(config):
        if "expert" not in numbers or "{expert}" in names.pieces(role)[0]:
            yield from stored_pieces(config, names, role, shape, **numbers)
        elif numbers["expert"] == 0:  # one tensor has all experts of a layer
            for name, piece_shape in stored_pieces(config, names, role, shape, **numbers):
                yield name, (num_experts, *piece_shape)


def stored_pieces(
    config: ModelConfig, names: Names, role: str, shape: Shape, **numbers: int
) -> Iterator[tuple[str, Shape]]:
    """Name and shape of a role's tensors; `numbers`: of the layer and the expert, where it has some."""
    if role in names.filled:
        return
    pieces, form = names.pieces(role), names.forms.get(role)
    shapes = piece_shapes(config, role, shape, len(pieces))
    stored = [
        (name.format(**numbers), form.stored(config, piece_shape) if form else piece_shape)
        for name, piece_shape in zip(pieces, shapes, strict=True)
    ]
    if names.of_layers is not None and "layer" in numbers:
        stored = names.of_layers.stored(config, role, numbers["layer"], stored)
    yield from stored


def piece_shapes(config: ModelConfig, role: str, shape: Shape, count: int) -> list[Shape]:
    """Return the shapes of a role's tensors: of queries, keys and values, of gate and up, or equal ones."""
    if count == 1:
        return [shape]
    if config.mixer is not None and (sizes := config.mixer.pieces(role, count)) is not None:
        return [(size, *shape[1:]) for size in sizes]
    kv = config.num_kv_heads * config.head_dim
    sizes = [shape[0] - 2 * kv, kv, kv] if role.startswith("qkv") else [shape[0] // count] * count
    return [(size, *shape[1:]) for size in sizes]


def without_prefix(names: Names, tensors: Tensors) -> Tensors:
    """Return the tensors by the decoder's names: with the prefix where the file lacks it, and those of a
    larger model's decoder without what their names have in front.
    """
    if any(name.startswith(begin) for name in tensors for begin, _ in names.inside):
        return _Renamed(tensors, {names.name_of(name): name for name in tensors})
    prefix = names.prefix
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return tensors
    return _Renamed(tensors, {f"{prefix}{name}": name for name in tensors})


class _Renamed(Mapping[str, Any]):
    def __init__(self, tensors: Tensors, theirs: Mapping[str, str]) -> None:
        self._tensors, self._theirs = tensors, theirs

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._theirs[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._theirs

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def _same(config: ModelConfig, shape: Shape) -> Shape:
    return shape


def reordered(order: Callable[[ModelConfig, np.ndarray], Pieces]) -> Form:
    """Return the form of one tensor of the same shape whose rows are in another order."""
    return Form(_same, lambda config, pieces: order(config, pieces[0]))


def _grouped(config: ModelConfig, weight: np.ndarray) -> Pieces:
    """Reorder each kv head's queries, key and value to all queries, all keys, all values."""
    c = config
    groups = weight.reshape(
        c.num_kv_heads, c.num_q_heads // c.num_kv_heads + 2, c.head_dim, *weight.shape[1:]
    )
    rest = weight.shape[1:]
    return [*(group[:-2].reshape(-1, *rest) for group in groups), *groups[:, -2], *groups[:, -1]]


GROUPED_QKV = reordered(_grouped)
# A convolution's weights by channel, as torch has them; the decoder has the oldest token's first.
BY_CHANNEL = Form(
    lambda config, shape: (shape[1], 1, shape[0]), lambda config, pieces: [piece[:, 0].T for piece in pieces]
)
TRANSPOSED = Form(lambda config, shape: shape[::-1], lambda config, pieces: [piece.T for piece in pieces])
