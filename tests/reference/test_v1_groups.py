"""The V1 oracle: several groups of layers that take from one pool."""

from collections.abc import Sequence

import pytest

from reference.v1.block_pool import BlockRemoved, BlockStored
from reference.v1.kv_cache_manager import KVCacheManager
from reference.v1.kv_cache_utils import Request
from reference.v1.specs import AttentionSpec, RSWASpec
from tests.reference.v1_requests import (
    check,
    chunked,
    decode,
    free_ids,
    full,
    ids,
    make_hybrid_manager,
    make_request,
    prefill,
    window,
)


def cached_blocks(manager: KVCacheManager, request: Request, group: int) -> set[int]:
    """Return the indices of the request's blocks whose content is findable in the group."""
    block_size = manager.single_type_managers[group].block_size
    step = block_size // manager.block_pool.hash_block_size
    hashes = request.block_hashes[step - 1 :: step]
    return {i for i, name in enumerate(hashes) if manager.block_pool.get_cached_block(name, [group])}


# A full group and two windows of 2 blocks of 16 tokens: the worked example of vLLM's own test.

COMMON = [token for token in range(3) for _ in range(16)]


def example() -> tuple[KVCacheManager, Request]:
    manager = make_hybrid_manager(21, [full(16), window(32, 16), window(32, 16)])
    first = make_request("0", [*COMMON, *[3] * 7], 16)
    blocks = manager.allocate_slots(first, 55)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    return manager, first


def test_hit_leaves_out_what_the_window_does_not_need() -> None:
    manager, first = example()
    second = make_request("1", [*COMMON, *[4] * 5], 16)
    hits, num_tokens, junction = manager.get_computed_blocks(second)
    # The first block of the windows is not among them, though it is still cached.
    assert hits.get_block_ids() == ([1, 2, 3], [0, 6, 7], [0, 10, 11])
    assert (num_tokens, junction) == (48, 0)
    blocks = manager.allocate_slots(second, 5, num_tokens, hits)
    assert blocks is not None
    assert blocks.get_block_ids() == ([13], [14], [15])
    assert [manager.block_pool.blocks[i].ref_cnt for i in (1, 5, 6, 9, 10)] == [2, 1, 2, 1, 2]
    assert blocks.get_unhashed_block_ids_all_groups() == [[13], [14], [15]]
    check(manager)
    manager.free(first)
    manager.free(second)
    check(manager)
    # First group first, and in each the last block first.
    order = [16, 17, 18, 19, 20, 4, 8, 5, 12, 9, 13, 3, 2, 1, 14, 7, 6, 15, 11, 10]
    assert free_ids(manager.block_pool) == order


@pytest.mark.parametrize(
    ("evicted", "num_hit_blocks"),
    [
        ([5, 9], 3),  # behind the window
        ([1], 0),  # the first of full attention
        ([3, 7, 11], 2),
        ([3], 2),
        ([7], 2),
        ([11], 2),
        ([6], 1),  # a window from the first block on may be shorter
        # Full attention has 2 blocks, the windows 3 but neither 2 nor 1.
        ([3, 5, 9], 0),
        ([2, 5], 0),
    ],
)
def test_hit_is_what_all_groups_can_serve(evicted: list[int], num_hit_blocks: int) -> None:
    manager, _ = example()
    manager.evict_blocks(set(evicted))
    hits, num_tokens, _ = manager.get_computed_blocks(make_request("1", [*COMMON, 4], 16))
    assert num_tokens == 16 * num_hit_blocks
    assert [len(blocks) for blocks in hits.blocks] == [num_hit_blocks] * 3


def test_allocation_is_for_all_groups_or_none() -> None:
    """Three groups of 2 blocks each take 6; of 5 free ones none is taken."""
    manager = make_hybrid_manager(6, [full(), window(8), chunked(8)])
    request = make_request("A", range(8))
    assert manager.allocate_slots(request, 8) is None
    assert manager.block_pool.get_num_free_blocks() == 5
    assert manager.get_block_ids("A") == ([], [], [])
    assert manager.allocate_slots(request, 4, reserved_blocks=3) is None
    assert manager.allocate_slots(request, 4, reserved_blocks=2) is not None
    check(manager)


