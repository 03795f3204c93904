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

    @property
    def present(self) -> np.ndarray:
        """Flags of the blocks that each group has, bool [num_groups, num_blocks]."""
        return self.lines != NULL_BLOCK

    @property
    def block_ids(self) -> np.ndarray:
        """All blocks, group by group, int32 [num_present]."""
        return self.lines[self.present]


@dataclass(frozen=True)
class Asked:
    """Look-up on the device whose answer nobody has waited for yet."""

    token_ids: np.ndarray  # int32 [num_blocks, block_size] of the whole sequence
    found: tuple[Any, Any]  # as `programs.locate_blocks` returns it

    @property
    def is_ready(self) -> bool:
        """Whether the answer is there, so that `chain` waits for nothing."""
        return all(array.is_ready() for array in self.found)

    def chain(self) -> Chain:
        """Return what was found. Waits for it."""
        lines, num_blocks = jax.device_get(self.found)
        return Chain(self.token_ids[:num_blocks], lines[:, :num_blocks])


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
    return BlockFormat(
        block_size=kv_cache.block_size,
        groups="; ".join(
            f"{spec!r} in layers {', '.join(map(str, layers))}"
            for spec, layers in zip(grouping.specs, grouping.groups, strict=True)
        ),
        layout=repr(kv_cache.layout),
        dtype=kv_cache.dtype.name,
        num_layers=kv_cache.num_layers,
        num_kv_heads=kv_cache.num_kv_heads,
        head_dim=kv_cache.head_dim,
        reuse_answers=config.reuse_answers,
        model=hashlib.sha256(repr((described, words.tolist())).encode()).hexdigest(),
        tensor_parallel_size=config.tensor_parallel_size,
    )


def check_classes(state: EngineState) -> None:
    """Raise `InputError` if the state's blocks have several sizes: K and V of these are not handed over."""
    num_classes = state.tables.num_classes
    check("size classes of blocks", num_classes, "1 to be handed over", num_classes == 1)


def ask(
    state: EngineState,
    prompt: np.ndarray,
    salt: int,
    specs: tuple[CacheSpec, ...],
    mesh: Mesh | None = None,
) -> Asked:
    """Look for the longest cached beginning of a prompt, in full blocks. Waits for nothing."""
    check_classes(state)
    token_ids = in_blocks(state, prompt)
    line = padded(state, token_ids), np.int32(len(token_ids)), np.int32(salt)
    return Asked(token_ids, programs.locate_blocks(state.tables.pool, *line, specs=specs, mesh=mesh))


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
    """Read K and V of a chain chunk by chunk, on the devices. Beyond the chain's end the values are
    undefined.
    """
    for ids in _in_chunks(state.kv_cache, chain.block_ids):
        yield read_ids(state, ids, mesh)


def read_ids(state: EngineState, ids: np.ndarray, mesh: Mesh | None = None) -> dict[str, jax.Array]:
    """Read K and V of a chunk of blocks, on the devices."""
    return programs.read_blocks(state.kv_cache, ids, mesh=mesh)


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
    """
    num_blocks, size = len(chain.block_ids), chunk_size(state.kv_cache)
    shapes = shapes_of(state.kv_cache, num_blocks, mesh)
    arrays = {name: np.empty(like.shape, like.dtype) for name, like in shapes.items()}
    for i, chunk in enumerate(read_chunks(state, chain, mesh)):
        for name, x in jax.device_get(chunk).items():
            its = arrays[name][i * size : (i + 1) * size]
            its[:] = by_block(x, mesh)[: len(its)]
    return arrays


def cut(
    arrays: Mapping[str, np.ndarray], num_blocks: int, kv_cache: KVCache, mesh: Mesh | None = None
) -> Iterator[Chunk]:
    """Cut a chain's K and V into chunks, the last one padded with zeros. Raises `InputError` for other
    arrays.
    """
    size, shapes = chunk_size(kv_cache), shapes_of(kv_cache, num_blocks, mesh)
    found, wanted = ({n: (x.shape, x.dtype.name) for n, x in its.items()} for its in (arrays, shapes))
    check("blocks: arrays", found, repr(wanted), found == wanted)

    def chunk(first: int, x: np.ndarray) -> np.ndarray:
        its = x[first : first + size]
        if len(its) < size:
            its = np.concatenate([its, np.zeros_like(x[:1]).repeat(size - len(its), 0)])
        return its if mesh is None else np.moveaxis(its, 1, 0).reshape(-1, *its.shape[2:])

    return ({name: chunk(i, x) for name, x in arrays.items()} for i in range(0, num_blocks, size))


def shapes_of(kv_cache: KVCache, num_blocks: int, mesh: Mesh | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a chain's K and V in the host's memory."""
    read = functools.partial(programs.read_blocks, mesh=mesh)
    shapes = jax.eval_shape(read, kv_cache, np.zeros(num_blocks, np.int32))
    if mesh is None:
        return shapes
    size = mesh.shape[MODEL]
    return {
        name: jax.ShapeDtypeStruct((num_blocks, size, *like.shape[1:]), like.dtype)
        for name, like in shapes.items()
    }


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
    destinations: np.ndarray  # int32 [num_present]; NULL_BLOCK where K and V are there already


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
    check_classes(state)
    adopted, until_then, info = programs.adopt_blocks(state.tables.pool, *line, mesh=mesh)
    destinations, status = jax.device_get((info.destinations, info.status))
    if status in (Status.OUT_OF_BLOCKS, Status.UNCACHEABLE):
        logging.info("%d blocks are not adopted: %s", len(token_ids), Status(int(status)).name)
        return None
    raise_if_error(int(status))
    return Reservation(adopted, until_then, destinations[its])


def fill(
    state: EngineState, reservation: Reservation, chunks: Iterator[Chunk], mesh: Mesh | None = None
) -> Iterator[EngineState]:
    """Write a chain into the cache: yield the states on the way to the one that has adopted it, the last.

    Each state is consistent: an error in between leaves one in which nothing wrong is found. Each donates K
    and V of the one before.
    """

    state = with_pool(state, reservation.until_then, mesh)
    yield state
    for ids, chunk in zip(_in_chunks(state.kv_cache, reservation.destinations), chunks, strict=True):
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


def chunk_size(kv_cache: KVCache) -> int:
    """Return how many blocks a chunk has."""
    return max(CHUNK_BYTES // block_bytes(kv_cache), 1)


def block_bytes(kv_cache: KVCache) -> int:
    """Return the bytes of a block's K and V."""
    return sum(x.nbytes for x in kv_cache.movable.values()) // kv_cache.num_blocks


def _in_chunks(kv_cache: KVCache, block_ids: np.ndarray) -> Sequence[np.ndarray]:
    size = chunk_size(kv_cache)
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
