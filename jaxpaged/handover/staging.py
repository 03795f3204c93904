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
from jaxpaged.handover.exchange import by_block, in_blocks, padded, shapes_of, sharding_of, with_pool
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.step.state import EngineState

PIECE_BYTES = 16 * 2**20

type Pair = tuple[int, int]  # a block's group, and its place in a chain


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


@dataclass(frozen=True)
class PieceSizes:
    """Blocks of each size class that a piece has: of `PIECE_BYTES`, but no more than a sequence, and at least
    one a group. A block may be larger: then all classes have as many bytes, or a piece without such a block
    would be little else than room for it.
    """

    of_class: tuple[int, ...]
    classes: tuple[int, ...]  # size class of each group's blocks
    max_blocks: int  # of a line

    @classmethod
    def of(cls, state: EngineState) -> "PieceSizes":
        """Make those of an engine's state."""
        tables = state.tables
        classes, sizes = tables.classes or (0,) * tables.num_groups, []
        block_bytes = [state.kv_cache.block_bytes(size_class) for size_class in range(tables.num_classes)]
        piece_bytes = max(PIECE_BYTES, *block_bytes)
        for size_class, num_bytes in enumerate(block_bytes):
            num_groups = classes.count(size_class)
            most = num_groups * tables.max_blocks_per_seq
            sizes.append(max(min(piece_bytes // max(num_bytes, 1), most), num_groups))
        return cls(tuple(sizes), classes, tables.max_blocks_per_seq)

    def cut(self, pairs: Sequence[Sequence[Pair]]) -> list[range]:
        """Cut neighbours, each with the blocks that go together, into as many as a piece has room for."""
        pieces, first, room = [], 0, [*self.of_class]
        for i, together in enumerate(pairs):
            needs = [sum(self.classes[group] == each for group, _ in together) for each in range(len(room))]
            if any(need > left for need, left in zip(needs, room, strict=True)):
                pieces.append(range(first, i))
                first, room = i, [*self.of_class]
            room = [left - need for need, left in zip(needs, room, strict=True)]
        return [*pieces, range(first, len(pairs))] if pairs else []

    def by_class(self, pairs: Sequence[Pair]) -> tuple[list[Pair], ...]:
        """Return the blocks of each size class."""
        numbers = range(len(self.of_class))
        return tuple([pair for pair in pairs if self.classes[pair[0]] == each] for each in numbers)

    def places(self, pairs: Sequence[Pair]) -> tuple[np.ndarray, ...]:
        """Return the places of blocks of each size class, as `transfer.arrive` has them: int32 [size]."""
        places = tuple(np.full(size, -1, np.int32) for size in self.of_class)
        for line, of_class in zip(places, self.by_class(pairs), strict=True):
            line[: len(of_class)] = [group * self.max_blocks + i for group, i in of_class]
        return places


class Target:
    """The devices of a cache, as pieces see them: any thread may ask, also while the cache is donated."""

    def __init__(self, state: EngineState, sizes: PieceSizes, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._shapes = shapes_of(state.kv_cache, sizes.of_class, mesh)
        self._shardings = {name: sharding_of(state.kv_cache, name, mesh) for name in self._shapes}
        self.num_bytes = sum(
            size * state.kv_cache.block_bytes(size_class) for size_class, size in enumerate(sizes.of_class)
        )  # of a piece

    def gathered(self, blocks: Sequence[Mapping[str, np.ndarray]]) -> dict[str, jax.Array]:
        """Copy single blocks into a piece on the device, behind them zeros. Waits until they are there.

        Each goes behind those before that have its arrays.
        """
        chunk = {name: np.zeros(like.shape, like.dtype) for name, like in self._shapes.items()}
        filled = dict.fromkeys(chunk, 0)
        for block in blocks:
            for name, array in block.items():
                chunk[name][filled[name]] = array
                filled[name] += 1
        if self._mesh is not None:
            chunk = {name: np.moveaxis(x, 1, 0).reshape(-1, *x.shape[2:]) for name, x in chunk.items()}
        made = {name: jax.device_put(x, self._shardings[name]) for name, x in chunk.items()}
        return jax.block_until_ready(made)


def arrived(
    state: EngineState,
    line: Line,
    present: np.ndarray,
    places: tuple[np.ndarray, ...],
    arrays: Mapping[str, jax.Array],
    mesh: Mesh | None = None,
) -> tuple[EngineState, jax.Array]:
    """Return the state in which a chain is cached whose new blocks are a piece, and whether it is.

    present: bool [num_groups, num_blocks]. K and V of the given state are donated. Waits for nothing.
    """
    is_brought = np.zeros((len(present), state.tables.max_blocks_per_seq), bool)
    is_brought[:, : present.shape[1]] = present
    pool, kv_cache, done = programs.arrive_blocks(
        state.tables.pool,
        state.kv_cache,
        *line.arguments,
        is_brought,
        places,
        arrays,
        classes=state.tables.classes,
        mesh=mesh,
    )
    return replace(with_pool(state, pool, mesh), kv_cache=kv_cache), done


@dataclass(frozen=True)
class Leaving:
    """Piece that was read on the device, on its way to the host."""

    is_there: tuple[jax.Array, ...]  # of each size class, bool [size]
    arrays: Mapping[str, jax.Array]

    def on_host(self, mesh: Mesh | None = None) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
        """Return which blocks were there, and K and V by blocks. Waits for them."""
        is_there, arrays = jax.device_get((self.is_there, dict(self.arrays)))
        return is_there, {name: by_block(x, mesh) for name, x in arrays.items()}


def leaving(
    state: EngineState,
    line: Line,
    places: tuple[np.ndarray, ...],
    specs: tuple[CacheSpec, ...],
    mesh: Mesh | None = None,
) -> Leaving:
    """Begin to read those blocks of a chain that the cache has, and to copy them. Waits for nothing."""
    its = state.tables.pool, state.kv_cache, *line.arguments, places
    is_there, arrays = programs.depart_blocks(*its, specs=specs, mesh=mesh)
    for array in (*is_there, *arrays.values()):
        array.copy_to_host_async()
    return Leaving(is_there, arrays)
