"""The V1 oracle: the manager, with full attention and with a sliding window."""

import pytest

from reference.v1.block_pool import (
    AllBlocksCleared,
    BlockStored,
)
from reference.v1.kv_cache_manager import KVCacheManager
from reference.v1.local_attention import SlidingWindowManager
from reference.v1.single_type import FullAttentionManager
from reference.v1.specs import KVCacheConfig
from tests.reference.v1_requests import check, decode, free_ids, ids, make_manager, make_request, prefill

# The manager, full attention.


def test_manager_shares_a_prefix_in_use_and_one_that_is_free() -> None:
    """Three prompts of 3 common blocks of 16 tokens and a few of their own, in a pool of 10 blocks."""
    common = [token for token in range(3) for _ in range(16)]
    manager = make_manager(11, block_size=16)
    pool = manager.block_pool
    first = make_request("0", [*common, *[3] * 7], 16)
    assert manager.get_computed_blocks(first) == (manager.empty_kv_cache_blocks, 0, 0)
    assert prefill(manager, first) == [1, 2, 3, 4]
    assert [pool.blocks[i].block_hash is not None for i in (1, 2, 3, 4)] == [True, True, True, False]

    second = make_request("1", [*common, *[3] * 5], 16)
    hit_blocks, num_hit_tokens, _ = manager.get_computed_blocks(second)
    assert (hit_blocks.get_block_ids(), num_hit_tokens) == (([1, 2, 3],), 48)
    assert [pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [1, 1, 1]  # looking takes nothing
    assert prefill(manager, second) == [5]
    assert [pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [2, 2, 2]
    assert manager.get_block_ids("1") == ([1, 2, 3, 5],)
    assert manager.get_num_common_prefix_blocks("0") == [3]
    assert manager.usage == pytest.approx(0.5)

    manager.free(first)
    manager.free(second)
    # never used, then 4 and 5, then the prefix from its end
    assert free_ids(pool) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    assert manager.get_block_ids("1") == ([],)

    third = make_request("2", [*common, *[3] * 6], 16)
    assert prefill(manager, third) == [6]
    assert free_ids(pool) == [7, 8, 9, 10, 4, 5]
    manager.free(third)
    assert prefill(manager, make_request("3", [99] * 160, 16)) == [7, 8, 9, 10, 4, 5, 6, 3, 2, 1]
    assert manager.get_computed_blocks(make_request("4", common, 16))[1] == 0
    check(manager)


def test_manager_split_profile_takes_the_partial_blocks_first() -> None:
    manager = make_manager(11, free_profile="split")
    request = make_request("0", range(15))
    prefill(manager, request)
    manager.free(request)
    assert free_ids(manager.block_pool) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    check(manager)


def test_manager_reverse_order_keeps_the_prefix_longest() -> None:
    """Freed last block first, a prompt of 4 blocks loses its end to a newcomer and keeps its beginning."""
    manager = make_manager(5)
    first = make_request("A", range(16))
    prefill(manager, first)
    manager.free(first)
    assert free_ids(manager.block_pool) == [4, 3, 2, 1]
    newcomer = make_request("B", [99] * 8)
    assert prefill(manager, newcomer) == [4, 3]
    assert manager.get_computed_blocks(make_request("C", range(16)))[1] == 8
    check(manager)


def test_manager_leaves_at_least_one_token_to_compute() -> None:
    manager = make_manager(10)
    prefill(manager, make_request("A", range(8)))
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 8
    assert manager.get_computed_blocks(make_request("B", range(8)))[1] == 4
    assert manager.get_computed_blocks(make_request("B", range(4)))[1] == 0


def test_manager_hit_ends_at_the_first_block_that_is_missing() -> None:
    manager = make_manager(10)
    request = make_request("A", range(13))
    prefill(manager, request)
    manager.evict_blocks({2})
    assert manager.get_computed_blocks(make_request("B", range(13)))[0].get_block_ids() == ([1],)


def test_manager_does_not_hit_without_caching_or_when_the_request_says_so() -> None:
    manager = make_manager(10)
    prefill(manager, make_request("A", range(8)))
    skipping = make_request("B", range(9), skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(skipping)[1] == 0
    assert manager.get_computed_blocks(make_request("C", range(9), cache_salt="x"))[1] == 0
    manager = make_manager(10, enable_caching=False)
    prefill(manager, make_request("A", range(8)))
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0


def test_manager_caches_a_block_when_decoding_fills_it() -> None:
    manager = make_manager(10)
    request = make_request("A", range(6))
    assert prefill(manager, request) == [1, 2]
    assert [decode(manager, request, token) for token in (6, 7, 8)] == [[], [], [3]]
    assert manager.get_computed_blocks(make_request("B", range(12)))[0].get_block_ids() == ([1, 2],)
    assert manager.get_blocks("A").get_unhashed_block_ids() == [3]
    check(manager)


def test_manager_chunks_of_a_prompt_cache_what_they_compute() -> None:
    manager = make_manager(10)
    request = make_request("A", range(12))
    for num_computed, num_new, num_cached in ((0, 5, 4), (5, 2, 4), (7, 5, 8)):
        request.num_computed_tokens = num_computed
        manager.allocate_slots(request, num_new)
        assert manager.get_computed_blocks(make_request("B", range(12)))[1] == num_cached
    check(manager)


def test_manager_drafts_and_lookahead_get_room_and_are_not_cached() -> None:
    manager = make_manager(10)
    request = make_request("A", range(6))
    blocks = manager.allocate_slots(request, 6 + 3, num_lookahead_tokens=4)  # 3 drafts
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2, 3, 4],)
    assert blocks.get_unhashed_block_ids() == [2, 3, 4]
    request.num_computed_tokens = 6
    assert decode(manager, request, 6) == []
    limited = make_manager(10, max_model_len=8)
    blocks = limited.allocate_slots(make_request("A", range(6)), 6, num_lookahead_tokens=100)
    assert blocks is not None
    assert blocks.get_block_ids() == ([1, 2],)


def test_manager_delayed_caching() -> None:
    manager = make_manager(10)
    request = make_request("A", range(8))
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(make_request("B", range(9)))[1] == 8
    check(manager)


def test_manager_returns_none_and_takes_nothing_when_blocks_do_not_suffice() -> None:
    manager = make_manager(5)
    assert prefill(manager, make_request("A", range(12))) == [1, 2, 3]
    request = make_request("B", [9] * 8)
    assert manager.allocate_slots(request, 8) is None
    assert free_ids(manager.block_pool) == [4]
    assert manager.get_num_common_prefix_blocks("A") == [3]
    assert manager.allocate_slots(request, 4) is not None
    check(manager)


def test_manager_counts_free_hits_as_blocks_needed() -> None:
    """Four blocks, all free; two are hit. A prompt of 5 blocks needs 3 more, and only 2 are left."""
    manager = make_manager(5)
    first = make_request("A", range(8))
    prefill(manager, first)
    manager.free(first)
    assert prefill(manager, make_request("B", range(20))) is None
    assert manager.block_pool.get_num_free_blocks() == 4
    assert prefill(manager, make_request("C", range(16))) == [3, 4]
    check(manager)


def test_manager_refuses() -> None:
    manager = make_manager(5)
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        manager.allocate_slots(make_request("A", range(8)), 0)
    with pytest.raises(AssertionError, match="hash_block_size=8 must divide scheduler_block_size=4"):
        make_manager(5, hash_block_size=8)
    with pytest.raises(ValueError, match="num_groups=0 must be at least 1"):
        KVCacheManager(KVCacheConfig(5, [], []), max_model_len=10)
    prefill(manager, make_request("A", range(8)))
    hit_blocks, num_hit_tokens, _ = manager.get_computed_blocks(make_request("B", range(9)))
    request = make_request("C", range(9))
    prefill(manager, request)
    with pytest.raises(AssertionError, match="only a new request can have new computed blocks"):
        manager.allocate_slots(request, 1, num_hit_tokens, hit_blocks)
    uncached = make_manager(5, enable_caching=False)
    with pytest.raises(AssertionError, match="should be empty when prefix caching is disabled"):
        uncached.allocate_slots(make_request("D", range(9)), 1, num_hit_tokens, hit_blocks)


def test_manager_free_of_an_unknown_request_is_no_error() -> None:
    manager = make_manager(5)
    manager.free(make_request("A", range(8)))
    assert manager.reset_prefix_cache()


def test_manager_preempted_request_finds_its_own_blocks_again() -> None:
    manager = make_manager(6)
    request = make_request("A", range(10))
    prefill(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(request)[0].get_block_ids() == ([1, 2],)
    assert prefill(manager, request) == [4]
    check(manager)


def test_manager_reset_and_events() -> None:
    manager = make_manager(6, enable_kv_cache_events=True)
    request = make_request("A", range(4))
    prefill(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert [type(event) for event in manager.take_events()] == [BlockStored, AllBlocksCleared]


def test_blocks_add_and_list_their_ids() -> None:
    manager = make_manager(6)
    request = make_request("A", range(6))
    prefill(manager, request)
    blocks = manager.get_blocks("A")
    empty = blocks.new_empty()
    assert (blocks + blocks).get_block_ids() == ([1, 2, 1, 2],)
    assert (empty.get_block_ids(), empty.get_block_ids(allow_none=True)) == (([],), None)
    assert blocks.get_block_ids(allow_none=True) == ([1, 2],)


# The manager, sliding window.


def test_window_skips_the_tokens_before_it() -> None:
    manager = make_manager(10, window=4).single_type_managers[0]
    assert isinstance(manager, SlidingWindowManager)
    # With 7 tokens computed, the next one (number 7) attends to 4, 5, 6 and 7.
    assert [manager.get_num_skipped_tokens(n) for n in (0, 3, 4, 7)] == [0, 0, 1, 4]
    full = make_manager(10).single_type_managers[0]
    assert isinstance(full, FullAttentionManager)
    assert full.get_num_skipped_tokens(100) == 0


def test_window_replaces_skipped_blocks_by_null_blocks_and_frees_them_last_first() -> None:
    manager = make_manager(12, block_size=2, window=4)
    prefill(manager, make_request("A", range(12), 2))
    tables = {}
    for num_computed_tokens in (0, 4, 5, 6, 7, 11):
        manager.remove_skipped_blocks("A", num_computed_tokens)
        tables[num_computed_tokens] = manager.get_block_ids("A")[0]
    assert tables == {
        0: [1, 2, 3, 4, 5, 6],
        4: [1, 2, 3, 4, 5, 6],  # token 0 is out, token 1, in the same block, is not
        5: [0, 2, 3, 4, 5, 6],
        6: [0, 2, 3, 4, 5, 6],
        7: [0, 0, 3, 4, 5, 6],
        11: [0, 0, 0, 0, 5, 6],
    }
    assert free_ids(manager.block_pool) == [7, 8, 9, 10, 11, 1, 2, 4, 3]
    check(manager)


def test_window_frees_as_it_decodes() -> None:
    manager = make_manager(5, block_size=2, window=4)
    request = make_request("A", range(5), 2)
    assert prefill(manager, request) == [1, 2, 3]
    for token in range(5, 40):
        assert decode(manager, request, token) is not None
        assert sum(block_id > 0 for block_id in manager.get_block_ids("A")[0]) <= 3
        check(manager)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 4


@pytest.mark.parametrize(
    ("cached", "hit"),
    [
        ([], []),
        ([0], [1]),
        ([0, 1], [1, 2]),
        ([0, 2], [1]),  # a run from the beginning may be shorter than the window
        ([1], []),
        ([1, 2], [0, 2, 3]),
        ([0, 1, 2], [0, 2, 3]),
        ([0, 1, 3], [1, 2]),
        ([0, 1, 3, 4], [0, 0, 0, 4, 5]),
        ([1, 2, 4], [0, 2, 3]),
    ],
)
def test_window_hit_is_the_last_run_that_fills_the_window(cached: list[int], hit: list[int]) -> None:
    """A window of 4 tokens reads 3 before the next one: 2 blocks of 2 tokens."""
    manager = make_manager(12, block_size=2, window=4)
    pool = manager.block_pool
    request = make_request("A", range(11), 2)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(request, blocks, 0, 5, 2, 0)
    pool.evict_blocks({block.block_id for i, block in enumerate(blocks) if i not in cached})
    found, num_tokens, _ = manager.get_computed_blocks(request)
    assert ids(found.blocks[0]) == hit
    assert num_tokens == 2 * len(hit)


def test_window_of_one_token_still_wants_one_block() -> None:
    manager = make_manager(12, block_size=2, window=1)
    prefill(manager, make_request("A", range(6), 2))
    assert manager.get_computed_blocks(make_request("B", range(6), 2))[0].get_block_ids() == ([0, 2],)


def test_window_hit_is_held_from_the_window_on() -> None:
    manager = make_manager(12, block_size=2, window=4)
    prefill(manager, make_request("A", range(8), 2))
    request = make_request("B", range(9), 2)
    assert prefill(manager, request) == [5]
    assert manager.get_block_ids("B") == ([0, 0, 3, 4, 5],)
    assert [manager.block_pool.blocks[i].ref_cnt for i in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]
    assert manager.get_num_common_prefix_blocks("B") == [0]
    manager.free(request)
    check(manager)
