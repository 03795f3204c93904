"""Blocks taken out of an engine's state, and put into another's, between two runs.

They move in chunks of one size, so that of any number of blocks nothing is compiled anew, and beside them one
chunk at a time is in the device's memory. Where several devices share a model, each has a chunk of its own
heads' K and V: these are one array along its first axis, as the cache is; in the host's memory what belongs
to a block lies together.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import check
from jaxpaged.config import EngineConfig
from jaxpaged.handover import programs
from jaxpaged.handover.blocks import BlockFormat, Blocks, check_present
from jaxpaged.memory import transfer
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.shards import MODEL
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH
from jaxpaged.status import Status, raise_if_error
from jaxpaged.step.state import EngineState, no_rejection

CHUNK_BYTES = 32 * 2**20

type Chunk = Mapping[str, Any]  # by the layout's names, [devices * blocks of a chunk, num_layers, ...] each


@dataclass(frozen=True)
class Chain:
    """Full blocks of a sequence from its beginning on, and where they are in a state."""

    token_ids: np.ndarray  # int32 [num_blocks, block_size]
    lines: np.ndarray  # int32 [num_groups, num_blocks]; NULL_BLOCK where a group has none
    classes: tuple[int, ...] = ()  # size class of each group's blocks; empty: there is one

    @property
    def present(self) -> np.ndarray:
        """Flags of the blocks that each group has, bool [num_groups, num_blocks]."""
        return self.lines != NULL_BLOCK

    @property
    def block_ids(self) -> tuple[np.ndarray, ...]:
        """All blocks of each size class, group by group, int32 [num_present] each."""
        return by_class(self.lines, self.present, self.classes)


def by_class(values: np.ndarray, present: np.ndarray, classes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Return the values of present blocks, group by group, apart for each size class.

    values, present: [num_groups, num_blocks]. classes: of each group's blocks; empty: there is one.
    """
    of_groups = np.asarray(classes or (0,) * len(present))
    return tuple(
        values[of_groups == each][present[of_groups == each]] for each in range(1 + max(classes, default=0))
    )


@dataclass(frozen=True)
class Asked:
    """Look-up on the device whose answer nobody has waited for yet."""

    token_ids: np.ndarray  # int32 [num_blocks, block_size] of the whole sequence
    found: tuple[Any, Any]  # as `programs.locate_blocks` returns it
    classes: tuple[int, ...] = ()  # size class of each group's blocks; empty: there is one

    @property
    def is_ready(self) -> bool:
        """Whether the answer is there, so that `chain` waits for nothing."""
        return all(array.is_ready() for array in self.found)

    def chain(self) -> Chain:
        """Return what was found. Waits for it."""
        lines, num_blocks = jax.device_get(self.found)
        return Chain(self.token_ids[:num_blocks], lines[:, :num_blocks], self.classes)


def describe_format(
    config: EngineConfig,
    model_config: ModelConfig,
    grouping: Grouping,
    params: nnx.State,
    kv_cache: KVCache,
) -> BlockFormat:
    """Describe the format of an engine's blocks. Reads all weights once. Raises `InputError` if they cannot
    travel.
    """
    check(
        "enable_prefix_caching",
        config.enable_prefix_caching,
        "True to export or adopt blocks",
        config.enable_prefix_caching,
    )
    for name, instead in (
        ("num_processes", "let one process have all devices"),
        ("data_parallel_size", "make an engine for each replica, whose cache is its own anyway"),
    ):
        count = getattr(config, name)
        check(name, count, f"1 to export or adopt blocks: {instead}", count == 1)
    rule = "False to export or adopt blocks, for each engine measures its own"
    given = kv_cache.layout.given(kv_cache.num_kv_heads)  # which the layout's name tells
    check("calculate_kv_scales", config.calculate_kv_scales, rule, kv_cache.shared.keys() == given.keys())
    _, weights = nnx.split_state(params, AdapterParam, ...)
    words = np.asarray(programs.digest(jax.tree.leaves(weights)))
    # What says nothing of K and V may differ, as between two files of one model.
    described = replace(model_config, eos_token_ids=(), max_model_len=1)
    sums = config.tensor_parallel_sums
    orders = () if sums == "fast" else (sums,)  # of sums, on which last bits depend
    of_class = [f" of size class {each}" for each in grouping.classes] or [""] * grouping.num_groups
    return BlockFormat(
        block_size=kv_cache.block_size,
        groups="; ".join(
            f"{spec!r} in layers {', '.join(map(str, layers))}{apart}"
            for spec, layers, apart in zip(grouping.specs, grouping.groups, of_class, strict=True)
        ),
        layout=repr(kv_cache.layout),
        dtype=kv_cache.dtype.name,
        num_layers=kv_cache.num_layers,
        num_kv_heads=kv_cache.num_kv_heads,
        head_dim=kv_cache.head_dim,
        reuse_answers=config.reuse_answers,
        model=hashlib.sha256(repr((described, words.tolist(), *orders)).encode()).hexdigest(),
        tensor_parallel_size=config.tensor_parallel_size,
    )


