"""Layers whose heads differ in size: they share blocks, each kind with places of its own shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.memory import kv_cache
from jaxpaged.memory.grouping import grouping_of
from jaxpaged.models import loading
from jaxpaged.models.families import from_hf
from jaxpaged.models.load_as import LoadAs
from pallas_kernels.layouts import LAYOUTS
from tests.models.test_decoder import GOLDENS, assert_equal, batch_of, stored
from tests.models.test_families import hf

BLOCK_SIZE, TILE_LEN = 4, 8
FLOAT32 = jnp.dtype("float32")


@pytest.mark.parametrize(
    ("name", "loops"),
    [
        ("gemma4_text", True),
        pytest.param("gemma4_large", True, marks=pytest.mark.slow),
        pytest.param("gemma4_text", False, marks=pytest.mark.slow),
    ],
)
def test_a_pass_over_shared_blocks_equals_transformers(name, loops, monkeypatch):
    """Blocks of two groups lie mixed, and are full of numbers that nobody wrote."""
    if not loops:
        monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    golden = stored(f"families/{name}")
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / name)
    model, c = checkpoint.model(LoadAs(FLOAT32)), checkpoint.config
    assert model.form.loops == loops
    grouping = grouping_of(c.cache_specs, c.kv_weights)
    narrow, wide = c.heads_by_size
    assert kv_cache.is_divisible(LAYOUTS["token_major"], BLOCK_SIZE, FLOAT32, narrow, wide)
    num_tokens = len(golden["token_ids"])
    num_blocks = num_tokens // BLOCK_SIZE
    ids = 1 + np.random.default_rng(0).permutation(grouping.num_groups * num_blocks).astype(np.int32)
    tables = ids.reshape(grouping.num_groups, -1)
    positions = np.arange(num_tokens, dtype=np.int32)
    each = [batch_of(table, positions, TILE_LEN, BLOCK_SIZE) for table in tables]
    num_tiles = num_tokens // TILE_LEN
    batch = dataclasses.replace(
        each[0],
        slot_mapping=jnp.stack([its.slot_mapping for its in each]),
        block_tables=jnp.asarray(tables),
        table_rows=jnp.repeat(jnp.arange(grouping.num_groups)[:, None], num_tiles, axis=1),
        grouping=grouping,
    )
    sizes = len(ids) + 1, BLOCK_SIZE
    cache = model.create_cache(*sizes, num_layers=grouping.width, heads=narrow)
    cache = jax.tree.map(lambda x: jnp.full_like(x, 3.0), cache)

    @jax.jit
    def run(model, token_ids, positions, cache, batch):
        hidden, cache = model(token_ids, positions, cache, batch)
        return model.logits(hidden), cache

    logits, cache = run(model, jnp.asarray(golden["token_ids"], jnp.int32), positions, cache, batch)
    assert_equal(np.asarray(logits), golden)
    # A group's layers fill its blocks up to their places, and no other's.
    for group, layers in enumerate(grouping.groups):
        used = sum(c.kv_weights[layer] for layer in layers)
        for x in cache.blocks.values():
            its = np.asarray(x[tables[group]])
            assert (its[:, :used] != 3.0).all()
            assert (its[:, used:] == 3.0).all()


def test_layouts_with_scales_have_places_of_the_widest_size():
    fits = {
        name: kv_cache.is_divisible(layout, 16, FLOAT32, (2, 8), (2, 16)) for name, layout in LAYOUTS.items()
    }
    assert fits["token_major"]
    assert fits["head_major"]
    assert not fits["int8_per_token"]


def test_a_layer_cannot_share_k_and_v_of_other_heads():
    config = from_hf(hf("gemma4_text"))
    kinds = list(config.layers)
    kinds[3] = dataclasses.replace(kinds[3], head_dim=None, rope=kinds[2].rope)
    with pytest.raises(InputError, match="K and V are shared=1 must be an earlier layer .* layer 3"):
        dataclasses.replace(config, layers=tuple(kinds))
