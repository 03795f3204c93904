"""The V1 oracle: groups of layers, and the sizes of their blocks and pools."""

import dataclasses
from collections.abc import Callable

import pytest

from reference.v1.planning import (
    count_padding_layers,
    estimate_max_model_len,
    get_bytes_per_block,
    get_kv_cache_config,
    get_kv_cache_groups,
    group_layers,
    max_memory_usage_bytes,
    resolve_block_sizes,
    unify_page_sizes,
)
from reference.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


def full(block_size: int = 16, kv_heads: int = 1, head_size: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, kv_heads, head_size, "bfloat16")


def window(tokens: int, block_size: int = 16, kv_heads: int = 1, head_size: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, kv_heads, head_size, "bfloat16", tokens)


def chunked(tokens: int, block_size: int = 16, kv_heads: int = 1, head_size: int = 1) -> AttentionSpec:
    return ChunkedLocalAttentionSpec(block_size, kv_heads, head_size, "bfloat16", tokens)


def layers(*specs: AttentionSpec) -> dict[str, AttentionSpec]:
    return {str(i): spec for i, spec in enumerate(specs)}


def gemma_3_27b() -> dict[str, AttentionSpec]:
    def spec(layer: int) -> AttentionSpec:
        return full(16, 16, 128) if layer % 6 == 5 else window(1024, 16, 16, 128)

    return layers(*map(spec, range(62)))


@pytest.mark.parametrize(
    ("specs", "widths", "padding"),
    [
        (gemma_3_27b(), [9, 9, 9, 9, 8, 8, 10], 8),
        (layers(*[window(128), full()] * 12), [12, 12], 0),  # gpt-oss-20b
        (layers(*[window(128), full()] * 12, full()), [12, 13], 1),  # and a draft model's layer
        (
            layers(*[chunked(8192), chunked(8192), chunked(8192), full()] * 12),
            [12, 12, 12, 12],
            0,
        ),  # llama-4-scout
        (layers(*[full()] * 2, *[window(4)] * 3), [2, 2, 1], 1),  # 3 is 1.5 times 2
        (layers(*[full()] * 3, *[window(4)] * 4, *[window(8)] * 3), [3, 4, 3], 2),
        (layers(*[full()] * 5), [5], 0),
        (layers(*[window(4)] * 5), [5], 0),
        ({}, [], 0),
    ],
    ids=[
        "gemma-3-27b",
        "gpt-oss-20b",
        "draft",
        "llama-4-scout",
        "1.5",
        "three kinds",
        "full",
        "window",
        "none",
    ],
)
def test_groups_are_about_equally_wide(
    specs: dict[str, AttentionSpec], widths: list[int], padding: int
) -> None:
    groups = get_kv_cache_groups(specs)
    assert [len(group.layer_names) for group in groups] == widths
    assert count_padding_layers(groups) == padding
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    for group in groups:
        assert {specs[name] for name in group.layer_names} == {group.kv_cache_spec}


def test_layers_of_a_bucket_go_to_its_groups_in_turn() -> None:
    """Each stage of a pipeline has layers of every group."""
    groups = get_kv_cache_groups(layers(*[full(), window(4), window(4)] * 2))
    assert [group.layer_names for group in groups] == [["0", "3"], ["1", "4"], ["2", "5"]]


def test_layers_that_keep_the_same_tokens_are_one_group_whatever_their_heads() -> None:
    groups = get_kv_cache_groups(layers(window(8, head_size=64), window(8, head_size=256)))
    [group] = groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.kv_cache_spec.page_size_bytes == get_bytes_per_block(groups) == 16 * (64 + 256) * 2 * 2
    assert group.kv_cache_spec.max_admission_blocks_per_request(16, 1000) == 3
    assert len(get_kv_cache_groups(layers(window(8), window(4)))) == 2


def test_full_layers_join_whatever_they_read_of_their_cache() -> None:
    """A local layer whose cache is kept whole shares a table with those that read all."""
    local = dataclasses.replace(full(), sliding_window=64)
    assert FullAttentionSpec.merge([full(), local, full()]) == local
    with pytest.raises(ValueError, match="together they must be one"):
        FullAttentionSpec.merge([local, dataclasses.replace(full(), attention_chunk_size=64)])
    with pytest.raises(ValueError, match="must have one spec"):
        FullAttentionSpec.merge([full(), full(32)])
    groups = group_layers(layers(*[full(), local, window(4)] * 2))
    assert [group.layer_names for group in groups] == [["0", "1"], ["3", "4"], ["2", "5"]]
    assert [group.kv_cache_spec for group in groups] == [local, local, window(4)]


def test_without_groups_local_layers_keep_everything() -> None:
    [group] = get_kv_cache_groups(
        layers(full(32), window(8), window(8)), disable_hybrid_kv_cache_manager=True
    )
    assert group.kv_cache_spec == dataclasses.replace(full(32), sliding_window=8)
    [group] = get_kv_cache_groups(gemma_3_27b(), disable_hybrid_kv_cache_manager=True)
    assert len(group.layer_names) == 62
    with pytest.raises(ValueError, match="specs of several kinds"):
        get_kv_cache_groups(layers(window(8), window(4)), disable_hybrid_kv_cache_manager=True)


