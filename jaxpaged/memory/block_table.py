"""Block tables: each sequence's blocks in order, how many tokens they hold, and the pool they come from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_pool
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool, FreeInfo
from jaxpaged.status import Status


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "block_tables", "seq_lens"],
    meta_fields=["block_size"],
)
@dataclasses.dataclass(frozen=True)
class BlockTables:
    """Row r holds `cdiv(seq_lens[r], block_size)` blocks, named first to last in `block_tables[r]`."""

    pool: BlockPool
    block_tables: Int[Array, "max_seqs max_blocks_per_seq"]  # NULL_BLOCK beyond a row's blocks
    seq_lens: Int[Array, " max_seqs"]  # tokens each row has places for
    block_size: int  # tokens a block

    @property
    def max_seqs(self) -> int:
        return self.block_tables.shape[0]

    @property
    def max_blocks_per_seq(self) -> int:
        return self.block_tables.shape[1]

    @property
    def num_blocks(self) -> Int[Array, " max_seqs"]:
        """Blocks each row holds."""
        return cdiv(self.seq_lens, self.block_size)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["num_new_blocks", "status"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class AppendInfo:
    num_new_blocks: Int[Array, " max_seqs"]  # blocks each row took; 0 where the append was refused
    status: Int[Array, ""]


def cdiv[T: (int, Array)](a: T, b: int) -> T:
    return -(-a // b)


def create(pool: BlockPool, max_seqs: int, max_blocks_per_seq: int, block_size: int) -> BlockTables:
    """Empty tables over `pool`."""
    for name, value in {
        "max_seqs": max_seqs,
        "max_blocks_per_seq": max_blocks_per_seq,
        "block_size": block_size,
    }.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return BlockTables(
        pool=pool,
        block_tables=jnp.full((max_seqs, max_blocks_per_seq), NULL_BLOCK, jnp.int32),
        seq_lens=jnp.zeros(max_seqs, jnp.int32),
        block_size=block_size,
    )


def append(
    tables: BlockTables, num_new_tokens: Int[Array, " max_seqs"], *, max_new_blocks: int
) -> tuple[BlockTables, AppendInfo]:
    """Make places for `num_new_tokens[r] >= 0` more tokens in each row r; for all rows or for none.

    New blocks are taken in row order, as if row by row. `max_new_blocks` (static) bounds their number over
    all rows. Costs O(max_seqs + max_new_blocks), whatever the pool and the tables are.
    Status: OUT_OF_BLOCKS, TABLE_FULL (a row would outgrow its line), TOO_MANY_NEW_BLOCKS.
    """
    seq_lens = tables.seq_lens + num_new_tokens
    held = tables.num_blocks
    needed = cdiv(seq_lens, tables.block_size)
    num_new = needed - held
    table_full = jnp.any(needed > tables.max_blocks_per_seq)
    pool, allocated = block_pool.allocate(
        tables.pool, jnp.where(table_full, 0, jnp.sum(num_new, dtype=jnp.int32)), max_new_blocks
    )
    status = allocated.status | jnp.where(table_full, Status.TABLE_FULL, Status.OK)
    ok = status == Status.OK
    num_new = jnp.where(ok, num_new, 0)

    # The k-th block taken belongs to the row whose share of the running total holds k.
    end = jnp.cumsum(num_new, dtype=jnp.int32)
    k = jnp.arange(max_new_blocks, dtype=jnp.int32)
    row = jnp.searchsorted(end, k, side="right").astype(jnp.int32)  # max_seqs beyond the last block
    col = held.at[row].get(mode="clip") + k - (end - num_new).at[row].get(mode="clip")
    tables = dataclasses.replace(
        tables,
        pool=pool,
        block_tables=tables.block_tables.at[row, col].set(allocated.block_ids, mode="drop"),
        seq_lens=jnp.where(ok, seq_lens, tables.seq_lens),
    )
    return tables, AppendInfo(num_new_blocks=num_new, status=status)


def free_rows(tables: BlockTables, rows: Bool[Array, " max_seqs"]) -> tuple[BlockTables, FreeInfo]:
    """Give back all blocks of the masked rows, row by row, each first block first; the rows become empty."""
    block_ids = tables.block_tables.reshape(-1)
    mask = jnp.repeat(rows, tables.max_blocks_per_seq)
    pool, info = block_pool.free(tables.pool, block_ids, mask)
    clear = rows & (info.status == Status.OK)
    return dataclasses.replace(
        tables,
        pool=pool,
        block_tables=jnp.where(clear[:, None], NULL_BLOCK, tables.block_tables),
        seq_lens=jnp.where(clear, 0, tables.seq_lens),
    ), info


def slot_mapping(
    tables: BlockTables,
    rows: Int[Array, "*tokens"],
    positions: Int[Array, "*tokens"],
    valid: Bool[Array, "*tokens"],
) -> Int[Array, "*tokens"]:
    """The cache slot of each token: `block_id * block_size + offset`; invalid tokens go to the null block."""
    block_id = tables.block_tables[rows, positions // tables.block_size]
    slot = block_id * tables.block_size + positions % tables.block_size
    return jnp.where(valid, slot, NULL_BLOCK * tables.block_size)