def ask(
    state: EngineState,
    prompt: np.ndarray,
    salt: int,
    specs: tuple[CacheSpec, ...],
    mesh: Mesh | None = None,
) -> Asked:
    """Look for the longest cached beginning of a prompt, in full blocks. Waits for nothing."""
    token_ids = in_blocks(state, prompt)
    line = padded(state, token_ids), np.int32(len(token_ids)), np.int32(salt)
    found = programs.locate_blocks(state.tables.pool, *line, specs=specs, mesh=mesh)
    return Asked(token_ids, found, state.tables.classes)


def locate(
    state: EngineState,
    prompt: np.ndarray,
    salt: int,
    specs: tuple[CacheSpec, ...],
    mesh: Mesh | None = None,
) -> Chain:
    """Find the longest cached beginning of a prompt, in full blocks. Waits for the run under way."""
    return ask(state, prompt, salt, specs, mesh).chain()


def read_chunks(state: EngineState, chain: Chain, mesh: Mesh | None = None) -> Iterator[dict[str, jax.Array]]:
    """Read K and V of a chain chunk by chunk, on the devices; a chunk is of one size class, and the first
    class comes first. Beyond the chain's end the values are undefined.
    """
    for size_class, block_ids in enumerate(chain.block_ids):
        for ids in _in_chunks(state.kv_cache, block_ids, size_class):
            yield read_ids(state, ids, size_class, mesh)


def read_ids(
    state: EngineState, ids: np.ndarray, size_class: int = 0, mesh: Mesh | None = None
) -> dict[str, jax.Array]:
    """Read K and V, or states, of a chunk of blocks of a size class, on the devices."""
    return programs.read_blocks(state.kv_cache, ids, size_class=size_class, mesh=mesh)


def written(state: EngineState, ids: np.ndarray, chunk: Chunk, mesh: Mesh | None = None) -> EngineState:
    """Return the state after a chunk's K and V are written to these blocks; the state's own are donated."""
    arrays = placed(state.kv_cache, chunk, mesh)
    return replace(state, kv_cache=programs.write_blocks(state.kv_cache, ids, arrays, mesh=mesh))


def placed(kv_cache: KVCache, chunk: Chunk, mesh: Mesh | None = None) -> dict[str, jax.Array]:
    """Put a chunk onto the devices of a cache."""
    if mesh is None:
        return transfer.placed(chunk, kv_cache)
    return jax.device_put(chunk, NamedSharding(mesh, BY_SHARD))


def sharding_of(kv_cache: KVCache, name: str, mesh: Mesh | None = None) -> jax.sharding.Sharding | None:
    """Return where a chunk's array must be put; None: it must not be bound to a device."""
    if mesh is not None:
        return NamedSharding(mesh, BY_SHARD)
    return transfer.sharding(kv_cache, name) if kv_cache.movable[name].committed else None


