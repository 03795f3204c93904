"""Shards of a decoder under tensor parallelism: each one's slices of the weights, and the sums among them.

A shard is a decoder itself, narrower. Heads, columns of feed-forward parts and the vocabulary are dealt out
in their order, as many to every shard. Of the products back to the residual, `o` and `down`, a shard has the
inputs that its own heads and columns give: the sum of all shards' outputs is the whole product's. The
embedding, norms, routers and latents, which all heads share, are whole on each shard.

With a number for `tensor_parallel_sums`, say 8, these sums are made as 8 shards would make them, on however
many devices: a shard of 2 has the inputs of 4 pieces, makes a product of each, and adds the products up in
the tree in which 4 devices would. So the bits are equal on 1, 2, 4 and 8 devices.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from jaxpaged import row_sums
from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import check
from jaxpaged.config import Sums
from jaxpaged.digest import digest
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Values
from pallas_kernels.ops.states import LANES

DATA, MODEL = "data", "model"  # the axes of a mesh
COLUMNS = ("o", "down", "mixer.out")  # roles split by input; `Shard._rows` has those split by output
CONVOLUTION = "mixer.conv.weight"  # split by channel, its second axis


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a model, one on each device along the mesh's axis "model", and what they exchange.

    `sums`: "fast" lets XLA add up, in whatever order the devices' library has. "ordered" adds in the shards'
    order, whatever the library, and moves `size / 2` times as many bytes: each device gets all summands. A
    number adds as so many shards would, in `row_sums.tree_sum`'s order, with the bytes of "fast".

    Raises `InputError` for a number whose tree this many shards cannot make.
    """

    size: int
    sums: Sums = "fast"

    def __post_init__(self) -> None:
        if isinstance(self.sums, int):
            is_power = self.size & (self.size - 1) == 0
            rule = f"{self.sums}, or a power of two that divides tensor_parallel_sums={self.sums}"
            fits = self.size == self.sums or (self.sums % self.size == 0 and is_power)
            check("tensor_parallel_size", self.size, rule, fits)

    @property
    def sums_in_pieces(self) -> bool:
        """Whether sums are made as a number of shards would make them."""
        return isinstance(self.sums, int)

    @property
    def num_pieces(self) -> int:
        """Parts of a shard's inputs that are summed by themselves."""
        return self.sums // self.size if isinstance(self.sums, int) else 1

    def total(self, pieces: Sequence[Float[Array, "*n"]]) -> Float[Array, "*n"]:
        """Return the sum of all shards' summands, on each shard; a shard has `num_pieces` of them."""
        summand = row_sums.tree_sum(pieces)
        if self.size == 1:  # not fused with what follows, as nothing is behind a collective
            return lax.optimization_barrier(summand) if self.sums_in_pieces else summand
        if self.sums == "fast":
            return lax.psum(summand, MODEL)
        if self.sums == "ordered":
            summands = lax.all_gather(summand, MODEL)
            return functools.reduce(operator.add, [summands[i] for i in range(self.size)])
        width = summand.shape[-1]
        if width % self.size:  # few numbers, such as means
            summands = lax.all_gather(summand, MODEL)
            return row_sums.tree_sum([summands[i] for i in range(self.size)])
        # Each shard adds up its slice of all summands, and gets the others' sums: the bytes of an all-reduce.
        slices = summand.reshape(*summand.shape[:-1], self.size, width // self.size)
        slices = lax.all_to_all(slices, MODEL, split_axis=slices.ndim - 2, concat_axis=0)
        mine = row_sums.tree_sum([slices[i] for i in range(self.size)])
        return lax.all_gather(mine, MODEL, axis=mine.ndim - 1, tiled=True)

    def mean(self, x: Float[Array, "*n width"], num_heads: int | None = None) -> Float[Array, "*n 1"]:
        """Return the mean over all shards' features, on each shard.

        num_heads: heads that the features are of, fewer than pieces where shards share one; None: they are
            dealt out in any way.
        """
        count = self.num_pieces if num_heads is None else min(self.num_pieces, num_heads)
        means = [row_sums.mean(piece) for piece in jnp.split(x, count, axis=-1)]
        repeated = [mean for mean in means for _ in range(self.num_pieces // count)]
        return self.total(repeated) / (self.size * self.num_pieces)

    def joined(self, columns: Float[Array, "n width"], width: int) -> Float[Array, "n all_widths"]:
        """Return all shards' columns side by side, the first `width` of them."""
        if self.size == 1:
            return columns[:, :width]
        return lax.all_gather(columns, MODEL, axis=1, tiled=True)[:, :width]

    def mine(self, whole: Num[Array, " n"]) -> Num[Array, " n_of_shard"]:
        """Return this shard's slice of an array that all shards have alike: equal slices, in their order."""
        if self.size == 1:
            return whole
        count = whole.shape[0] // self.size
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(MODEL) * count, count)

    def agree(self, tree: object) -> Bool[Array, ""]:
        """Return whether all shards have equal arrays in `tree`, by a digest of them."""
        mine = digest(jax.tree.leaves(tree))
        return jnp.all(lax.pmin(mine, MODEL) == lax.pmax(mine, MODEL))


def total(shards: Shards | None, pieces: Sequence[Float[Array, "*n"]]) -> Float[Array, "*n"]:
    """Return the sum over all shards of what `Linear.pieces` returns; None: one has all, in one piece."""
    return pieces[0] if shards is None else shards.total(pieces)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One shard of a model: the config of the narrower decoder, and where its weights are in the whole's.

    Raises `InputError` for a model that cannot be split into so many shards.
    """

    whole: ModelConfig
    shards: Shards
    number: int  # counted from 0

    def __post_init__(self) -> None:
        self._check("tensor_parallel_size", self.shards.size)
        if isinstance(self.shards.sums, int):
            self._check("tensor_parallel_sums", self.shards.sums)
            self._check_lanes(self.shards.sums)

    @property
    def _sizes(self) -> dict[str, int]:
        """Numbers of columns that shards divide, by their names in the config."""
        c = self.whole
        sizes = {"intermediate_size": c.intermediate_size}
        if c.experts is not None:
            sizes |= {"shared_size": c.experts.shared_size, "dense_size": c.experts.dense_size}
        return sizes

    def _check_lanes(self, size: int) -> None:
        """Raise `InputError` unless a share of so many is whole vectors wherever it has exponentials: those
        of a vector's rest may have another last bit.
        """
        c = self.whole
        sizes = self._sizes | ({} if c.output_gate is None else {"output gate": c.num_q_heads * c.head_dim})
        for name, width in sizes.items():
            rule = f"a number of equal shares of the model's {name}={width} that {LANES} divides"
            check("tensor_parallel_sums", size, rule, width % (size * LANES) == 0)
        rule = "a text for a model that has a gate for each head"
        check("tensor_parallel_sums", size, rule, c.output_gate != "head")

    def _check(self, option: str, size: int) -> None:
        """Raise `InputError` unless the model can be split into so many shards."""
        c = self.whole
        for name, width in {"num_q_heads": c.num_q_heads, **self._sizes}.items():
            check(option, size, f"a divisor of the model's {name}={width}", width % size == 0)
        if c.mixer is not None:
            c.mixer.divided(size)
        is_split = c.num_kv_heads % size == 0 or size % c.num_kv_heads == 0
        check(option, size, f"a divisor or a multiple of the model's num_kv_heads={c.num_kv_heads}", is_split)
        has_norm = c.qk_norm == "all" and c.norm == "layer"
        check(option, size, "1 for layer norms over the queries of all heads", size == 1 or not has_norm)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The narrower decoder's config, the same for all shards; its ALiBi slopes are those of all heads."""
        c, size = self.whole, self.shards.size
        experts = c.experts and dataclasses.replace(
            c.experts,
            shared_size=c.experts.shared_size // size,
            dense_size=c.experts.dense_size // size,
        )
        # Weights are cut when they are padded: all layers have as many heads, and are as wide.
        alike = [
            dataclasses.replace(kind, num_q_heads=None, num_kv_heads=None, intermediate_size=None)
            for kind in c.layers
        ]
        return dataclasses.replace(
            c,
            layers=tuple(alike),
            experts=experts,
            num_q_heads=c.num_q_heads // size,
            num_kv_heads=max(c.num_kv_heads // size, 1),
            intermediate_size=c.intermediate_size // size,
            tie_word_embeddings=c.tie_word_embeddings and size == 1,
            mixer=c.mixer and c.mixer.divided(size),
        )

    def pieces(self, role: str) -> list["Shard"]:
        """Return the shards of `num_pieces` times as many, to which this one's products of a role belong."""
        (name, _, ending), count = role.rpartition("."), self.shards.num_pieces
        if count == 1 or ending != "weight" or not is_of_columns(name):
            return [self]
        narrow = Shards(self.shards.size * count)
        return [Shard(self.whole, narrow, self.number * count + i) for i in range(count)]

    def source(self, role: str) -> str:
        """Return the role in the whole decoder that a role of this one is made from."""
        return "embedding.weight" if role == "lm_head.weight" and self.whole.tie_word_embeddings else role

    def slices(self, role: str, tensors: Sequence[Num[Values, "..."]]) -> list[Num[Values, "..."]]:
        """Return this shard's slices of a role's tensors, as views. Their outputs follow one another."""
        name, _, ending = _bare(role).rpartition(".")
        if name in COLUMNS and ending == "bias":  # the bias is added once
            if self.number == 0:
                return list(tensors)
            return [np.full(tensor.shape, -0.0, tensor.dtype) for tensor in tensors]  # changes no bit
        if role == CONVOLUTION:
            return [tensor[:, self._channels] for tensor in tensors]
        outputs, inputs = self.ranges(role, (sum(map(len, tensors)), *tensors[0].shape[1:]))
        if inputs is not None:
            return [tensor[:, slice(*inputs)] for tensor in tensors]
        return list(tensors) if outputs is None else list(_slices(tensors, outputs))

    def ranges(
        self, role: str, shape: tuple[int, ...]
    ) -> tuple[list[tuple[int, int]] | None, tuple[int, int] | None]:
        """Return the ranges of outputs and the range of inputs that this shard has of a weight; None: all."""
        role = _bare(role)
        name, _, ending = role.rpartition(".")
        if role == CONVOLUTION:
            return None, None
        if name in COLUMNS and ending == "weight":
            return None, self._equal_range(0, shape[1])
        return self._rows(role, shape[0]) if shape else None, None

    def padding(self, role: str) -> int:
        """Return how many rows of zeros follow this shard's own: the vocabulary need not be a multiple."""
        if not role.startswith("lm_head."):
            return 0
        width = cdiv(self.whole.vocab_size, self.shards.size)
        mine = min(self.whole.vocab_size - self.number * width, width)
        return width - max(mine, 0)

    def _rows(self, role: str, count: int) -> list[tuple[int, int]] | None:
        """Return the ranges of `count` outputs that this shard has; None: all."""
        c, size = self.whole, self.shards.size
        q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        name, _, _ = role.rpartition(".")
        if c.mixer is not None and role.startswith("mixer."):
            return self._sections(c.mixer.sections(role)) or None
        if name == "qkv":
            return [self._equal_range(0, q), self._kv_rows(q), self._kv_rows(q + kv)]
        if (
            role == "sinks"
            or name in ("q", "up", "attention_gate", "latent.q", "latent.k_up", "latent.v_up")
            or (name == "q_norm" and c.qk_norm != "head")
        ):
            return [self._equal_range(0, count)]
        if name == "k_norm" and c.qk_norm == "all":
            return [self._kv_rows(0)]
        if name == "k_norm" and c.qk_norm == "each":
            return [self._kv_heads()]
        if name == "gate_up":
            return [self._equal_range(0, count // 2), self._equal_range(count // 2, count // 2)]
        if name == "lm_head":
            width = cdiv(count, size)
            return [(min(self.number * width, count), min((self.number + 1) * width, count))]
        return None

    @property
    def _channels(self) -> np.ndarray:
        """The channels of a mixer's convolution that this shard has."""
        assert self.whole.mixer is not None
        return np.concatenate(
            [np.arange(*each) for each in self._sections(self.whole.mixer.sections(CONVOLUTION))]
        )

    def _sections(self, widths: Sequence[int]) -> list[tuple[int, int]]:
        """Return this shard's range in each of some sections, which all shards divide equally."""
        firsts = [sum(widths[:i]) for i in range(len(widths))]
        return [self._equal_range(first, width) for first, width in zip(firsts, widths, strict=True)]

    def _equal_range(self, first: int, count: int) -> tuple[int, int]:
        """Return this shard's range of `count` outputs from `first` on, which all shards divide equally."""
        width = count // self.shards.size
        return first + self.number * width, first + (self.number + 1) * width

    def _kv_rows(self, first: int) -> tuple[int, int]:
        """Return the range of rows of this shard's kv heads; row `first` is the first of kv head 0."""
        start, stop = self._kv_heads()
        return first + start * self.whole.head_dim, first + stop * self.whole.head_dim

    def _kv_heads(self) -> tuple[int, int]:
        """Return the range of this shard's kv heads; neighbours have the same one if heads are fewer."""
        c, size = self.whole, self.shards.size
        head = self.number * c.num_kv_heads // size
        return head, head + max(c.num_kv_heads // size, 1)


def is_of_columns(role: str) -> bool:
    """Return whether shards divide the inputs of a product, such as "o" or "experts.down"."""
    return _bare(role) in COLUMNS


def _bare(role: str) -> str:
    """Return the role that a dense feed-forward part would have in an expert's place."""
    return role.removeprefix("experts.").removeprefix("shared.")


def _slices(
    tensors: Sequence[Num[Values, "..."]], ranges: Sequence[tuple[int, int]]
) -> Iterator[Num[Values, "..."]]:
    """Yield the rows in these ranges, of tensors whose rows follow one another; none that is empty."""
    for start, stop in ranges:
        first = 0
        for tensor in tensors:
            rows = tensor[max(start - first, 0) : max(stop - first, 0)]
            if len(rows):
                yield rows
            first += len(tensor)
