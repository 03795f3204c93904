"""Decode steps of models with groups of layers: each layer reads what its window or chunk spans, no more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import kv_cache
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.models import attention
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.config import LayerKind
from reference.attention import paged_attention
from tests.kernels.native_targets import why_not

WINDOW, CHUNK, BLOCK_SIZE, WIDTH = 48, 32, 16, 192  # the tables are WIDTH blocks wide
KINDS = LayerKind(), LayerKind(sliding_window=WINDOW), LayerKind(attention_chunk=CHUNK)
GROUPING = Grouping((FULL, SlidingWindow(WINDOW), ChunkedLocal(CHUNK)), ((0,), (1,), (2,)))
SEQ_LENS = np.array([1, 100, 3000], np.int32)
READ = [
    SEQ_LENS,
    np.minimum(SEQ_LENS, WINDOW),
    (SEQ_LENS - 1) % CHUNK + 1,
]  # tokens of each row, by layer
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
LINES = np.array([[6, 0, 3], [7, 1, 4], [8, 2, 5]], np.int32)  # of each group and row


def batch_of(implementation):
    """Make a step of one token a row. What is before a group's bound names a block beyond the cache."""
    num_lines = LINES.size
    tables = 1 + np.random.default_rng(0).permutation(num_lines * WIDTH).astype(np.int32)
    tables = tables.reshape(num_lines, WIDTH)
    last = SEQ_LENS - 1
    slots = tables[LINES, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    for lines, read in zip(LINES, READ, strict=True):
        for line, first in zip(lines, SEQ_LENS - read, strict=True):
            tables[line, : first // BLOCK_SIZE] = 2**30
    arrays = [jnp.asarray(x) for x in (slots, tables, last, SEQ_LENS)]
    return PassBatch(*arrays, implementation=implementation, table_rows=jnp.asarray(LINES), grouping=GROUPING)


def cache_of(dtype):
    sizes = 1 + LINES.size * WIDTH, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
    return kv_cache.create(1, *sizes, jnp.dtype(dtype))


def test_a_plan_of_the_gpus_kernel_lists_each_groups_tokens_in_its_own_tables():
    plans = attention.planned(batch_of("mosaic_gpu"), cache_of("bfloat16"), NUM_Q_HEADS, KINDS).plans
    for plan, read, lines in zip(plans, READ, LINES, strict=True):
        items = np.asarray(plan.plan.items)[: int(plan.plan.num_items[0])]
        row = items[:, 0] & 0xFFFF
        assert np.bincount(row, items[:, 2] - items[:, 1]).tolist() == read.tolist()
        np.testing.assert_array_equal(items[:, 0] >> 16, lines[row])


@pytest.mark.slow
def test_xla_takes_the_turns_of_each_groups_bound(monkeypatch):
    """A turn reads 128 tokens."""
    seen = []

    def spy(lower, upper, body, init):
        seen.append(len(range(lower, upper)))
        return init

    batch, cache = batch_of("xla"), cache_of("float32")
    q, kv = jnp.zeros((3, NUM_Q_HEADS, HEAD_DIM)), jnp.zeros((3, NUM_KV_HEADS, HEAD_DIM))
    monkeypatch.setattr(jax.lax, "fori_loop", spy)
    for layer in range(len(KINDS)):
        attention.attend(cache, layer, q, kv, kv, batch, scale=1.0, kinds=KINDS)
    assert seen == [24, 1, 1]


@pytest.mark.skipif(bool(why_not("float32")), reason="no native kernels")
def test_native_kernels_look_up_no_block_before_a_groups_bound():
    batch, cache = batch_of("native"), cache_of("float32")
    rng = np.random.default_rng(1)
    fill = {name: jnp.asarray(rng.normal(size=x.shape), x.dtype) for name, x in cache.blocks.items()}
    cache = dataclasses.replace(cache, blocks=fill)
    q = jnp.asarray(rng.normal(size=(3, NUM_Q_HEADS, HEAD_DIM)), jnp.float32)
    kv = jnp.asarray(rng.normal(size=(3, NUM_KV_HEADS, HEAD_DIM)), jnp.float32)
    tables = np.asarray(batch.block_tables)
    tables = np.where(tables == 2**30, 0, tables)
    for layer, (kind, lines) in enumerate(zip(KINDS, LINES, strict=True)):
        out, written = attention.attend(cache, layer, q, kv, kv, batch, scale=0.1, kinds=KINDS)
        want = paged_attention(
            np.asarray(q),
            *(np.asarray(written.blocks[name][:, 0]) for name in ("k", "v")),
            tables[lines],
            SEQ_LENS,
            scale=0.1,
            sliding_window=kind.sliding_window,
            attention_chunk=kind.attention_chunk,
        )
        np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-4)
