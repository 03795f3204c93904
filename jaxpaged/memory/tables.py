"""Block tables: each row's blocks in order, in one line for each group of layers."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.block_pool import BlockPool
from jaxpaged.memory.prefix_cache import Chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockTables:
    """Tables of rows. A row has one line of blocks for each group of layers, all from one pool.

    A line takes its blocks from its group's size class (see `block_pool`).

    Line `r * num_groups + g` is that of row r and group g. It names `cdiv(seq_lens[r], block_size)` blocks,
    first to last.
    """

    pool: BlockPool
    block_tables: Int[Array, "num_lines max_blocks_per_seq"]  # NULL_BLOCK beyond a line's blocks
    seq_lens: Int[Array, " max_seqs"]  # tokens each row has places for
    # Blocks out of reach, as NULL_BLOCK: the leading ones, or those behind a group's first blocks.
    num_skipped: Int[Array, " num_lines"]
    chains: Chain  # each row's cached prefix
    block_size: int = field(metadata={"static": True})  # tokens per block
    num_groups: int = field(default=1, metadata={"static": True})  # groups of layers
    # Blocks at the beginning of each group's lines that stay in reach; empty: none do.
    first_blocks: tuple[int, ...] = field(default=(), metadata={"static": True})
    # Size class of each group's blocks; empty: there is one class.
    classes: tuple[int, ...] = field(default=(), metadata={"static": True})

    @property
    def max_seqs(self) -> int:
        return self.num_lines // self.num_groups

    @property
    def num_lines(self) -> int:
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_seq(self) -> int:
        return self.block_tables.shape[1]

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks that all lines of a row have places for."""
        return self.max_blocks_per_seq * self.num_groups

    @property
    def num_blocks(self) -> Int[Array, " max_seqs"]:
        """Blocks that each row's tokens take in a line, those that left the window included."""
        return cdiv(self.seq_lens, self.block_size)

    @property
    def num_classes(self) -> int:
        """Size classes of the blocks."""
        return 1 + max(self.classes, default=0)

    @property
    def class_of_lines(self) -> Int[Array, " num_lines"]:
        """Size class of each line's blocks."""
        return jnp.tile(jnp.asarray(self.classes or (0,) * self.num_groups, jnp.int32), self.max_seqs)

    @property
    def num_held(self) -> Int[Array, "max_seqs *num_classes"]:
        """Blocks that each row holds, in all its lines; with several size classes those of each."""
        return self.by_class(self.each_line(self.num_blocks) - self.num_skipped)

    @property
    def num_first(self) -> Int[Array, " num_lines"]:
        """Places at the beginning of each line whose blocks stay in reach."""
        if not self.first_blocks:
            return jnp.zeros(self.num_lines, jnp.int32)
        return jnp.tile(jnp.asarray(self.first_blocks, jnp.int32), self.max_seqs)

    def places(self, lines: Int[Array, " n"], k: Int[Array, " n"]) -> Int[Array, " n"]:
        """Return the places in their lines of the `k`-th blocks.

        Blocks are counted as if those out of reach came before all others, first blocks included.
        """
        if not self.first_blocks:
            return k
        held = k - self.num_skipped[lines]
        return jnp.where(held < self.num_first[lines], held, k)

    def each_line(self, of_rows: Array) -> Array:
        """Return the values of rows for each of their lines, along the first axis."""
        return of_rows if self.num_groups == 1 else jnp.repeat(of_rows, self.num_groups, axis=0)

    def per_row(self, of_lines: Array) -> Array:
        """Return the sum of numbers, or of flags, over each row's lines."""
        if self.num_groups == 1:
            return of_lines
        return jnp.sum(of_lines.reshape(-1, self.num_groups), axis=1, dtype=jnp.int32)

    def by_class(self, of_lines: Array) -> Array:
        """Return the sum of numbers, or of flags, over each row's lines: [max_seqs].

        With several size classes one sum for each class: [max_seqs, num_classes].
        """
        if self.num_classes == 1:
            return self.per_row(of_lines)
        of_groups = of_lines.reshape(-1, self.num_groups)
        sums = [
            sum(
                of_groups[:, group]
                for group, class_of_group in enumerate(self.classes)
                if class_of_group == each
            )
            for each in range(self.num_classes)
        ]
        return jnp.stack(sums, axis=1)

    def total(self, of_lines: Array) -> Int[Array, "*num_classes"]:
        """Return the sum of numbers over all lines; with several size classes one sum for each class."""
        return jnp.sum(of_lines) if self.num_classes == 1 else jnp.sum(self.by_class(of_lines), axis=0)

    def lines_of(self, rows: Int[Array, " n"]) -> Int[Array, " n_groups"]:
        """Return the lines of rows, one row after the other."""
        if self.num_groups == 1:
            return rows
        return (rows[:, None] * self.num_groups + jnp.arange(self.num_groups, dtype=rows.dtype)).reshape(-1)

    def line_of(self, rows: Int[Array, "*n"], group: int = 0) -> Int[Array, "*n"]:
        """Return each row's line of one group; the first group reads most of the sequence."""
        return rows if self.num_groups == 1 else rows * self.num_groups + group
