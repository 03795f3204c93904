"""Shards of a decoder under tensor parallelism: each one's slices of the weights, and the sums among them.

A shard is a decoder itself, narrower. Heads, columns of feed-forward parts and the vocabulary are dealt out
in their order, as many to every shard. Of the products back to the residual, `o` and `down`, a shard has the
inputs that its own heads and columns give: the sum of all shards' outputs is the whole product's. The
embedding, norms and routers are whole on each shard.
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

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError
from jaxpaged.config import Sums
from jaxpaged.digest import digest
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Values

DATA, MODEL = "data", "model"  # the axes of a mesh
COLUMNS = ("o", "down")  # roles split by input; `Shard._rows` has those split by output


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a model, one on each device along the mesh's axis "model", and what they exchange.

    `sums`: "fast" lets XLA add up, in whatever order the devices' library has. "ordered" adds in the shards'
    order, whatever the library, and moves `size / 2` times as many bytes: each device gets all summands.
    """

    size: int
    sums: Sums = "fast"

    def total(self, summand: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the sum of all shards' summands, on each shard."""
        if self.size == 1:
            return summand
        if self.sums == "fast":
            return lax.psum(summand, MODEL)
        summands = lax.all_gather(summand, MODEL)
        return functools.reduce(operator.add, [summands[i] for i in range(self.size)])

    def mean(self, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the mean of all shards' numbers, on each shard."""
        return self.total(x) / self.size

    def joined(self, columns: Float[Array, "n width"], width: int) -> Float[Array, "n all_widths"]:
        """Return all shards' columns side by side, the first `width` of them."""
        if self.size == 1:
            return columns[:, :width]
        return lax.all_gather(columns, MODEL, axis=1, tiled=True)[:, :width]

    def mine(self, whole: Num[Array, " n"]) -> Num[Array, " n_of_shard"]:
        """Return this shard's slice of an array that all shards have alike: equal slices, in their order."""
        count = whole.shape[0] // self.size
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(MODEL) * count, count)

    def agree(self, tree: object) -> Bool[Array, ""]:
        """Return whether all shards have equal arrays in `tree`, by a digest of them."""
        mine = digest(jax.tree.leaves(tree))
        return jnp.all(lax.pmin(mine, MODEL) == lax.pmax(mine, MODEL))


@dataclasses.dataclass(frozen=True)
class Shard:
    """One shard of a model: the config of the narrower decoder, and where its weights are in the whole's.

    Raises `InputError` for a model that cannot be split into so many shards.
    """

    whole: ModelConfig
    shards: Shards
    number: int  # counted from 0

    def __post_init__(self) -> None:
        c, size = self.whole, self.shards.size
        sizes = {"num_q_heads": c.num_q_heads, "intermediate_size": c.intermediate_size}
        if c.experts is not None:
            sizes |= {"shared_size": c.experts.shared_size, "dense_size": c.experts.dense_size}
        for name, width in sizes.items():
            if width % size:
                raise InputError(
                    f"tensor_parallel_size={size} must be a divisor of the model's {name}={width}"
                )
        if c.num_kv_heads % size and size % c.num_kv_heads:
            raise InputError(
                f"tensor_parallel_size={size} must be a divisor or a multiple of the model's "
                f"num_kv_heads={c.num_kv_heads}"
            )
        if c.qk_norm == "all" and c.norm == "layer":
            raise InputError(
                f"tensor_parallel_size={size} must be 1 for layer norms over the queries of all heads"
            )

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
            tie_word_embeddings=False,
        )

    def source(self, role: str) -> str:
        """Return the role in the whole decoder that a role of this one is made from."""
        return "embedding.weight" if role == "lm_head.weight" and self.whole.tie_word_embeddings else role

    def slices(self, role: str, tensors: Sequence[Num[Values, "..."]]) -> list[Num[Values, "..."]]:
        """Return this shard's slices of a role's tensors, as views. Their outputs follow one another."""
        name, _, ending = _bare(role).rpartition(".")
        if name in COLUMNS and ending == "bias":  # the bias is added once
            if self.number == 0:
                return list(tensors)
            return [np.zeros(tensor.shape, tensor.dtype) for tensor in tensors]
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
        if name == "qkv":
            return [self._equal_range(0, q), self._kv_rows(q), self._kv_rows(q + kv)]
        if (
            role == "sinks"
            or name in ("q", "up", "attention_gate")
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