@pytest.mark.parametrize(
    ("small", "block_size", "padded"),
    [(full(16, 1, 64), 32, None), (full(16, 1, 96), 16, 8192), (full(16, 1, 128), 16, None)],
    ids=["divides", "does not divide", "equal"],
)
def test_pages_are_unified_by_larger_blocks_or_by_padding(
    small: AttentionSpec, block_size: int, padded: int | None
) -> None:
    specs = layers(window(64, 16, 1, 128), small)
    unified = unify_page_sizes(specs)
    assert unified["0"] == specs["0"]
    assert (unified["1"].block_size, unified["1"].page_size_padded) == (block_size, padded)
    assert {spec.page_size_bytes for spec in unified.values()} == {16 * 128 * 2 * 2}


def test_values_may_be_narrower_than_keys() -> None:
    assert dataclasses.replace(full(16, 2, 192), head_size_v=128).page_size_bytes == 16 * 2 * 320 * 2
    with pytest.raises(AssertionError, match="must be at least"):
        _ = dataclasses.replace(full(), page_size_padded=8).page_size_bytes


@pytest.mark.parametrize(
    ("block_sizes", "unit", "expected"),
    [((16,), None, (16, 16)), ((32, 48), None, (96, 16)), ((32, 48), 8, (96, 8))],
)
def test_block_sizes_of_scheduler_and_hashes(
    block_sizes: tuple[int, ...], unit: int | None, expected: tuple[int, int]
) -> None:
    groups = group_layers(layers(*map(full, block_sizes)))
    assert resolve_block_sizes(groups, unit) == expected


def test_a_match_unit_that_no_hit_can_use_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_match_unit=32 must divide"):
        resolve_block_sizes(group_layers(layers(full(32), window(8, 48))), 32)
    with pytest.raises(ValueError, match="must be the only group's block size, 16"):
        resolve_block_sizes(group_layers(layers(full())), 8)


@pytest.mark.parametrize(
    ("spec", "in_flight", "length", "blocks"),
    [
        (full, 100, 1000, 63),
        (window, 0, 1000, 5),  # 63 tokens, and the window may begin inside of a block
        (window, 128, 1000, 13),
        (window, 128, 100, 8),
        (chunked, 0, 1000, 4),
        (chunked, 100, 1000, 11),
        (chunked, 100, 40, 3),
    ],
)
def test_a_request_holds_at_most(
    spec: Callable[..., AttentionSpec], in_flight: int, length: int, blocks: int
) -> None:
    layer = spec() if spec is full else spec(64)
    assert layer.max_admission_blocks_per_request(in_flight, length) == blocks


def test_the_memory_of_gemma_3_27b() -> None:
    """A block is 10 layers of 131,072 bytes, that of the widest group."""
    groups = get_kv_cache_groups(gemma_3_27b())
    assert get_bytes_per_block(groups) == 1_310_720
    assert max_memory_usage_bytes(groups, 8192, 32_768) == (2048 + 6 * 577) * 1_310_720  # 7.2 GB
    assert max_memory_usage_bytes(groups, 8192, 131_072) == (8192 + 6 * 577) * 1_310_720  # 15.3 GB
    assert get_kv_cache_config(groups, 10**10).num_blocks == 7629
    assert get_kv_cache_config([], 10**10).num_blocks == 1
    longest = estimate_max_model_len(groups, 8192, 131_072, 10**10)
    assert longest == (7629 - 6 * 577) * 16
    assert max_memory_usage_bytes(groups, 8192, longest) <= 10**10
    assert max_memory_usage_bytes(groups, 8192, longest + 1) > 10**10
    assert estimate_max_model_len(groups, 8192, 1000, 10**10) == 1000
    assert estimate_max_model_len(groups, 8192, 1000, 0) == 0


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        # A pair of full layers repeats twice, and so each group of windows has two.
        ([full(16, 1, 64), full(16, 1, 128)] * 2 + [window(8)] * 6, ["0 1 2 3", "4 7", "5 8", "6 9"]),
        # The longest pattern of several sizes stays whole.
        ([full(16, 1, 64), full(16, 1, 128), window(8), window(8, 16, 1, 4)] * 2, ["0 1 4 5", "2 3 6 7"]),
        # No pattern of two sizes: windows are divided to fit the block of 4 full layers.
        ([full(16, 1, 64)] * 4 + [window(8, 16, 1, 128)] * 5, ["0 1 2 3", "4 7", "5 8", "6"]),
        # 2:1 is no pattern either, and stays whole.
        ([full(16, 1, 64), full(16, 1, 64), full(16, 1, 128), window(8)], ["0 1 2", "3"]),
        # Pages of one size are not packed.
        ([full()] * 2 + [window(8)] * 4, ["0 1", "2 4", "3 5"]),
    ],
)
def test_pages_of_several_sizes_are_packed_side_by_side(
    specs: list[AttentionSpec], expected: list[str]
) -> None:
    groups = get_kv_cache_groups(layers(*specs), pack=True)
    assert [" ".join(group.layer_names) for group in groups] == expected


def test_sinks_fill_whole_blocks() -> None:
    spec = SinkFullAttentionSpec(16, 1, 1, "bfloat16", 32)
    assert spec.page_size_bytes == full().page_size_bytes
    for sink_len, why in ((0, "at least 1"), (24, "multiple of block_size")):
        with pytest.raises(AssertionError, match=why):
            SinkFullAttentionSpec(16, 1, 1, "bfloat16", sink_len)
