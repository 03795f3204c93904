"""Block tables: each sequence's blocks in order, how many tokens they hold, and the pool they come from.

Every transition acts on all rows at once, with exactly the result of going row by row, and on all or none.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import check
from jaxpaged.memory import block_pool, group_content, prefix_cache
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool, FreeInfo, StatusInfo, flag
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.copy_on_write import last_blocks, new_blocks, writes_into_last
from jaxpaged.memory.entries import in_chunks, number_through
from jaxpaged.memory.policies import Sweep
from jaxpaged.memory.prefix_cache import Chain
from jaxpaged.memory.tables import BlockTables
from jaxpaged.status import Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AppendInfo:
    """Before anything is written, block `copy_sources[i]` is to be copied to `copy_destinations[i]`."""

    num_new_blocks: Int[Array, " max_seqs"]  # blocks that each row took, copies included; 0 if refused
    copy_sources: Int[Array, " num_lines"]  # NULL_BLOCK where nothing is to be copied
    copy_destinations: Int[Array, " num_lines"]
    new_ids: Int[Array, " max_new_blocks"]  # all blocks that were taken; NULL_BLOCK beyond them
    status: Int[Array, ""]


def create(
    pool: BlockPool,
    max_seqs: int,
    max_blocks_per_seq: int,
    block_size: int,
    num_groups: int = 1,
    first_blocks: tuple[int, ...] = (),
    classes: tuple[int, ...] = (),
) -> BlockTables:
    """Create empty tables over `pool`, with a line for each group of layers in every row.

    first_blocks, classes: see `BlockTables`.
    """
    sizes = {"max_seqs": max_seqs, "max_blocks_per_seq": max_blocks_per_seq, "block_size": block_size}
    sizes["num_groups"] = num_groups
    for name, value in sizes.items():
        check(name, value, "at least 1", value >= 1)
    rule = f"empty, or num_groups={num_groups} numbers that are not negative"
    is_one_each = len(first_blocks) == num_groups and min(first_blocks) >= 0
    check("first_blocks", first_blocks, rule, not first_blocks or is_one_each)
    rule = f"the size class of each of num_groups={num_groups} groups, from 0 to {pool.num_classes - 1}"
    is_each = len(classes) == num_groups and sorted({*classes}) == [*range(pool.num_classes)]
    check("classes", classes, rule, is_each if classes else pool.num_classes == 1)
    cache = pool.prefix_cache
    if cache is not None and cache.block_size != block_size:
        raise ValueError(f"{cache.block_size=} must equal {block_size=}")
    return BlockTables(
        pool=pool,
        block_tables=jnp.full((max_seqs * num_groups, max_blocks_per_seq), NULL_BLOCK, jnp.int32),
        seq_lens=jnp.zeros(max_seqs, jnp.int32),
        num_skipped=jnp.zeros(max_seqs * num_groups, jnp.int32),
        chains=prefix_cache.root(cache, jnp.zeros(max_seqs, jnp.int32)),
        block_size=block_size,
        num_groups=num_groups,
        first_blocks=first_blocks,
        classes=classes if pool.num_classes > 1 else (),
    )


def append(
    tables: BlockTables, num_new_tokens: Int[Array, " max_seqs"], *, max_new_blocks: int
) -> tuple[BlockTables, AppendInfo]:
    """Make places for `num_new_tokens[r] >= 0` more tokens in each row r, that r alone may write to.

    A last block that is partly filled and that others hold too is replaced by a new one, and is to be copied
    there. Blocks are taken row by row, in a row line by line, from the size class of each; in a line the
    copy's comes first (or last: `Policy.copies_last`). `max_new_blocks` (static) bounds their number over all
    rows. Costs O(num_lines + max_new_blocks), whatever the pool and the tables are.
    Status: OUT_OF_BLOCKS, TABLE_FULL (a row would outgrow its line), TOO_MANY_BLOCKS.
    """
    pool = tables.pool
    seq_lens = tables.seq_lens + num_new_tokens
    held = tables.each_line(tables.num_blocks)
    table_full = jnp.any(cdiv(seq_lens, tables.block_size) > tables.max_blocks_per_seq)

    last_ids = last_blocks(tables)
    num_new, copies = new_blocks(tables, last_ids, num_new_tokens)
    classes = None
    if tables.num_classes > 1:
        line, _, _ = number_through(num_new, max_new_blocks)
        classes = tables.class_of_lines[line]
    pool, allocated = block_pool.allocate(
        pool, jnp.where(table_full, 0, jnp.sum(num_new, dtype=jnp.int32)), max_new_blocks, classes
    )
    status = allocated.status | flag(table_full, Status.TABLE_FULL)
    ok = status == Status.OK
    num_new = jnp.where(ok, num_new, 0)
    copies &= ok
    pool = block_pool.hold(pool, last_ids, copies, -1)
    # A block that is about to be overwritten, which is rare, loses its findable content.
    if tables.block_size > 1:  # blocks of one token are never partly filled
        writes = tables.each_line(writes_into_last(tables, num_new_tokens))
        pool = block_pool.forget(pool, last_ids, writes & ~copies & ok)

    row, k, used = number_through(num_new, max_new_blocks)
    if pool.policy.copies_last:
        col = jnp.where(copies[row] & (k == num_new[row] - 1), held[row] - 1, held[row] + k)
    else:
        col = held[row] + k - copies[row]
    is_copy = used & (col < held[row])
    nobody = jnp.zeros(tables.num_lines, jnp.int32)
    target = jnp.where(is_copy, row, tables.num_lines)
    tables = replace(
        tables,
        pool=pool,
        block_tables=tables.block_tables.at[jnp.where(used, row, tables.num_lines), col].set(
            allocated.block_ids, mode="drop"
        ),
        seq_lens=jnp.where(ok, seq_lens, tables.seq_lens),
    )
    return tables, AppendInfo(
        num_new_blocks=tables.per_row(num_new),
        copy_sources=jnp.where(copies, last_ids, NULL_BLOCK),
        copy_destinations=nobody.at[target].set(allocated.block_ids, mode="drop"),
        new_ids=allocated.block_ids,
        status=status,
    )


def fork(
    tables: BlockTables,
    sources: Int[Array, " num_forks"],
    destinations: Int[Array, " num_forks"],
    mask: Bool[Array, " num_forks"],
) -> tuple[BlockTables, StatusInfo]:
    """Let each masked destination row, empty so far, hold the blocks of its source row too.

    Status: UNKNOWN_ROW (a row that does not exist, an empty source), ROW_IN_USE (a destination that holds
    blocks or is named twice).
    """
    exists = _row_exists(tables, sources) & _row_exists(tables, destinations)
    unknown = jnp.any(mask & ~(exists & (tables.seq_lens[sources] > 0)))
    in_use = _any_in_use(tables, destinations, mask)
    done = mask & ~(unknown | in_use)
    # The table is read once, before the write. A second read would make XLA copy the whole table.
    from_lines, is_line = tables.lines_of(sources), tables.each_line(done)
    lines = lax.optimization_barrier(jnp.where(is_line[:, None], tables.block_tables[from_lines], NULL_BLOCK))
    target = jnp.where(done, destinations, tables.max_seqs)
    target_lines = tables.lines_of(target)
    tables = replace(
        tables,
        pool=block_pool.hold(tables.pool, lines, lines != NULL_BLOCK, 1),
        block_tables=tables.block_tables.at[target_lines].set(lines, mode="drop"),
        seq_lens=tables.seq_lens.at[target].set(tables.seq_lens[sources], mode="drop"),
        num_skipped=tables.num_skipped.at[target_lines].set(tables.num_skipped[from_lines], mode="drop"),
        chains=jax.tree.map(lambda x: x.at[target].set(x[sources], mode="drop"), tables.chains),
    )
    return tables, StatusInfo(flag(unknown, Status.UNKNOWN_ROW) | flag(in_use, Status.ROW_IN_USE))


def adopt(
    tables: BlockTables,
    rows: Int[Array, " num_rows"],
    block_ids: Int[Array, "num_hit_lines max_hits"],
    chains: Chain,
    mask: Bool[Array, " num_rows"],
) -> tuple[BlockTables, StatusInfo]:
    """Begin each masked row, empty so far, with the blocks that `prefix_cache.lookup` found for it.

    `block_ids` has a line for each group of each row, row by row. In the line of a group that does not need a
    block the null block stands for it; `slide_windows` then leaves it out. The blocks are touched, so that
    nothing allocated later can evict them. The row's salt is the lookup's.
    Costs what is hit. Status: UNKNOWN_ROW, ROW_IN_USE, TABLE_FULL (the hit is longer than a row),
    UNKNOWN_BLOCK.
    """
    unknown = jnp.any(mask & ~_row_exists(tables, rows))
    in_use = _any_in_use(tables, rows, mask)
    table_full = jnp.any(mask & (chains.num_blocks > tables.max_blocks_per_seq))
    is_hit = mask[:, None] & (jnp.arange(block_ids.shape[1]) < chains.num_blocks[:, None])
    is_hit = tables.each_line(is_hit)
    unknown_block = jnp.any(is_hit & ~((block_ids >= 0) & (block_ids < tables.pool.num_blocks)))
    status = (
        flag(unknown, Status.UNKNOWN_ROW)
        | flag(in_use, Status.ROW_IN_USE)
        | flag(table_full, Status.TABLE_FULL)
        | flag(unknown_block, Status.UNKNOWN_BLOCK)
    )
    done = mask & (status == Status.OK)
    target = jnp.where(done, rows, tables.max_seqs)
    target_lines = tables.lines_of(target)
    type Held = tuple[BlockPool, Int[Array, "num_lines max_blocks_per_seq"]]

    def hold(row: Array, k: Array, used: Array, held: Held) -> Held:
        pool, block_tables = held
        ids = block_ids[row, k]
        pool, _ = block_pool.touch(pool, ids, used)
        line = jnp.where(used, target_lines[row], tables.num_lines)
        return pool, block_tables.at[line, k].set(ids, mode="drop")

    counts = tables.each_line(jnp.where(done, chains.num_blocks, 0))
    pool, block_tables = in_chunks(counts, hold, (tables.pool, tables.block_tables))
    tables = replace(
        tables,
        pool=pool,
        block_tables=block_tables,
        seq_lens=tables.seq_lens.at[target].set(chains.num_blocks * tables.block_size, mode="drop"),
        chains=jax.tree.map(lambda x, new: x.at[target].set(new, mode="drop"), tables.chains, chains),
    )
    return tables, StatusInfo(status)


def cache_full_blocks(
    tables: BlockTables,
    tokens_at: Callable[[Int[Array, "n block_size"], Int[Array, "n block_size"]], Int[Array, "n block_size"]],
    num_tokens: Int[Array, " max_seqs"],
    *,
    max_blocks: int,
) -> tuple[BlockTables, StatusInfo]:
    """Make the full blocks among the first `num_tokens[r]` tokens of each row findable.

    Call it when their K and V are written. `tokens_at` is asked for the tokens by row and position, and only
    for those. `max_blocks` (static) bounds the blocks new to it over all rows. Costs O(max_seqs +
    max_blocks), whatever the pool and the tables are.
    Status: TOO_FEW_TOKENS (a row has not so many), TOO_MANY_BLOCKS.
    """
    if tables.pool.prefix_cache is None:
        raise ValueError("the pool must have a prefix cache: give block_pool.create one")
    counts = jnp.maximum(num_tokens // tables.block_size - tables.chains.num_blocks, 0)
    too_few = jnp.any(num_tokens > tables.seq_lens)
    too_many = jnp.sum(counts) > max_blocks
    counts = jnp.where(too_few | too_many, 0, counts)
    row, k, used = number_through(counts, max_blocks)
    col = tables.chains.num_blocks[row] + k
    positions = col[:, None] * tables.block_size + jnp.arange(tables.block_size)
    block_ids = tables.block_tables[tables.line_of(row), col]
    cache, chains = prefix_cache.insert(
        tables.pool.prefix_cache,
        tables.chains,
        counts,
        row,
        block_ids,
        tokens_at(jnp.broadcast_to(row[:, None], positions.shape), positions),
    )
    pool = block_pool.note_content(replace(tables.pool, prefix_cache=cache), block_ids, col, used)
    if tables.num_groups > 1:
        groups = range(1, tables.num_groups)
        its_ids = jnp.stack([tables.block_tables[tables.line_of(row, group), col] for group in groups])
        cache = group_content.insert(cache, block_ids, its_ids, used)
        pool = replace(pool, prefix_cache=cache)
        for ids in its_ids:
            pool = block_pool.note_content(pool, ids, col, used)
    tables = replace(tables, pool=pool, chains=chains)
    return tables, StatusInfo(flag(too_few, Status.TOO_FEW_TOKENS) | flag(too_many, Status.TOO_MANY_BLOCKS))


def free_rows(tables: BlockTables, rows: Bool[Array, " max_seqs"]) -> tuple[BlockTables, FreeInfo]:
    """Give back all blocks of the masked rows, row by row; the rows become empty.

    In a row the first block goes first, or the last: the policy's sweeps say so. Costs what the rows hold; if
    they are empty, nothing.
    """
    rows = rows & ((tables.seq_lens > 0) | (tables.chains.salt != 0))  # an empty row still has its salt

    def free() -> tuple[BlockTables, FreeInfo]:
        held = tables.each_line(tables.num_blocks) - tables.num_skipped
        counts = jnp.where(tables.each_line(rows), held, 0)
        freed, info = _release(tables, tables.num_skipped, counts)
        return _clear(freed, rows & (info.status == Status.OK)), info

    return lax.cond(jnp.any(rows), free, lambda: (tables, FreeInfo(jnp.int32(0), jnp.int32(Status.OK))))


def reset(tables: BlockTables) -> tuple[BlockTables, FreeInfo]:
    """Free every row. Cached content stays findable: see `block_pool.reset_prefix_cache`."""
    return free_rows(tables, jnp.ones(tables.max_seqs, bool))


def truncate(tables: BlockTables, num_tokens: Int[Array, " max_seqs"]) -> tuple[BlockTables, FreeInfo]:
    """Give back the last `num_tokens[r]` tokens of each row r, and the blocks that hold nothing else.

    In the order of `free_rows`. Costs O(max_seqs), and what is given back. Status: TOO_FEW_TOKENS (a row has
    not so many, or its end would be among the blocks out of reach).
    """
    seq_lens = tables.seq_lens - num_tokens
    lens = tables.each_line(seq_lens)
    gap_end = tables.num_skipped
    if tables.first_blocks:
        gap_end = jnp.where(gap_end > 0, gap_end + tables.num_first, 0)
    too_few = jnp.any((lens < gap_end * tables.block_size) & (lens != 0))
    left = jnp.where(lens == 0, tables.num_skipped, cdiv(lens, tables.block_size))
    counts = jnp.where(too_few, 0, tables.each_line(tables.num_blocks) - left)
    before = tables
    tables, info = _release(tables, left, counts)
    status = info.status | flag(too_few, Status.TOO_FEW_TOKENS)
    ok = status == Status.OK
    tables = replace(tables, seq_lens=jnp.where(ok, seq_lens, before.seq_lens))
    if tables.pool.prefix_cache is not None:
        num_full = tables.seq_lens // tables.block_size
        line = tables.line_of(jnp.arange(tables.max_seqs))
        last_ids = tables.block_tables[line, jnp.maximum(num_full - 1, 0)]
        chains = prefix_cache.rewind(tables.pool.prefix_cache, tables.chains, num_full, last_ids)
        tables = replace(tables, chains=chains)
    emptied = ok & (seq_lens == 0) & (num_tokens > 0)
    return _clear(tables, emptied, keep_salt=True), replace(info, status=status)


def slide_window(
    tables: BlockTables, num_skipped_tokens: Int[Array, " num_lines"]
) -> tuple[BlockTables, FreeInfo]:
    """Free the blocks that hold nothing but the first `num_skipped_tokens[i]` tokens of line i.

    Those of `BlockTables.first_blocks` stay. The null block stands in for the others. Order and costs as in
    `truncate`.
    Status: TOO_FEW_TOKENS (a row has not so many).
    """
    too_few = jnp.any(num_skipped_tokens > tables.each_line(tables.seq_lens))
    out_of_reach = num_skipped_tokens // tables.block_size
    if tables.first_blocks:
        out_of_reach -= tables.num_first
    num_skipped = jnp.maximum(out_of_reach, tables.num_skipped)
    counts = jnp.where(too_few, 0, num_skipped - tables.num_skipped)
    first = tables.num_skipped + tables.num_first if tables.first_blocks else tables.num_skipped
    tables, info = _release(tables, first, counts)
    status = info.status | flag(too_few, Status.TOO_FEW_TOKENS)
    num_skipped = jnp.where(status == Status.OK, num_skipped, tables.num_skipped)
    return replace(tables, num_skipped=num_skipped), replace(info, status=status)


def slide_windows(
    tables: BlockTables, rows: Bool[Array, " max_seqs"], specs: Sequence[CacheSpec]
) -> tuple[BlockTables, FreeInfo]:
    """Free the blocks of the masked rows that no coming token can read; `specs` are those of the groups."""
    if all(spec.most_kept(1) is None for spec in specs):
        return tables, FreeInfo(jnp.int32(0), jnp.int32(Status.OK))
    skipped = [jnp.where(rows, spec.first_read(tables.seq_lens), 0) for spec in specs]
    return slide_window(tables, skipped[0] if len(skipped) == 1 else jnp.stack(skipped, axis=1).reshape(-1))


def slot_mapping(
    tables: BlockTables,
    rows: Int[Array, "*tokens"],
    positions: Int[Array, "*tokens"],
    valid: Bool[Array, "*tokens"],
    group: int = 0,
) -> Int[Array, "*tokens"]:
    """Return the slot of each token in one group's blocks: `block_id * block_size + offset`.

    Invalid tokens get the null block's.
    """
    block_id = tables.block_tables[tables.line_of(rows, group), positions // tables.block_size]
    slot = block_id * tables.block_size + positions % tables.block_size
    return jnp.where(valid, slot, NULL_BLOCK * tables.block_size)


def _release(
    tables: BlockTables, first: Int[Array, " num_lines"], counts: Int[Array, " num_lines"]
) -> tuple[BlockTables, FreeInfo]:
    """Free `counts[i]` of the blocks of each line i, from the `first[i]`-th on.

    The null block takes their places. Blocks are counted as if those out of reach came before all others (see
    `BlockTables.places`).

    Refused is what tables that are broken already name too often; what goes before it is freed.
    """
    type Carry = tuple[BlockTables, FreeInfo]
    sweeps = tables.pool.policy.sweeps

    def free_some(sweep: Sweep, row: Array, k: Array, used: Array, carry: Carry) -> Carry:
        tables, info = carry
        col = first[row] + (counts[row] - 1 - k if sweep.last_block_first else k)
        col = tables.places(row, col)
        pool, freed = block_pool.free(tables.pool, tables.block_tables[row, col], used, sweep)
        tables = replace(tables, pool=pool)
        if sweep is sweeps[-1]:  # earlier sweeps still look their blocks up by name
            cleared = jnp.where(used & (freed.status == Status.OK), row, tables.num_lines)
            block_tables = tables.block_tables.at[cleared, col].set(NULL_BLOCK, mode="drop")
            tables = replace(tables, block_tables=block_tables)
        return tables, FreeInfo(info.num_freed + freed.num_freed, info.status | freed.status)

    carry: Carry = tables, FreeInfo(jnp.int32(0), jnp.int32(Status.OK))
    for sweep in sweeps:
        carry = in_chunks(counts, functools.partial(free_some, sweep), carry)
    return carry


def _clear(tables: BlockTables, rows: Bool[Array, " max_seqs"], *, keep_salt: bool = False) -> BlockTables:
    """Forget all but the (already empty) lines of the masked rows."""
    salt = tables.chains.salt if keep_salt else jnp.zeros_like(tables.chains.salt)
    chains = prefix_cache.where(rows, prefix_cache.root(tables.pool.prefix_cache, salt), tables.chains)
    return replace(
        tables,
        seq_lens=jnp.where(rows, 0, tables.seq_lens),
        num_skipped=jnp.where(tables.each_line(rows), 0, tables.num_skipped),
        chains=chains,
    )


def _row_exists(tables: BlockTables, rows: Int[Array, " n"]) -> Bool[Array, " n"]:
    return (rows >= 0) & (rows < tables.max_seqs)


def _any_in_use(tables: BlockTables, rows: Int[Array, " n"], mask: Bool[Array, " n"]) -> Bool[Array, ""]:
    """Return whether a masked row holds blocks, or is named twice."""
    times = jnp.zeros(tables.max_seqs, jnp.int32).at[rows].add(mask, mode="drop")
    return jnp.any(mask & ((tables.seq_lens[rows] > 0) | (times[rows] > 1)))
