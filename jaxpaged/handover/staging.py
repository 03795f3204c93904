"""Blocks on their way between host memory and an engine's cache, in pieces of one size, beside its runs.

What a piece needs of the device between two runs is one small program, for which the host does not wait: it
writes a piece that lies on the device already, or reads one that is copied to the host later. The copies
between host and device go beside the runs, in any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged.handover import programs
from jaxpaged.handover.exchange import (
    block_bytes,
    by_block,
    check_classes,
    in_blocks,
    padded,
    shapes_of,
    sharding_of,
    with_pool,
)
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.step.state import EngineState

PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Line:
    """A chain of full blocks: what programs take of it."""

    token_ids: np.ndarray  # int32 [max_blocks, block_size], padded
    num_blocks: np.int32
    salt: np.int32

    @classmethod
    def of(cls, state: EngineState, tokens: np.ndarray, salt: int) -> "Line":
        """Make that of a sequence of tokens."""
        its = in_blocks(state, tokens)
        return cls(padded(state, its), np.int32(len(its)), np.int32(salt))

    @property
    def arguments(self) -> tuple[np.ndarray, np.int32, np.int32]:
        return self.token_ids, self.num_blocks, self.salt


def piece_size(state: EngineState, num_groups: int) -> int:
    """Return how many blocks a piece has: of `PIECE_BYTES`, but no more than a sequence, and one a group."""
    most = num_groups * state.tables.max_blocks_per_seq
    return max(min(PIECE_BYTES // block_bytes(state.kv_cache), most), num_groups)


def places_of(state: EngineState, pairs: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """Return the places of blocks, each given by its group and its place in a chain, int32 [size]."""
    places = np.full(size, -1, np.int32)
    places[: len(pairs)] = [group * state.tables.max_blocks_per_seq + i for group, i in pairs]
    return places


class Target:
    """The devices of a cache, as pieces see them: any thread may ask, also while the cache is donated."""

    def __init__(self, state: EngineState, size: int, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._shapes = shapes_of(state.kv_cache, size, mesh)
        self._shardings = {name: sharding_of(state.kv_cache, name, mesh) for name in self._shapes}
        self.num_bytes = size * block_bytes(state.kv_cache)  # of a piece

    def gathered(self, blocks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, jax.Array]:
        """Copy single blocks into a piece on the device, behind them zeros. Waits until they are there."""
        chunk = {name: np.zeros(like.shape, like.dtype) for name, like in self._shapes.items()}
        for i, block in enumerate(blocks):
            for name, array in block.items():
                chunk[name][i] = array
        if self._mesh is not None:
            chunk = {name: np.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:]) for name, x in chunk.items()}
        made = {name: jax.device_put(x, self._shardings[name]) for name, x in chunk.items()}
        return jax.block_until_ready(made)


def arrived(
    state: EngineState,
    line: Line,
    present: np.ndarray,
    places: np.ndarray,
    arrays: Mapping[str, jax.Array],
    mesh: Mesh | None = None,
) -> tuple[EngineState, jax.Array]:
    """Return the state in which a chain is cached whose new blocks are a piece, and whether it is.

    present: bool [num_groups, num_blocks]. K and V of the given state are donated. Waits for nothing.
    """
    check_classes(state)
    its = np.zeros((len(present), state.tables.max_blocks_per_seq), bool)
    its[:, : present.shape[1]] = present
    pool, kv_cache, done = programs.arrive_blocks(
        state.tables.pool, state.kv_cache, *line.arguments, its, places, arrays, mesh=mesh
    )
    return replace(with_pool(state, pool, mesh), kv_cache=kv_cache), done


@dataclass(frozen=True)
class Leaving:
    """Piece that was read on the device, on its way to the host."""

    is_there: jax.Array  # bool [size]
    arrays: Mapping[str, jax.Array]

    def on_host(self, mesh: Mesh | None = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return which blocks were there, and K and V by blocks. Waits for them."""
        is_there, arrays = jax.device_get((self.is_there, dict(self.arrays)))
        return is_there, {name: by_block(x, mesh) for name, x in arrays.items()}


def leaving(
    state: EngineState,
    line: Line,
    places: np.ndarray,
    specs: tuple[CacheSpec, ...],
    mesh: Mesh | None = None,
) -> Leaving:
    """Begin to read those blocks of a chain that the cache has, and to copy them. Waits for nothing."""
    check_classes(state)
    its = state.tables.pool, state.kv_cache, *line.arguments, places
    is_there, arrays = programs.depart_blocks(*its, specs=specs, mesh=mesh)
    for array in (is_there, *arrays.values()):
        array.copy_to_host_async()
    return Leaving(is_there, arrays)