def test_a_refused_step_still_frees_what_left_the_window() -> None:
    manager = make_hybrid_manager(7, [full(), window(4)])
    request = make_request("A", range(12))
    assert prefill(manager, request) == [1, 2, 3]
    assert manager.get_block_ids("A") == ([1, 2, 3], [4, 5, 6])
    # Token 12 sees 9 to 12. With the two blocks that leave, 4 and 5, there are two: enough for one more each.
    assert manager.allocate_slots(request, 9) is None
    assert manager.get_block_ids("A") == ([1, 2, 3], [0, 0, 6])
    assert ids(manager.block_pool.free_block_queue.get_all_free_blocks()) == [5, 4]
    assert decode(manager, request, 12) == [5]
    check(manager)


def test_tokens_in_flight_keep_their_window() -> None:
    """A step under way reads the window before its first token, and its drafts may yet be rejected."""
    manager = make_hybrid_manager(20, [full(), window(4), chunked(8)])
    request = make_request("A", range(12))
    prefill(manager, request)
    request.num_in_flight_tokens = 7
    decode(manager, request, 12)  # token 5 is the first of which the step is not over
    assert [[i > 0 for i in table] for table in manager.get_block_ids("A")] == [
        [True] * 4,
        [True] * 4,
        [True] * 4,
    ]
    request.num_in_flight_tokens = 1
    decode(manager, request, 13)
    assert [[i > 0 for i in table] for table in manager.get_block_ids("A")] == [
        [True] * 4,
        [False, False, True, True],
        [False, False, True, True],
    ]


def test_content_is_cached_for_each_group_alone() -> None:
    manager = make_hybrid_manager(10, [full(), window(8)], enable_kv_cache_events=True)
    request = make_request("A", range(8))
    prefill(manager, request)
    assert manager.get_block_ids("A") == ([1, 2], [3, 4])
    stored = manager.take_events()
    assert [event.group_idx for event in stored if isinstance(event, BlockStored)] == [0, 1]
    manager.evict_blocks({4})
    assert manager.take_events() == [BlockRemoved([request.block_hashes[1]], group_idx=1)]
    assert cached_blocks(manager, request, 0) == {0, 1}
    assert cached_blocks(manager, request, 1) == {0}
    assert manager.block_pool.get_cached_block(request.block_hashes[1], [0, 1]) is None


# Blocks of several sizes.


def test_larger_blocks_hit_by_the_last_hash_in_them() -> None:
    """Full attention has blocks of 8 tokens, the window blocks of 4. Hits end at multiples of 8."""
    manager = make_hybrid_manager(40, [full(8), window(8)])
    request = make_request("A", range(40))
    blocks = manager.allocate_slots(request, 28)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11])
    # 28 tokens are rounded down to 24, as no hit can be longer.
    assert (cached_blocks(manager, request, 0), cached_blocks(manager, request, 1)) == (
        {0, 1, 2},
        {*range(6)},
    )
    for length in (29, 25):
        hits, num_tokens, _ = manager.get_computed_blocks(make_request("B", range(length)))
        assert (hits.get_block_ids(), num_tokens) == (([1, 2, 3], [0, 0, 0, 0, 9, 10]), 24)
    manager.evict_blocks({10})  # the window has 5 blocks now, and full attention 6
    hits, num_tokens, _ = manager.get_computed_blocks(make_request("B", range(29)))
    assert (hits.get_block_ids(), num_tokens) == (([1, 2], [0, 0, 7, 8]), 16)


