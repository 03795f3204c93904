"""Copy-on-write: which lines of block tables take new blocks for new tokens, and which of them for copies."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.block_pool import NULL_BLOCK
from jaxpaged.memory.entries import first_equal
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.memory.tables import BlockTables


def last_blocks(tables: BlockTables) -> Int[Array, " num_lines"]:
    """Return each line's last block; NULL_BLOCK for a line that holds none."""
    line = jnp.arange(tables.num_lines)
    return tables.block_tables[line, tables.each_line(jnp.maximum(tables.num_blocks - 1, 0))]


def new_blocks(
    tables: BlockTables, last_ids: Int[Array, " num_lines"], num_new_tokens: Int[Array, " max_seqs"]
) -> tuple[Int[Array, " num_lines"], Bool[Array, " num_lines"]]:
    """Return how many blocks each line takes for its row's new tokens, and whether one is for a copy.

    The lines' last blocks are given, as `last_blocks` has them: so the tables need not be read.
    """
    copies = must_copy(tables, last_ids, num_new_tokens)
    grown = cdiv(tables.seq_lens + num_new_tokens, tables.block_size) - tables.num_blocks
    return tables.each_line(grown) + copies, copies


def must_copy(
    tables: BlockTables, last_ids: Int[Array, " num_lines"], num_new_tokens: Int[Array, " max_seqs"]
) -> Bool[Array, " num_lines"]:
    """Return which lines must copy their last blocks before they are written, because others hold those too.

    Line by line each lets go of its block; when nobody else is left, the last of them may keep it.
    """
    writes = tables.each_line(writes_into_last(tables, num_new_tokens)) & (last_ids != NULL_BLOCK)
    num_holders = FreeQueue.NOT_QUEUED - tables.pool.place(last_ids)

    def count_writers() -> Bool[Array, " num_lines"]:
        index = jnp.arange(last_ids.shape[0], dtype=jnp.int32)
        first = first_equal(last_ids, mask=writes)
        num_writers = jnp.zeros_like(index).at[first].add(1)
        last_writer = jnp.zeros_like(index).at[first].max(index)
        return writes & ((num_writers[first] < num_holders) | (last_writer[first] != index))

    # Rows rarely share blocks here.
    return lax.cond(jnp.any(writes & (num_holders > 1)), count_writers, lambda: jnp.zeros_like(writes))


def writes_into_last(
    tables: BlockTables, num_new_tokens: Int[Array, " max_seqs"]
) -> Bool[Array, " max_seqs"]:
    """Return which rows' new tokens begin in a partly filled last block."""
    return (num_new_tokens > 0) & (tables.seq_lens % tables.block_size != 0)
