"""Moving rows between the device's tables and the host's: says which block is to be copied where."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_pool import NULL_BLOCK, flag
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.entries import first_equal, number_through
from jaxpaged.status import Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SwapInfo:
    """Block `sources[i]` of the one pool is to be copied to `destinations[i]` of the other."""

    sources: Int[Array, " max_blocks"]  # in the order of rows and positions; NULL_BLOCK: nothing to copy
    destinations: Int[Array, " max_blocks"]
    status: Int[Array, ""]


def swap_out(
    device: BlockTables, host: BlockTables, rows: Bool[Array, " max_seqs"], *, max_blocks: int | None = None
) -> tuple[BlockTables, BlockTables, SwapInfo]:
    """Move the masked rows from the device's tables to the same rows, empty so far, of the host's.

    Blocks that several of these rows share are copied once and stay shared (`Policy.unshares_in_swap`: once
    for each row). Blocks that other rows hold stay there. `max_blocks` (static) bounds the blocks of these
    rows; without it, they may be the whole table. Costs O(max_blocks).
    Status: OUT_OF_BLOCKS (of the host), ROW_IN_USE (on the host), TOO_MANY_BLOCKS.
    """
    source, target = device, host
    if source.block_tables.shape != target.block_tables.shape:
        raise ValueError(f"{source.block_tables.shape=} must equal {target.block_tables.shape=}")
    if source.classes != target.classes:
        raise ValueError(f"{source.classes=} must equal {target.classes=}")
    if source.block_size != target.block_size:
        raise ValueError(f"{source.block_size=} must equal {target.block_size=}")
    size = source.block_tables.size if max_blocks is None else max_blocks
    rows = rows & (source.seq_lens > 0)
    in_use = jnp.any(rows & (target.seq_lens > 0))
    of_lines = source.each_line(rows)
    counts = jnp.where(of_lines, source.each_line(source.num_blocks) - source.num_skipped, 0)
    too_many = jnp.sum(counts) > size
    counts = jnp.where(in_use | too_many, 0, counts)
    row, k, used = number_through(counts, size)
    col = source.places(row, source.num_skipped[row] + k)
    ids = source.block_tables[row, col]
    index = jnp.arange(size, dtype=jnp.int32)
    first = index if source.pool.policy.unshares_in_swap else first_equal(ids, mask=used)
    moves = used & (first == index)

    classes = None
    if source.num_classes > 1:
        classes = block_pool.packed(source.class_of_lines[row], moves)
    pool, allocated = block_pool.allocate(target.pool, jnp.sum(moves, dtype=jnp.int32), size, classes)
    status = allocated.status | flag(in_use, Status.ROW_IN_USE) | flag(too_many, Status.TOO_MANY_BLOCKS)
    done = status == Status.OK
    new_ids = allocated.block_ids[(jnp.cumsum(moves, dtype=jnp.int32) - 1)[first]]
    target = replace(
        target,
        pool=block_pool.hold(pool, new_ids, done & used & ~moves, 1),
        block_tables=target.block_tables.at[jnp.where(done & used, row, target.num_lines), col].set(
            new_ids, mode="drop"
        ),
        seq_lens=jnp.where(done & rows, source.seq_lens, target.seq_lens),
        num_skipped=jnp.where(done & of_lines, source.num_skipped, target.num_skipped),
        chains=prefix_cache.where(done & rows, source.chains, target.chains),
    )
    source, _ = block_table.free_rows(source, done & rows)
    return (
        source,
        target,
        SwapInfo(
            sources=jnp.where(done & moves, ids, NULL_BLOCK),
            destinations=jnp.where(done & moves, new_ids, NULL_BLOCK),
            status=status,
        ),
    )


def swap_in(
    device: BlockTables, host: BlockTables, rows: Bool[Array, " max_seqs"], *, max_blocks: int | None = None
) -> tuple[BlockTables, BlockTables, SwapInfo]:
    """Move rows back, as `swap_out` does: sources are the host's blocks; the device may run out of blocks."""
    host, device, info = swap_out(host, device, rows, max_blocks=max_blocks)
    return device, host, info