@pytest.mark.parametrize(
    ("specs", "options", "num_tokens", "expected"),
    [
        # Hits end at multiples of 16 tokens, 4 blocks of the window group, which needs 1 block before.
        ([full(16), window(4)], {}, 32, {3, 7}),
        ([full(16), window(9)], {}, 32, {2, 3, 6, 7}),
        ([full(16), window(16)], {}, 32, {*range(8)}),
        ([full(16), window(4)], {}, 44, {3, 7}),
        # Blocks of one size: a hit may end anywhere.
        ([full(), window(4)], {}, 32, {*range(8)}),
        ([window(4)], {}, 32, {*range(8)}),
        # With EAGLE also the block behind each of them, that is dropped again.
        ([full(16), window(4)], {"eagle": [1]}, 44, {3, 4, 7, 8}),
        ([full(16), window(4)], {"eagle": [1]}, 32, {3, 4, 7}),
        ([full(16), window(4)], {"eagle": [0]}, 44, {3, 7}),
        # A group of the same layers is looked up with the draft's, and so keeps as much.
        ([full(16), window(4), window(4)], {"eagle": [2], "group": 1}, 44, {3, 4, 7, 8}),
        # Every 32 tokens, and where the prompt of 64 tokens may be hit again: 63 rounded down, 48.
        ([full(16), window(4)], {"interval": 32}, 64, {7, 11, 15}),
        ([full(16), window(4)], {"interval": 0}, 64, {11}),
        ([full(16), window(9)], {"interval": 0}, 64, {10, 11}),
        ([full(16), window(4)], {"interval": 0}, 63, {11}),
        ([window(4)], {"interval": 16}, 64, {3, 7, 11, 14, 15}),
        ([window(4)], {"interval": 0}, 64, {14}),
        # EAGLE needs 64 tokens to hit 48 and drop a block, so 63 can be hit only up to 32.
        ([full(16), window(4)], {"interval": 0, "eagle": [1]}, 63, {7, 8}),
        ([full(16), window(4)], {"interval": 0, "eagle": [1]}, 64, {7, 8, 11, 12}),
        # What other prompts share is kept too; with EAGLE also one block before.
        ([full(), window(4)], {"interval": 0, "junction": 24}, 64, {5, 14}),
        ([full(), window(9)], {"interval": 0, "junction": 24}, 64, {4, 5, 13, 14}),
        ([full(), window(4)], {"interval": 0, "junction": 24, "eagle": [1]}, 64, {4, 5, 6, 13, 14, 15}),
        ([full(), window(4)], {"junction": 24}, 64, {*range(16)}),
        # Chunked groups and full ones keep all.
        ([full(), window(4), chunked(8)], {"interval": 0, "group": 2}, 32, {*range(8)}),
        ([full(), window(4)], {"interval": 0, "group": 0}, 32, {*range(8)}),
    ],
)
def test_windows_keep_only_what_a_hit_can_reach(
    specs: Sequence[AttentionSpec], options: dict, num_tokens: int, expected: set[int]
) -> None:
    eagle = options.get("eagle", [])
    manager = make_hybrid_manager(200, specs, eagle, options.get("interval"), use_eagle=bool(eagle))
    request = make_request("A", range(num_tokens))
    request.shared_prefix_boundary = options.get("junction", 0)
    prefill(manager, request)
    assert cached_blocks(manager, request, options.get("group", len(specs) - 1)) == expected


def test_uncached_blocks_are_taken_before_cached_ones() -> None:
    manager = make_hybrid_manager(20, [full(16), window(4)], free_profile="split")
    request = make_request("A", range(32))
    prefill(manager, request)
    assert manager.get_block_ids("A") == ([1, 2], [3, 4, 5, 6, 7, 8, 9, 10])
    manager.free(request)
    assert free_ids(manager.block_pool) == [9, 8, 7, 5, 4, 3, *range(11, 20), 2, 1, 10, 6]


def test_junction_is_where_a_group_lags_and_is_kept_when_named() -> None:
    """Three prompts share 16 tokens. Windows keep only their own ends, until the junction is known."""
    for named, expected in ((False, 0), (True, 16)):
        manager = make_hybrid_manager(200, [full(), window(8)], retention_interval=0)
        prefill(manager, make_request("A", [*range(16), *[50] * 16]))
        second = make_request("B", [*range(16), *[60] * 16])
        hits, num_tokens, junction = manager.get_computed_blocks(second)
        assert (num_tokens, junction) == (0, 16)
        second.shared_prefix_boundary = junction if named else 0
        manager.allocate_slots(second, 32, num_tokens, hits)
        _, num_tokens, junction = manager.get_computed_blocks(make_request("C", [*range(16), *[70] * 16]))
        assert (num_tokens, junction) == (expected, 0 if named else 16)


# Admission.


@pytest.mark.parametrize(
    ("spec", "num_blocks", "fits"),
    [
        # 16 blocks of full attention, and (15 + 8) / 4 + 1 = 7 of the window.
        (window(16), 23, True),
        (window(16), 22, False),
        # (16 + 8) / 4 = 6 of a chunk.
        (chunked(16), 22, True),
        (chunked(16), 21, False),
        (full(), 32, True),
        (full(), 31, False),
    ],
)
def test_whole_prompt_is_admitted_by_what_it_holds_at_one_time(
    spec: AttentionSpec, num_blocks: int, fits: bool
) -> None:
    """A prompt of 64 tokens, computed 8 at a time, must never run out of blocks once it is admitted."""
    manager = make_hybrid_manager(num_blocks + 1, [full(), spec], max_in_flight_tokens=8)
    request = make_request("A", range(64))
    admitted = manager.allocate_slots(request, 8, full_sequence_must_fit=True) is not None
    assert admitted == fits
    while admitted and request.num_computed_tokens < 56:
        request.num_computed_tokens += 8
        assert manager.allocate_slots(request, 8) is not None
    check(manager)


