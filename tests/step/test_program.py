"""Programs over a mesh: each argument lies where its annotation says, whatever its name is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxpaged.handover import programs
from jaxpaged.memory import block_pool, prefix_cache
from jaxpaged.memory.policies import LRU
from jaxpaged.models.shards import DATA, MODEL
from jaxpaged.step.program import PerReplica, PerShard, Static, program

NUM_REPLICAS, NUM_SHARDS = 2, 3
# Nothing runs here: one device stands for all.
MESH = Mesh(np.full((NUM_REPLICAS, NUM_SHARDS), jax.devices()[0]), (DATA, MODEL))
NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 16, 8, 4


def pool_of_each_replica():
    cache = prefix_cache.create(NUM_BLOCKS, BLOCK_SIZE)
    pool = block_pool.create(NUM_BLOCKS, LRU, prefix_cache=cache)
    return jax.tree.map(lambda x: jnp.stack([x] * NUM_REPLICAS), pool)


def test_blocks_are_located_in_each_replicas_pool():
    token_ids = np.zeros((MAX_BLOCKS, BLOCK_SIZE), np.int32)
    numbers = np.int32(1), np.int32(0)

    def locate(pool):
        return programs.locate_blocks(pool, token_ids, *numbers, mesh=MESH)

    block_ids, num_found = jax.eval_shape(locate, pool_of_each_replica())
    assert block_ids.shape == (NUM_REPLICAS, 1, MAX_BLOCKS)
    assert num_found.shape == (NUM_REPLICAS,)


@pytest.mark.parametrize("name", ["state", "token_ids", "kv_cache", "params"])
def test_the_name_of_an_argument_means_nothing(name):
    source = f"def take({name}: Held, factor: Static[int]) -> PerReplica[Array]: return {name} * factor"
    each, made = {}, {}
    for placement in (PerReplica, PerShard, None):
        held = Int[Array, "..."] if placement is None else placement[Int[Array, "..."]]
        exec(source, {"Held": held, "Static": Static, "PerReplica": PerReplica, "Array": Array}, made)
        take = program()(made["take"])
        array = jnp.zeros((NUM_REPLICAS * NUM_SHARDS, 4), jnp.int32)
        if placement is PerReplica:
            array = jnp.zeros((NUM_REPLICAS, 4), jnp.int32)
        each[placement] = jax.eval_shape(lambda x, take=take: take(x, 3, mesh=MESH), array).shape
    # A device gets its replica's line; or its shard's two lines; or all six.
    assert each == {PerReplica: (2, 4), PerShard: (2, 2, 4), None: (2, 6, 4)}
