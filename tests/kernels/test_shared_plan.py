"""Plans of attention that all layers share, made once: in Pallas' GPU interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpaged.memory import kv_cache
from jaxpaged.models import attention
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.config import LayerKind
from pallas_kernels import ops
from pallas_kernels.gpu.decode import attention as mosaic
from pallas_kernels.gpu.partitioning import Partitioning
from tests.kernels.interpreter import fresh_interpreter

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)

KINDS = (LayerKind(), LayerKind(attention_chunk=48), LayerKind())  # of the layers
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
SEQ_LENS, TABLE_ROWS = np.array([1, 100, 170], np.int32), np.array([2, 0, 3], np.int32)
WIDTH = 12  # of the block tables


def draw(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def made_batch(rng: np.random.Generator) -> PassBatch:
    tables = 1 + rng.permutation(4 * WIDTH).astype(np.int32).reshape(4, WIDTH)
    last = SEQ_LENS - 1
    slots = tables[TABLE_ROWS, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    arrays = [jnp.asarray(x) for x in (slots, tables, last, SEQ_LENS)]
    return PassBatch(*arrays, implementation="mosaic_gpu", table_rows=jnp.asarray(TABLE_ROWS))


def made_cache(num_layers: int = 1) -> kv_cache.KVCache:
    sizes = 1 + 4 * WIDTH, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
    return kv_cache.create(num_layers, *sizes, jnp.dtype("bfloat16"))


def planned(batch: PassBatch, cache: kv_cache.KVCache) -> PassBatch:
    return attention.planned(batch, cache, NUM_Q_HEADS, KINDS)


@pytest.mark.slow
def test_layers_in_a_loop_share_it_and_answer_as_each_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is chunked, and rows of the block tables come in another order."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(mosaic, "default_partitioning", lambda *_: Partitioning(64, 3))
    operation = functools.partial(ops.tiled_paged_attention, interpret=True)
    monkeypatch.setattr(attention.ops, "tiled_paged_attention", operation)
    cache = made_cache(len(KINDS))
    cache = dataclasses.replace(cache, blocks={name: draw(rng, *x.shape) for name, x in cache.blocks.items()})
    batch = made_batch(rng)
    q, k, v = (draw(rng, len(SEQ_LENS), heads, HEAD_DIM) for heads in (NUM_Q_HEADS, 2, 2))

    def through_layers(batch: PassBatch, cache: kv_cache.KVCache) -> jax.Array:
        def layer(
            i: jax.Array, carry: tuple[jax.Array, kv_cache.KVCache]
        ) -> tuple[jax.Array, kv_cache.KVCache]:
            out, cache = carry
            its, cache = attention.attend(cache, i, q, k, v, batch, scale=HEAD_DIM**-0.5, kinds=KINDS)
            return out.at[i].set(its), cache

        out = jnp.zeros((len(KINDS), *q.shape), q.dtype)
        return lax.fori_loop(0, len(KINDS), layer, (out, cache))[0]

    shared = jax.jit(lambda batch, cache: through_layers(planned(batch, cache), cache))(batch, cache)
    own = jax.jit(through_layers)(batch, cache)
    np.testing.assert_array_equal(shared, own)
    monkeypatch.undo()
    want = jax.jit(through_layers)(dataclasses.replace(batch, implementation="xla"), cache)
    np.testing.assert_allclose(np.float32(shared), np.float32(want), atol=0.02)
    assert len({np.asarray(line).tobytes() for line in shared}) == len(KINDS)


def test_a_plan_of_other_sizes_is_refused() -> None:
    rng = np.random.default_rng(0)
    batch = made_batch(rng)
    cache = made_cache()
    plans = planned(batch, cache).plans
    assert plans is not None
    assert [plan and plan.sizes.attention_chunk for plan in plans] == [None, 48]

    def call(num_rows: int, chunk: int | None, table_rows: jax.Array | None = None) -> None:
        ops.tiled_paged_attention(
            draw(rng, num_rows, 1, NUM_Q_HEADS, HEAD_DIM),
            cache.pool(0),
            None,
            batch.block_tables if table_rows is not None else batch.block_tables[:num_rows],
            *(x[:num_rows] for x in (batch.query_starts, batch.seq_lens)),
            scale=0.1,
            attention_chunk=chunk,
            table_rows=table_rows,
            plan=plans[1],
            implementation="mosaic_gpu",
            interpret=True,
        )

    with pytest.raises(ValueError, match=r"plan must be made for .*attention_chunk=None, .*, not for .*=48,"):
        call(3, None, batch.table_rows)
    with pytest.raises(ValueError, match="plan must be made for .*num_rows=2"):
        call(2, 48)
    with pytest.raises(ValueError, match=r"has_table_rows=False\), not for .*has_table_rows=True\)"):
        call(3, 48)


def test_only_the_decode_kernel_has_a_plan() -> None:
    rng = np.random.default_rng(0)
    cache = made_cache()
    batch = made_batch(rng)
    for other in ("xla", "native"):
        assert planned(dataclasses.replace(batch, implementation=other), cache).plans == (None, None)
    of_prompts = dataclasses.replace(batch, slot_mapping=jnp.tile(batch.slot_mapping, 32))
    assert planned(of_prompts, cache).plans == (None, None)
