"""Layouts as a user's options name them, and names and blocks that are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import layouts
from pallas_kernels.layouts import LAYOUTS


@pytest.mark.parametrize(("old", "new"), [("Place", layouts.Location), ("Part", layouts.BlockSlice)])
def test_names_of_an_earlier_release_stay_with_a_warning(old: str, new: type) -> None:
    with pytest.warns(DeprecationWarning, match=f"layouts.{old} is now layouts.{new.__name__}"):
        assert getattr(layouts, old) is new
    with pytest.raises(AttributeError, match="has no attribute 'Places'"):
        layouts.Places  # noqa: B018


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "token_major"),
        ({"kv_cache_dtype": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": "int8"}, "int8_per_token"),
        ({"kv_cache_dtype": "int4"}, "int4_grouped"),
        ({"kv_layout": "int8_per_token", "kv_cache_dtype": "int8"}, "int8_per_token"),
        ({"kv_layout": "tests.outsiders.layout:ColumnsOfK"}, None),
    ],
)
def test_options_choose_a_layout_and_words_say_it_again(options: dict[str, str], name: str | None) -> None:
    chosen = layouts.choose(**{"kv_layout": "token_major"} | options)
    assert name is None or chosen == LAYOUTS[name].on(jax.default_backend())
    assert layouts.choose(**layouts.words(chosen)) == chosen
    assert layouts.is_ours(chosen) == (name is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_layout": "vllm"}, "kv_layout='vllm' must be token_major, .* or 'package.module:Name'"),
        ({"kv_layout": "nowhere.at_all:It"}, "kv_layout='nowhere.at_all:It' must be .*: No module named"),
        ({"kv_layout": "json:dumps"}, "kv_layout='json:dumps' must be token_major"),
        ({"kv_layout": 7}, "kv_layout=7 must be token_major"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4' must be one of auto, fp8"),
        ({"kv_layout": "int8_per_token", "kv_cache_dtype": "fp8"}, "must be 'auto' or 'int8' for"),
        ({"kv_layout": "split_x", "kv_cache_dtype": "int8"}, "must be 'auto' for kv_layout='split_x', which"),
        ({"kv_layout": "fused", "kv_cache_dtype": "int4"}, "must be 'auto' for kv_layout='fused', which"),
        ({"measures_scales": True}, "calculate_kv_scales=True must go with a kv_cache_dtype of fp8"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.choose(**{"kv_layout": "token_major"} | options)


@pytest.mark.parametrize(
    ("name", "block_size", "head_dim", "message"),
    [
        ("token", 16, 64, "block_size must be 1, not block_size=16"),
        ("int4_grouped", 8, 64, "block_size must be a multiple of 16"),
        ("int4_grouped", 16, 7, "head_dim must be even"),
        ("split_x", 16, 6, "head_dim must be a multiple of 4"),
    ],
)
def test_blocks_that_a_layout_has_not_are_refused(
    name: str, block_size: int, head_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layouts.create(LAYOUTS[name], 4, block_size, 2, head_dim, jnp.dtype("float32"))
