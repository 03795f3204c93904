"""The V1 oracle: which cached prefix several groups of layers can begin with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.v1.coordinator import replay_boundaries
from reference.v1.specs import AttentionSpec, ChunkedLocalAttentionSpec, SlidingWindowSpec
from tests.reference.v1_requests import chunked, full, make_hybrid_manager, make_request, prefill, window

# The search itself, against its definition.


def can_serve(spec: AttentionSpec, cached: list[bool], num_tokens: int) -> bool:
    """Return whether every block is cached that the token after `num_tokens` reads."""
    first = 0
    if isinstance(spec, SlidingWindowSpec):
        first = max(num_tokens - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        first = num_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return all(cached[first // spec.block_size : num_tokens // spec.block_size])


@settings(max_examples=200, deadline=None)
@given(
    specs=st.lists(
        st.sampled_from([full(2), full(4), window(3, 2), window(6, 2), window(9, 4), window(5, 4)]),
        min_size=2,
        max_size=4,
    )
    | st.lists(
        st.sampled_from([full(), window(5), window(9), chunked(8), chunked(12)]), min_size=2, max_size=4
    ),
    holes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15)), max_size=8),
    num_tokens=st.integers(1, 33),
)
def test_hit_is_the_longest_prefix_that_every_group_can_serve(
    specs: list[AttentionSpec], holes: list[tuple[int, int]], num_tokens: int
) -> None:
    manager = make_hybrid_manager(100, specs, hash_block_size=2)
    # Layers of chunks alone would hit chunks that nobody has computed: nothing reads them.
    writer = make_request("A", range(32), 2, skip_reading_prefix_cache=True)
    prefill(manager, writer)
    cached = [[True] * (32 // spec.block_size) for spec in specs]
    for group, index in holes:
        if group < len(specs) and index < len(cached[group]):
            cached[group][index] = False
            manager.evict_blocks({manager.get_block_ids("A")[group][index]})
    hits, found, _ = manager.get_computed_blocks(make_request("B", range(num_tokens), 2))
    step = max(spec.block_size for spec in specs)
    lengths = range(0, min(num_tokens - 1, 32) + 1, step)
    assert found == max(
        n for n in lengths if all(can_serve(s, c, n) for s, c in zip(specs, cached, strict=True))
    )
    for spec, blocks in zip(specs, hits.blocks, strict=True):
        assert len(blocks) == found // spec.block_size


# EAGLE.


@pytest.mark.parametrize(
    ("evicted", "num_hit_blocks"),
    [
        ([], 5),
        ([8, 15], 5),
        ([1], 0),
        ([6, 13, 20], 4),
        ([6], 4),
        ([12], 3),  # its window ends in the last block but one
        ([19], 3),
        ([6, 8, 15], 4),
    ],
)
def test_eagle_drops_one_block_of_the_longest_prefix(evicted: list[int], num_hit_blocks: int) -> None:
    """Six blocks are cached in each group, and the windows are 3 blocks: vLLM's own table."""
    common = [token for token in range(6) for _ in range(16)]
    manager = make_hybrid_manager(31, [full(16), window(48, 16), window(48, 16)], use_eagle=True)
    prefill(manager, make_request("0", [*common, *[6] * 7], 16))
    manager.evict_blocks(set(evicted))
    hits, num_tokens, _ = manager.get_computed_blocks(make_request("1", [*common, 6], 16))
    assert num_tokens == 16 * num_hit_blocks
    assert [len(blocks) for blocks in hits.blocks] == [num_hit_blocks] * 3
    if not evicted:
        assert hits.get_block_ids() == ([1, 2, 3, 4, 5], [0, 0, 10, 11, 12], [0, 0, 17, 18, 19])


def test_eagle_drops_only_in_the_groups_of_the_draft_model() -> None:
    """Full attention alone drafts: the window needs no block beyond the hit."""
    for eagle_groups, expected in (([0], 8), ([1], 8), ([], 8)):
        manager = make_hybrid_manager(31, [full(), window(8)], eagle_groups, use_eagle=True)
        prefill(manager, make_request("A", range(12)))
        assert manager.get_computed_blocks(make_request("B", range(13)))[1] == expected
    manager = make_hybrid_manager(31, [full(), window(8)], [0], use_eagle=True)
    prefill(manager, make_request("A", range(12)))
    manager.evict_blocks({6})  # the window's last block, behind the hit
    assert manager.get_computed_blocks(make_request("B", range(13)))[1] == 8
    manager = make_hybrid_manager(31, [full(), window(8)], [1], use_eagle=True)
    prefill(manager, make_request("A", range(12)))
    manager.evict_blocks({6})
    assert manager.get_computed_blocks(make_request("B", range(13)))[1] == 4


@pytest.mark.parametrize(("num_groups", "expected"), [(1, 4), (2, 8)])
def test_eagle_block_to_drop_lies_inside_the_hit_of_one_group_and_behind_that_of_several(
    num_groups: int, expected: int
) -> None:
    """A prompt of 12 tokens is sent again: 11 may hit, which are 2 blocks, and the third is cached."""
    manager = make_hybrid_manager(31, [full(), window(8)][:num_groups], use_eagle=True)
    prefill(manager, make_request("A", range(12)))
    assert manager.get_computed_blocks(make_request("B", range(12)))[1] == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "use_eagle", "expected"),
    [(64, False, (63,)), (64, True, (32, 48)), (63, True, (32,)), (5, True, (0,))],
)
def test_replay_boundaries(num_prompt_tokens: int, use_eagle: bool, expected: tuple[int, ...]) -> None:
    assert replay_boundaries(num_prompt_tokens, 16, use_eagle) == expected


@pytest.mark.parametrize(
    ("eagle_groups", "expected"),
    [
        # The second window lacks block 6: it has 5 blocks and the one to drop. The first then needs no more
        # than block 4, as it has dropped a block before.
        ([0, 1], 20),
        # The second window drops none, and has 6 blocks. The first is asked anew. It lacks block 5, to be
        # kept or dropped, so 4 blocks are left, block 4 being the one to drop.
        ([0], 16),
    ],
)
def test_eagle_block_is_dropped_once_and_again_when_another_spec_shortens_the_hit(
    eagle_groups: list[int], expected: int
) -> None:
    """All 8 blocks are cached, but for block 5 in one window, of 1 block, and block 6 in another, of 2."""
    manager = make_hybrid_manager(31, [window(5), window(9)], eagle_groups, use_eagle=True)
    prefill(manager, make_request("A", range(32)))
    first, second = manager.get_block_ids("A")
    manager.evict_blocks({first[5], second[6]})
    assert manager.get_computed_blocks(make_request("B", range(33)))[1] == expected


def test_eagle_rounds_a_run_shorter_than_the_window_down_twice() -> None:
    """Blocks 0 to 4 are cached, and 0 to 3 would do for 16 tokens. vLLM: 5, 4, 3, 0."""
    manager = make_hybrid_manager(31, [full(16), window(24)], [1], use_eagle=True)
    prefill(manager, make_request("A", range(20)))
    assert manager.get_computed_blocks(make_request("B", range(21)))[1] == 0
    manager = make_hybrid_manager(31, [full(16), window(16)], [1], use_eagle=True)
    prefill(manager, make_request("A", range(20)))
    # 4 blocks and one to drop fill this window.
    assert manager.get_computed_blocks(make_request("B", range(21)))[1] == 16