def on_host(state: EngineState, chain: Chain, mesh: Mesh | None = None) -> dict[str, np.ndarray]:
    """Copy K and V of a chain to the host's memory.

    Returns arrays [num_present, num_layers, ...], of several devices [num_present, devices, num_layers, ...].
    An array has the blocks of its size class.
    """
    shapes = shapes_of(state.kv_cache, [len(ids) for ids in chain.block_ids], mesh)
    arrays = {name: np.empty(like.shape, like.dtype) for name, like in shapes.items()}
    filled = dict.fromkeys(arrays, 0)
    for chunk in read_chunks(state, chain, mesh):
        for name, x in jax.device_get(chunk).items():
            blocks = by_block(x, mesh)
            place = arrays[name][filled[name] : filled[name] + len(blocks)]
            place[:] = blocks[: len(place)]
            filled[name] += len(blocks)
    return arrays


def cut(
    arrays: Mapping[str, np.ndarray], counts: Sequence[int], kv_cache: KVCache, mesh: Mesh | None = None
) -> Iterator[Chunk]:
    """Cut a chain's K and V into chunks, each class's last one padded with zeros.

    counts: blocks of each size class. Raises `InputError` for other arrays.
    """
    shapes = shapes_of(kv_cache, counts, mesh)
    given, wanted = ({n: (x.shape, x.dtype.name) for n, x in each.items()} for each in (arrays, shapes))
    check("blocks: arrays", given, repr(wanted), given == wanted)

    def chunk(first: int, size: int, x: np.ndarray) -> np.ndarray:
        part = x[first : first + size]
        if len(part) < size:
            part = np.concatenate([part, np.zeros_like(x[:1]).repeat(size - len(part), 0)])
        return part if mesh is None else np.moveaxis(part, 1, 0).reshape(-1, *part.shape[2:])

    def chunks() -> Iterator[Chunk]:
        for size_class, count in enumerate(counts):
            size, names = chunk_size(kv_cache, size_class), kv_cache.movable_of(size_class)
            for first in range(0, count, size):
                yield {name: chunk(first, size, arrays[name]) for name in names}

    return chunks()


