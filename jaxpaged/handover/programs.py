"""Compiled programs that read blocks out of an engine's cache and write them into another's, or tell of them.

An engine that does neither compiles none of them.
"""

from jaxtyping import Array, Bool, Int, Num

from jaxpaged import digest as digests
from jaxpaged.memory import block_pool, content_changes, transfer
from jaxpaged.memory.block_pool import BlockPool
from jaxpaged.memory.cache_specs import FULL, CacheSpec
from jaxpaged.memory.content_table import PrefixCache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH
from jaxpaged.step.program import PerReplica, PerShard, Static, program


@program()
def locate_blocks(
    pool: PerReplica[BlockPool],
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    specs: Static[tuple[CacheSpec, ...]] = (FULL,),
) -> PerReplica[tuple[Int[Array, "num_groups max_blocks"], Int[Array, ""]]]:
    """Find the blocks of the longest beginning of a chain in the prefix cache, and its length
    (`transfer.locate`).
    """
    hit = transfer.locate(pool, token_ids, num_blocks, salt, specs)
    return hit.block_ids, hit.chain.num_blocks


@program()
def adopt_blocks(
    pool: PerReplica[BlockPool],
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    present: Bool[Array, "num_groups max_blocks"],
    classes: Static[tuple[int, ...]] = (),
) -> PerReplica[tuple[BlockPool, BlockPool, transfer.AdoptInfo]]:
    """Let the pool adopt a chain of blocks (`transfer.adopt`).

    Returns the pool for when K and V are written; the pool until then, in which the content of the blocks to
    be written over is no longer found; and which blocks are written.
    """
    adopted, info = transfer.adopt(pool, token_ids, num_blocks, salt, present, classes)
    ids = info.destinations.reshape(-1)
    until_then, _ = block_pool.evict(pool, ids, ids != block_pool.NULL_BLOCK)
    return adopted, until_then, info


@program(results=lambda specs: BY_SHARD)
def read_blocks(
    kv_cache: PerReplica[KVCache], block_ids: Int[Array, " n"], size_class: Static[int] = 0
) -> PerReplica[dict[str, Num[Array, "n ..."]]]:
    """Read blocks of a size class out of the cache."""
    return transfer.read(kv_cache, block_ids, size_class)


@program(donate="kv_cache", results=lambda specs: BY_SHARD)
def write_blocks(
    kv_cache: PerReplica[KVCache],
    block_ids: Int[Array, " n"],
    arrays: PerShard[dict[str, Num[Array, "n ..."]]],
) -> PerReplica[KVCache]:
    """Write what `read_blocks` returned into other blocks; NULL_BLOCK drops one. The cache is donated."""
    return transfer.write(kv_cache, block_ids, arrays)


@program(donate="kv_cache", results=lambda specs: (ON_EACH, BY_SHARD, ON_EACH))
def arrive_blocks(
    pool: PerReplica[BlockPool],
    kv_cache: PerReplica[KVCache],
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    present: Bool[Array, "num_groups max_blocks"],
    places: tuple[Int[Array, " n"], ...],
    arrays: PerShard[dict[str, Num[Array, "n ..."]]],
    classes: Static[tuple[int, ...]] = (),
) -> PerReplica[tuple[BlockPool, KVCache, Bool[Array, ""]]]:
    """Let the pool adopt a chain of blocks and the cache take their K and V (`transfer.arrive`). The cache is
    donated.
    """
    return transfer.arrive(pool, kv_cache, token_ids, num_blocks, salt, present, places, arrays, classes)


@program(results=lambda specs: (ON_EACH, BY_SHARD))
def depart_blocks(
    pool: PerReplica[BlockPool],
    kv_cache: PerReplica[KVCache],
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    places: tuple[Int[Array, " n"], ...],
    specs: Static[tuple[CacheSpec, ...]] = (FULL,),
) -> PerReplica[tuple[tuple[Bool[Array, " n"], ...], dict[str, Num[Array, "n ..."]]]]:
    """Read blocks of a chain that are in the cache (`transfer.depart`)."""
    return transfer.depart(pool, kv_cache, token_ids, num_blocks, salt, places, specs)


digest = program()(digests.digest)


@program(results=lambda specs: ON_EACH)
def nothing_told(cache: PerReplica[PrefixCache]) -> PerReplica[content_changes.Told]:
    """Return what was told of a cache before the first report."""
    return content_changes.nothing(cache)


@program(donate="told", results=lambda specs: ON_EACH)
def tell_changes(
    cache: PerReplica[PrefixCache], told: PerReplica[content_changes.Told], most: Static[int]
) -> PerReplica[tuple[content_changes.Told, content_changes.Changes]]:
    """Tell at most so many changes of what a prefix cache holds. What was told before is donated."""
    return content_changes.changes(cache, told, most)
