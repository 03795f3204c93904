"""Tensor parallelism: one shard's part of a decoder is itself a decoder, narrower, whose weights are
slices of the whole one's.

Heads, the columns of feed-forward parts and the vocabulary are dealt out in their order, to every shard
alike. The products that follow them, back to the residual, are split by inputs: the sum of all shards'
outputs is the whole. The embedding, norms and routers are whole on each shard.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Num

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import Values
from jaxpaged.parallel.shards import Shards

COLUMNS = ("o", "down")  # split by input; what is split by output, `_rows` says


@dataclasses.dataclass(frozen=True)
class Share:
    """Part of a decoder that one shard has. Raises `InputError` for a model that cannot be split into so
    many.
    """

    whole: ModelConfig
    shards: Shards
    number: int  # of the shard, from 0 on

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
        """Config of the narrower decoder, the same for all shards. It keeps the ALiBi slopes of all
        heads.
        """
        c, size = self.whole, self.shards.size
        experts = c.experts and dataclasses.replace(
            c.experts,
            shared_size=c.experts.shared_size // size,
            dense_size=c.experts.dense_size // size,
        )
        return dataclasses.replace(
            c,
            experts=experts,
            num_q_heads=c.num_q_heads // size,
            num_kv_heads=max(c.num_kv_heads // size, 1),
            intermediate_size=c.intermediate_size // size,
            tie_word_embeddings=False,
        )

    def source(self, role: str) -> str:
        """Return the role in the whole decoder that a role of this one is taken from."""
        return "embedding.weight" if role == "lm_head.weight" and self.whole.tie_word_embeddings else role

    def taken(self, role: str, pieces: Sequence[Num[Values, "..."]]) -> list[Num[Values, "..."]]:
        """Return this shard's part of a role's weight, as views. The weight comes in pieces that follow
        one another by outputs.
        """
        name, _, ending = _bare(role).rpartition(".")
        if name in COLUMNS and ending == "bias":  # added once
            if self.number == 0:
                return list(pieces)
            return [np.zeros(piece.shape, piece.dtype) for piece in pieces]
        outputs, inputs = self.part(role, (sum(map(len, pieces)), *pieces[0].shape[1:]))
        if inputs is not None:
            return [piece[:, slice(*inputs)] for piece in pieces]
        return list(pieces) if outputs is None else list(_cut(pieces, outputs))

    def part(
        self, role: str, shape: tuple[int, ...]
    ) -> tuple[list[tuple[int, int]] | None, tuple[int, int] | None]:
        """Return which ranges of outputs and which range of inputs of a weight are this shard's; None
        stands for all.
        """
        role = _bare(role)
        name, _, ending = role.rpartition(".")
        if name in COLUMNS and ending == "weight":
            return None, self._part(0, shape[1])
        return self._rows(role, shape[0]) if shape else None, None

    def padding(self, role: str) -> int:
        """Return how many rows of zeros follow this shard's own: the vocabulary need not be a multiple of
        the shards.
        """
        if not role.startswith("lm_head."):
            return 0
        width = cdiv(self.whole.vocab_size, self.shards.size)
        mine = min(self.whole.vocab_size - self.number * width, width)
        return width - max(mine, 0)

    def _rows(self, role: str, count: int) -> list[tuple[int, int]] | None:
        """Return the ranges of outputs that are this shard's, out of `count`; None for all."""
        c, size = self.whole, self.shards.size
        q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        name, _, _ = role.rpartition(".")
        if name == "qkv":
            return [self._part(0, q), self._kv_part(q), self._kv_part(q + kv)]
        if role == "sinks" or name == "up" or (name == "q_norm" and c.qk_norm != "head"):
            return [self._part(0, count)]
        if name == "k_norm" and c.qk_norm == "all":
            return [self._kv_part(0)]
        if name == "k_norm" and c.qk_norm == "each":
            return [self._kv_heads()]
        if name == "gate_up":
            return [self._part(0, count // 2), self._part(count // 2, count // 2)]
        if name == "lm_head":
            width = cdiv(count, size)
            return [(min(self.number * width, count), min((self.number + 1) * width, count))]
        return None

    def _part(self, first: int, count: int) -> tuple[int, int]:
        """Return this shard's range of `count` rows that begin at `first`."""
        width = count // self.shards.size
        return first + self.number * width, first + (self.number + 1) * width

    def _kv_part(self, first: int) -> tuple[int, int]:
        """Return which rows of the kv heads are this shard's, where these begin at `first`."""
        start, stop = self._kv_heads()
        return first + start * self.whole.head_dim, first + stop * self.whole.head_dim

    def _kv_heads(self) -> tuple[int, int]:
        """Return which kv heads are this shard's. Where there are fewer, neighbours have the same one."""
        c, size = self.whole, self.shards.size
        head = self.number * c.num_kv_heads // size
        return head, head + max(c.num_kv_heads // size, 1)


def _bare(role: str) -> str:
    """Return a role of an expert, or of one that all tokens have, as a dense feed-forward part names it."""
    return role.removeprefix("experts.").removeprefix("shared.")


def _cut(
    pieces: Sequence[Num[Values, "..."]], ranges: Sequence[tuple[int, int]]
) -> Iterator[Num[Values, "..."]]:
    """Yield the parts of the pieces, which follow one another, that lie in the ranges."""
    for start, stop in ranges:
        first = 0
        for piece in pieces:
            cut = piece[max(start - first, 0) : max(stop - first, 0)]
            if len(cut):
                yield cut
            first += len(piece)
