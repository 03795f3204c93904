"""A layout as somebody writes it with the documents alone, in one file, without a change to another."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.layouts import LAYOUTS, Layout
from tests.engine import test_layouts as of_engine
from tests.kernels import test_layouts as of_kernels


class ColumnsOfK(Layout):
    """K transposed within a block: a channel's tokens side by side. V as it comes."""

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        return {
            "k": jax.ShapeDtypeStruct((num_blocks, num_kv_heads, head_dim, block_size), dtype),
            "v": jax.ShapeDtypeStruct((num_blocks, block_size, num_kv_heads, head_dim), dtype),
        }

    def write(self, arrays, sizes, k, v, slots):
        block, offset = jnp.divmod(slots, sizes.block_size)
        return {
            "k": arrays["k"].at[block, :, :, offset].set(k.astype(arrays["k"].dtype)),
            "v": arrays["v"].at[block, offset].set(v.astype(arrays["v"].dtype)),
        }

    def read(self, arrays, sizes, block_ids, dtype):
        k = jnp.moveaxis(arrays["k"][block_ids], -1, -3)
        return k.astype(dtype), arrays["v"][block_ids].astype(dtype)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(LAYOUTS, "columns_of_k", ColumnsOfK())


def test_it_passes_what_ours_pass():
    of_kernels.test_a_layout_writes_reads_and_copies_as_its_oracle("columns_of_k")
    of_kernels.test_a_pool_takes_the_bytes_of_its_blocks_and_is_written_in_place("columns_of_k")
    for operation in ("decode", "v1", "v2"):
        of_kernels.test_decode_attention_reads_every_layout("columns_of_k", operation)
    of_kernels.tiles_of(*of_kernels.filled("columns_of_k"), "xla")


@pytest.mark.slow
def test_the_engine_serves_it_by_its_words():
    of_engine.check_tokens("tests.test_layout_from_outside:ColumnsOfK", ColumnsOfK())
