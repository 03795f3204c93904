"""Canonical form of a state: equal for states that differ only in the names of blocks and of cache nodes."""

from typing import Any

import numpy as np

from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import free_block_ids
from jaxpaged.memory.prefix_cache import PrefixCache
from jaxpaged.step.feature_values import DRAFTS
from jaxpaged.step.state import EngineState, Phase

type Key = tuple[Any, ...]
LIVE = (Phase.WAITING, Phase.RUNNING, Phase.SWAPPED)


class Names(dict[Any, int]):
    """Names in the order in which things are first met."""

    def of(self, thing: Any) -> int:
        return self.setdefault(thing, len(self))


def live_rows(state: EngineState) -> list[int]:
    """Return the rows with unfinished requests, in the order in which they are served."""
    return [int(row) for row in state.rows.order if state.rows.phase[row] in LIVE]


def seen(state: EngineState) -> Key:
    """Return the part of the state that the oracle has, too: phases, tokens, tables and the free queue, with
    blocks renumbered.
    """
    names, rows = Names({0: 0}), []
    for row, phase in enumerate(state.rows.phase.tolist()):
        if phase not in LIVE:
            rows.append((phase,))
            continue
        held = state.host.tables if state.host is not None and phase == Phase.SWAPPED else state.tables
        num_tokens, computed = int(state.rows.num_tokens[row]), int(held.seq_lens[row])
        line = () if phase != Phase.RUNNING else blocks_of(state.tables, row)
        rows.append((phase, num_tokens, computed, *map(names.of, line)))
    return (*rows, tuple(map(names.of, free_block_ids(state.tables.pool))))


def blocks_of(tables: BlockTables, row: int) -> list[int]:
    """Return the blocks of a row's computed tokens."""
    return [int(block) for block in tables.block_tables[row] if block]


def key(state: EngineState) -> Key:
    """Return the canonical form. Left out: K and V, scores, counters, and where things lie in rings and hash
    tables.

    What finished requests leave in their rows is left out, too: nothing reads it.
    """
    tables, rows = state.tables, state.rows
    names, nodes = Names({0: 0}), Names()
    live = live_rows(state)
    lines = [tuple(map(names.of, blocks_of(tables, row))) for row in live]
    free = tuple(map(names.of, free_block_ids(tables.pool)))
    held = tuple(min(int(tables.pool.free_queue.place[block]), 0) for block in names)
    cache = tables.pool.prefix_cache
    content: Key = ()
    chains: Key = ()
    if cache is not None:
        content = tuple(_content(cache, block, nodes) for block in names if block < cache.num_blocks)
        content += tuple(_rings(cache, names))
        fields = tables.chains.fields
        chains = tuple((int(fields[r, 1]), _node(int(fields[r, 2]), int(fields[r, 3]), nodes)) for r in live)
    host: Key = ()
    if state.host is not None:
        host = (*state.host.tables.seq_lens.tolist(), len(free_block_ids(state.host.tables.pool)))
    phases = tuple(rows.phase.tolist())
    progress = tuple((int(rows.num_tokens[row]), int(tables.seq_lens[row])) for row in live)
    rejected = tuple(state.last_rejected.tolist())
    drafting: Key = ()
    if DRAFTS in rows.features:
        record = (rows.drafting.most, rows.drafting.misses, rows.drafting.wait, rows.drafting.idle)
        drafting = tuple(tuple(int(each[row]) for each in record) for row in live)
    return phases, tuple(live), progress, tuple(lines), free, held, content, chains, host, rejected, drafting


def _node(slot: int, generation: int, nodes: Names) -> Any:
    return (slot, generation) if slot < 0 else nodes.of((slot, generation))


def _content(cache: PrefixCache, block: int, nodes: Names) -> Any:
    slot = int(cache.slot[block])
    if slot < 0:
        return None
    node = nodes.of((slot, int(cache.generation[slot])))
    parent_slot, parent_generation = cache.parent[block].tolist()
    return node, _node(parent_slot, parent_generation, nodes), tuple(cache.token_ids[block].tolist())


def _rings(cache: PrefixCache, names: Names) -> list[tuple[int, int]]:
    """Return the pairs of neighbours in the rings of blocks with the same content."""
    with_content = np.flatnonzero(cache.slot >= 0).tolist()
    links = {names.of(block): names.of(int(cache.neighbours[block, 0])) for block in with_content}
    return sorted(links.items())