def shapes_of(kv_cache: KVCache, counts: Sequence[int], mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of so many blocks of each size class in the host's memory."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for size_class, count in enumerate(counts):
        read = functools.partial(programs.read_blocks, size_class=size_class, mesh=mesh)
        of_class = jax.eval_shape(read, kv_cache, np.zeros(count, np.int32))
        if mesh is not None:
            size = mesh.shape[MODEL]
            of_class = {
                name: jax.ShapeDtypeStruct((count, size, *like.shape[1:]), like.dtype)
                for name, like in of_class.items()
            }
        shapes |= of_class
    return shapes


def by_block(chunk: np.ndarray, mesh: Mesh | None) -> np.ndarray:
    """Return a chunk by blocks: each block's parts side by side, which were grouped by device."""
    if mesh is None:
        return chunk
    size = mesh.shape[MODEL]
    return np.moveaxis(chunk.reshape(size, len(chunk) // size, *chunk.shape[1:]), 0, 1)


def check_lines(blocks: Blocks, specs: Sequence[CacheSpec]) -> None:
    """Raise `InputError` unless blocks have a line for each group, and in it what the next token reads."""
    check_present(blocks.present, blocks.num_blocks)
    shape = len(specs), blocks.num_blocks
    check("blocks: present", blocks.present.shape, f"of shape {shape}", blocks.present.shape == shape)
    for group, spec in enumerate(specs[1:], start=1):
        first = int(spec.first_read(jnp.int32(blocks.num_tokens))) // blocks.block_format.block_size
        num_first = spec.first_blocks(blocks.block_format.block_size)
        is_whole = bool(blocks.present[group, first:].all() and blocks.present[group, :num_first].all())
        at_first = f" and for the first {num_first}" if num_first else ""
        rule = f"true from block {first} on{at_first}: what group {group} reads next"
        check("blocks: present", blocks.present[group], rule, is_whole)


@dataclass(frozen=True)
class Reservation:
    """A pool that has adopted a chain, and the pool to use until K and V are written to `destinations`."""

    adopted: BlockPool
    until_then: BlockPool
    # Of each size class, int32 [num_present]; NULL_BLOCK where K and V are there already.
    destinations: tuple[np.ndarray, ...]


def reserve(
    state: EngineState, token_ids: np.ndarray, present: np.ndarray, salt: int, mesh: Mesh | None = None
) -> Reservation | None:
    """Find blocks for a whole chain [num_blocks, block_size]; None if they do not fit.

    `present` [num_groups, num_blocks] says what each group brings. The state is unchanged.
    """
    most = state.tables.max_blocks_per_seq
    if len(token_ids) > most:
        logging.info("blocks are not adopted: %d are more than a sequence may have, %d", len(token_ids), most)
        return None
    its = np.zeros((len(present), most), bool)
    its[:, : len(token_ids)] = present
    line = padded(state, token_ids), np.int32(len(token_ids)), np.int32(salt), its
    classes = state.tables.classes
    adopted, until_then, info = programs.adopt_blocks(state.tables.pool, *line, classes=classes, mesh=mesh)
    destinations, status = jax.device_get((info.destinations, info.status))
    if status in (Status.OUT_OF_BLOCKS, Status.UNCACHEABLE):
        logging.info("%d blocks are not adopted: %s", len(token_ids), Status(int(status)).name)
        return None
    raise_if_error(int(status))
    return Reservation(adopted, until_then, by_class(destinations, its, classes))


def fill(
    state: EngineState, reservation: Reservation, chunks: Iterator[Chunk], mesh: Mesh | None = None
) -> Iterator[EngineState]:
    """Write a chain into the cache: yield the states on the way to the one that has adopted it, the last.

    Each state is consistent: an error in between leaves one in which nothing wrong is found. Each donates K
    and V of the one before.
    """

    state = with_pool(state, reservation.until_then, mesh)
    yield state
    of_chunks = [
        ids
        for size_class, destinations in enumerate(reservation.destinations)
        for ids in _in_chunks(state.kv_cache, destinations, size_class)
    ]
    for ids, chunk in zip(of_chunks, chunks, strict=True):
        if ids.any():
            state = written(state, ids, chunk, mesh)
            yield state
    yield with_pool(state, reservation.adopted, mesh)


def with_pool(state: EngineState, pool: BlockPool, mesh: Mesh | None = None) -> EngineState:
    """Return a state with another pool, in which more can be found than before."""
    # Requests that were looked up and did not fit may find more now.
    tables, nothing = replace(state.tables, pool=pool), no_rejection()
    if mesh is not None:
        nothing = jax.device_put(nothing, NamedSharding(mesh, ON_EACH))
    return replace(state, tables=tables, last_rejected=nothing)


def chunk_size(kv_cache: KVCache, size_class: int = 0) -> int:
    """Return how many blocks of a size class a chunk has."""
    return max(CHUNK_BYTES // max(kv_cache.block_bytes(size_class), 1), 1)


def chain_bytes(kv_cache: KVCache, num_blocks: int) -> int:
    """Return the bytes of so many blocks of a chain: with states apart, those of the last block."""
    further = sum(kv_cache.block_bytes(each) for each in range(1, kv_cache.num_classes))
    return num_blocks * kv_cache.block_bytes() + (further if num_blocks else 0)


def _in_chunks(kv_cache: KVCache, block_ids: np.ndarray, size_class: int) -> Sequence[np.ndarray]:
    size = chunk_size(kv_cache, size_class)
    padded = np.zeros(cdiv(len(block_ids), size) * size, np.int32)
    padded[: len(block_ids)] = block_ids
    return list(padded.reshape(-1, size))


def in_blocks(state: EngineState, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens of a sequence's full blocks, [num_blocks, block_size]."""
    size = state.tables.block_size
    return tokens[: len(tokens) // size * size].reshape(-1, size)


def padded(state: EngineState, token_ids: np.ndarray) -> np.ndarray:
    """Return the token ids padded to the longest chain of a row."""
    line = np.zeros((state.tables.max_blocks_per_seq, state.tables.block_size), np.int32)
    line[: len(token_ids)] = token_ids
    return line