# Chunks, and prompts that stay.


def test_chunk_starts_anew_at_its_edge() -> None:
    manager = make_hybrid_manager(30, [full(), chunked(8)])
    request = make_request("A", range(16))
    prefill(manager, request)
    tables = {}
    for num_computed_tokens in (7, 8, 15, 16):
        manager.remove_skipped_blocks("A", num_computed_tokens)
        tables[num_computed_tokens] = manager.get_block_ids("A")[1]
    assert tables == {7: [5, 6, 7, 8], 8: [0, 0, 7, 8], 15: [0, 0, 7, 8], 16: [0, 0, 0, 0]}
    assert manager.get_num_common_prefix_blocks("A") == [4, 0]
    check(manager)


@pytest.mark.parametrize(
    ("length", "evicted", "hit"),
    [
        (13, [], [0, 0, 7]),  # token 12 is in the second chunk, whose first block is looked up
        (17, [], [0, 0, 0, 0]),  # token 16 begins a chunk: nothing is
        (13, [5, 6], [0, 0, 7]),
        (13, [7], [0, 0]),
        (9, [5, 6], [0, 0]),
        (8, [6], [5]),
        (8, [5], []),
    ],
)
def test_chunks_before_the_next_token_are_not_looked_up(
    length: int, evicted: list[int], hit: list[int]
) -> None:
    manager = make_hybrid_manager(30, [full(), chunked(8)])
    prefill(manager, make_request("A", range(16)))
    manager.evict_blocks(set(evicted))
    hits, num_tokens, _ = manager.get_computed_blocks(make_request("B", range(length)))
    assert hits.get_block_ids() == ([*range(1, len(hit) + 1)], hit)
    assert num_tokens == 4 * len(hit)


def test_prompt_stays_and_the_middle_leaves() -> None:
    spec = RSWASpec(4, 1, 1, "half", rswa_window=8)
    manager = make_hybrid_manager(30, [spec, full()])
    request = make_request("A", range(6))
    prefill(manager, request)
    for token in range(6, 30):
        decode(manager, request, token)
        check(manager)
    # Of 29 computed tokens, 21 on are read; blocks 0 and 1 have the prompt.
    assert [i > 0 for i in manager.get_block_ids("A")[0]] == [True] * 2 + [False] * 3 + [True] * 3
    manager.remove_skipped_blocks("A", 1000)  # without the prompt's length nothing leaves
    assert sum(i > 0 for i in manager.get_block_ids("A")[0]) == 5


# Refusals.


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache_retention_interval=24 must be .* a multiple of"):
        make_hybrid_manager(9, [full(16), window(4)], retention_interval=24)
    with pytest.raises(ValueError, match="prefix_cache_retention_interval=-16 must be non-negative"):
        make_hybrid_manager(9, [full(16), window(4)], retention_interval=-16)
    with pytest.raises(ValueError, match="no group has a window"):
        make_hybrid_manager(9, [full(), chunked(8)], retention_interval=16)
    make_hybrid_manager(9, [full(), chunked(8)], retention_interval=0)
    with pytest.raises(AssertionError, match="scheduler_block_size=8 must be a multiple of block_size=16"):
        make_hybrid_manager(9, [full(16), window(4)], scheduler_block_size=8)
    with pytest.raises(AssertionError, match="hash_block_size=8 must divide"):
        make_hybrid_manager(9, [full(16), window(4)], hash_block_size=8)
    with pytest.raises(NotImplementedError, match="must be one of"):
        make_hybrid_manager(9, [AttentionSpec(4, 1, 1, "half")])
    manager = make_hybrid_manager(9, [full(8), chunked(8)])
    with pytest.raises(AssertionError, match="alignment_tokens=8 must be block_size=4"):
        manager.get_computed_blocks(make_request("B", range(17)))
    manager = make_hybrid_manager(9, [full(), chunked(8)], use_eagle=True)
    with pytest.raises(AssertionError, match="does not drop a block for EAGLE"):
        manager.get_computed_blocks(make_request("B", range(17)))
