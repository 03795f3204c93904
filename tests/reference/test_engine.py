"""The engine's oracle: every rule worked out by hand, then random workloads that must come to an end."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import model
from reference.engine import Engine, cdiv, greedy, ids
from reference.engine_state import EngineConfig, NextToken, Phase, Request, Row, Step
from reference.invariants import check_block_pool


def count_up(tokens: list[int]) -> int:
    """An answer that is easily foreseen: 100, 101, ..."""
    return max(tokens[-1] + 1, 100)


def make(next_token: NextToken = count_up, **options: Any) -> Engine:
    """Blocks of 2 positions, tiles of 4, two tiles a step, four rows of which two run."""
    sizes = {
        "max_num_seqs": 2,
        "num_rows": 4,
        "num_tiles": 2,
        "tile_len": 4,
        "block_size": 2,
        "num_blocks": 20,
        "max_blocks_per_seq": 16,
    }
    return Engine(EngineConfig(**{**sizes, **options}), next_token)


def phases(engine: Engine) -> list[str | None]:
    return [None if row is None else row.phase.value for row in engine.rows]


def computed(engine: Engine) -> list[int]:
    return [0 if row is None else row.computed for row in engine.rows]


def tokens(engine: Engine, row: int) -> list[int]:
    found = engine.rows[row]
    assert found is not None
    return found.tokens


def check(engine: Engine) -> None:
    """Nothing is lost, and who holds no blocks holds none."""
    rows = [row for row in engine.rows if row is not None]
    on_host = [row for row in rows if row.phase is Phase.SWAPPED]
    check_block_pool(engine.pool, [row.blocks for row in rows if row not in on_host])
    check_block_pool(engine.host_pool, [row.blocks for row in on_host])
    for row in rows:
        if row.phase in (Phase.WAITING, Phase.FINISHED):
            assert (row.blocks, row.computed) == ([], 0)
        else:
            assert len(row.blocks) == cdiv(row.computed, engine.config.block_size)


def run(engine: Engine, max_steps: int = 100) -> list[Step]:
    """Steps until all have finished."""
    steps = []
    while any(phase not in (None, "finished") for phase in phases(engine)):
        assert len(steps) < max_steps, f"after {max_steps} steps: {phases(engine)}"
        steps.append(engine.step())
        check(engine)
    return steps


def test_one_request_from_the_first_step_to_the_last() -> None:
    engine = make()
    engine.submit(Request(0, [1, 2, 3, 4, 5], 8), row=2)
    assert phases(engine) == [None, None, "waiting", None]
    first = engine.step()
    assert first.admitted == {2: 0}
    assert first.num_new_tokens == {2: 5}, "both its tiles"
    assert first.new_tokens == {2: 100}
    assert first.block_tables == {2: [1, 2, 3]}, "block 0 is the null block"
    assert first.free_block_ids == list(range(4, 20))
    second = engine.step()
    assert (second.num_new_tokens, second.new_tokens) == ({2: 1}, {2: 101})
    assert second.block_tables == {2: [1, 2, 3]}, "positions 0 to 5 fill three blocks"
    third = engine.step()
    assert third.finished == {2: "length"}, "8 tokens, the last of which is never computed"
    assert third.block_tables == {}
    assert third.free_block_ids == [*range(5, 20), 4, 3, 2, 1], "the last block first"
    assert tokens(engine, 2) == [1, 2, 3, 4, 5, 100, 101, 102]
    assert engine.step() == Step(free_block_ids=third.free_block_ids), "nothing is left to do"


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    engine = make()
    engine.submit(Request(0, [1], 9), row=1)
    assert engine.step().num_new_tokens == {1: 1}
    engine.submit(Request(1, list(range(2, 15)), 20), row=0)
    chunks = [engine.step() for _ in range(3)]
    assert [step.num_new_tokens for step in chunks] == [{0: 8, 1: 1}, {0: 5, 1: 1}, {0: 1, 1: 1}]
    assert [step.new_tokens for step in chunks] == [{1: 101}, {0: 100, 1: 102}, {0: 101, 1: 103}]
    assert chunks[0].block_tables == {0: [2, 3, 4, 5], 1: [1]}, "the second token lies in the first block"
    assert chunks[1].block_tables == {0: [2, 3, 4, 5, 6, 7, 8], 1: [1, 9]}, "taken row by row"


def test_tiles_are_dealt_out_in_order_of_requests() -> None:
    engine = make(num_tiles=3, max_num_seqs=3)
    for arrival, (row, length) in enumerate([(3, 7), (0, 9), (1, 2)]):
        engine.submit(Request(arrival, [arrival] * length, length + 1), row=row)
    steps = run(engine)
    assert steps[0].admitted == {3: 0, 0: 0}, "the two want more tiles than there are"
    assert steps[0].num_new_tokens == {3: 7, 0: 4}
    assert steps[1].admitted == {1: 0}
    assert steps[1].num_new_tokens == {0: 5, 1: 2}


def test_nobody_is_admitted_beyond_the_tiles_or_the_rows_of_a_step() -> None:
    engine = make()
    for arrival, length in enumerate([5, 1, 1]):
        engine.submit(Request(arrival, [arrival] * length, length + 3), row=arrival)
    steps = run(engine)
    assert steps[0].admitted == {0: 0}, "its two tiles are all"
    assert steps[1].admitted == {1: 0}, "two may run together"
    assert steps[2].finished == {0: "length"}
    assert steps[3].admitted == {2: 0}


def test_tiles_are_counted_from_the_start_of_the_sequence_after_a_hit() -> None:
    engine = make(max_num_seqs=1, num_tiles=1)
    engine.submit(Request(0, list(range(10, 17)), 8), row=0)
    run(engine)
    engine.submit(Request(1, [*range(10, 16), 1, 2, 3, 4], 11), row=1)
    steps = run(engine)
    assert steps[0].admitted == {1: 3}, "6 tokens"
    assert steps[0].block_tables[1][:3] == [1, 2, 3]
    assert [step.num_new_tokens[1] for step in steps] == [2, 2], "positions 6 and 7 end a tile; then 8 and 9"


def test_a_hit_leaves_a_token_to_compute() -> None:
    engine = make()
    engine.submit(Request(0, [1, 2, 3, 4], 5), row=0)
    run(engine)
    engine.submit(Request(1, [1, 2, 3, 4], 5), row=0)
    engine.submit(Request(2, [1, 2, 3, 4, 5], 6), row=1)
    step = engine.step()
    assert step.admitted == {0: 1, 1: 2}
    assert step.num_new_tokens == {0: 2, 1: 1}


def test_salts_and_switched_off_caching_share_nothing() -> None:
    for options, salt in (({}, 1), ({"prefix_caching": False}, 0)):
        engine = make(**options)
        engine.submit(Request(0, [1, 2, 3], 4), row=0)
        run(engine)
        engine.submit(Request(1, [1, 2, 3], 4, salt=salt), row=1)
        assert engine.step().admitted == {1: 0}


def test_hits_are_pinned_before_anything_is_taken() -> None:
    """The first request's blocks are next to be taken; the second hits them, and takes others."""
    engine = make(num_blocks=5, max_num_seqs=1)
    engine.submit(Request(0, [1, 2, 3, 4], 5), row=0)
    run(engine)
    engine.submit(Request(1, [7, 8, 9], 4), row=0)  # takes 3 and 4
    assert run(engine)[-1].free_block_ids == [2, 1, 4, 3]
    engine.submit(Request(2, [1, 2, 3, 4, 5, 6], 7), row=0)
    step = engine.step()
    assert step.admitted == {0: 2}
    assert step.free_block_ids == [3, 4, 2, 1], "it ran on 1, 2 and 4"


def test_of_several_blocks_with_the_same_content_the_oldest_is_found() -> None:
    engine = make(max_num_seqs=3, num_tiles=3, num_blocks=12)
    for arrival in range(3):  # too short to wait for
        engine.submit(Request(arrival, [1, 2, 9], 5), row=2 - arrival)
    assert engine.step().block_tables == {0: [1, 2], 1: [3, 4], 2: [5, 6]}, "all computed, in row order"
    run(engine)
    assert lookup(engine, [1, 2, 3]) == [1]
    engine.pool.evict_blocks([1])
    assert lookup(engine, [1, 2, 3]) == [3], "the oldest that is left"
    engine.pool.evict_blocks([3, 5])
    assert lookup(engine, [1, 2, 3]) == []


def lookup(engine: Engine, prompt: list[int]) -> list[int]:
    """The blocks that a request would hit, without running it."""
    _, blocks = engine._lookup(Row(0, Request(0, prompt, 99), prompt))
    return ids(blocks)


def test_children_of_an_evicted_block_are_not_found_though_its_content_returns() -> None:
    engine = make(max_num_seqs=1)
    engine.submit(Request(0, [1, 2, 3, 4, 5], 6), row=0)
    run(engine)
    assert lookup(engine, [1, 2, 3, 4, 5]) == [1, 2]
    engine.pool.evict_blocks([1])
    assert lookup(engine, [1, 2, 3, 4, 5]) == []
    engine.submit(Request(1, [1, 2, 6], 4), row=0)
    run(engine)
    assert lookup(engine, [1, 2, 3, 4, 5]) == [4], "the new parent has no children yet"
    engine.submit(Request(2, [1, 2, 3, 4, 5], 6), row=0)
    step = engine.step()
    assert step.admitted == {0: 1}
    assert lookup(engine, [1, 2, 3, 4, 5]) == [4, 6]


def test_the_second_of_two_equal_prompts_waits_for_the_first_and_shares_it() -> None:
    engine = make(num_tiles=6, max_num_seqs=3)
    prompt = list(range(1, 14))
    engine.submit(Request(0, prompt, 14), row=0)
    engine.submit(Request(1, prompt, 14), row=1)
    engine.submit(Request(2, [50], 2), row=2)
    assert engine.step().admitted == {0: 0}, "two tiles are left, and nobody overtakes"
    step = engine.step()
    assert step.admitted == {1: 6, 2: 0}
    assert step.num_new_tokens == {1: 1, 2: 1}


def test_less_than_a_tile_is_not_worth_waiting_for() -> None:
    engine = make(num_tiles=3)
    prompt = [1, 2, 3, 4, 5]
    engine.submit(Request(0, [*prompt, 7, 7, 7], 9), row=0)
    engine.submit(Request(1, prompt, 6), row=1)
    assert engine.step().admitted == {0: 0}, "two blocks, a tile, would be shared"
    assert engine.step().admitted == {1: 2}
    engine = make(num_tiles=3)
    engine.submit(Request(0, [1, 2, 3, 8, 5, 6, 7, 8], 9), row=0)
    engine.submit(Request(1, prompt, 6), row=1)
    assert engine.step().admitted == {0: 0, 1: 0}, "one block would be shared"
    engine = make(num_tiles=3)
    engine.submit(Request(0, [*prompt, 7, 7, 7], 9, salt=1), row=0)
    engine.submit(Request(1, prompt, 6), row=1)
    assert engine.step().admitted == {0: 0, 1: 0}, "salts differ"
    engine = make(num_tiles=3)
    engine.submit(Request(0, [*prompt, 7, 7, 7], 9), row=0)
    engine.submit(Request(1, prompt[:4], 6), row=1)
    assert engine.step().admitted == {0: 0, 1: 0}, "of its four tokens three could be found"


def test_an_answer_is_found_by_its_like_only() -> None:
    """A later prompt that contains it does not, for its own would be computed in another shape."""
    for reuse, num_hits in ((False, 1), (True, 3)):
        engine = make(reuse_answers=reuse)
        engine.submit(Request(0, [1, 2, 3], 8), row=0)
        run(engine)
        assert tokens(engine, 0) == [1, 2, 3, 100, 101, 102, 103, 104]
        engine.submit(Request(1, [1, 2, 3, 100, 101, 102, 103], 9), row=0)
        assert engine.step().admitted == {0: num_hits}


def test_the_watermark_and_a_block_for_each_running_row_stay_free() -> None:
    def admitted_with(num_blocks: int, **options: Any) -> dict[int, int]:
        engine = make(num_blocks=num_blocks, **options)
        engine.submit(Request(0, [1, 2, 3, 4], 5), row=0)
        engine.submit(Request(1, [7], 5), row=1)
        return engine.step().admitted

    # The first needs 2 blocks, the second 1, and there is the null block.
    assert admitted_with(4) == {0: 0}
    assert admitted_with(5) == {0: 0, 1: 0}, "and one for the row that runs"
    assert admitted_with(6, watermark_blocks=2) == {0: 0}
    assert admitted_with(7, watermark_blocks=2) == {0: 0, 1: 0}
    assert admitted_with(4, watermark_blocks=9) == {0: 0}, "alone it may have them all"


def test_the_last_in_order_gives_way_and_is_computed_again() -> None:
    engine = make(num_blocks=6)  # 5 to give out
    engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
    engine.submit(Request(1, [7], 8), row=0)
    first = engine.step()
    assert first.block_tables == {0: [1], 1: [2, 3]}
    engine.step()
    assert engine.step().block_tables == {0: [1, 5], 1: [2, 3, 4]}, "positions 4, 5; 0 to 2"
    assert computed(engine) == [3, 6, 0, 0]
    preempting = engine.step()
    assert preempting.preempted == {0: "recompute"}, "row 1 needs a fourth block"
    assert preempting.block_tables == {1: [2, 3, 4, 5]}, "the freed one that lay longest: the last first"
    assert preempting.admitted == {}
    assert phases(engine)[0] == "waiting"
    assert tokens(engine, 0) == [7, 100, 101, 102]
    again = engine.step()
    assert again.admitted == {}, "2 blocks and one for row 1 are wanted, one is free"
    assert again.finished == {1: "length"}
    replay = [engine.step() for _ in range(3)]
    assert replay[0].admitted == {0: 1}, "its first block is still there: the prompt, and an answer token"
    assert [step.num_new_tokens for step in replay] == [{0: 1}] * 3
    assert [step.new_tokens for step in replay] == [{}, {0: 103}, {0: 104}]
    assert tokens(engine, 0) == [7, 100, 101, 102, 103, 104]


def test_as_many_give_way_as_it_takes() -> None:
    engine = make(max_num_seqs=8, num_rows=8, num_tiles=8, block_size=1, num_blocks=16, prefix_caching=False)
    for arrival in range(8):
        engine.submit(Request(arrival, [arrival], 12), row=arrival)
    steps = [engine.step() for _ in range(3)]
    assert len(steps[0].admitted) == 8, "1 block for each, and 7 for those that run"
    assert steps[1].preempted == {7: "recompute"}, "8 wanted, 7 free; then 7 and 8"
    assert steps[2].preempted == {6: "recompute", 5: "recompute"}, "7 wanted, 1 free; 6 and 3; 5 and 5"
    assert steps[2].free_block_ids == []
    assert {len(tokens(engine, row)) for row in range(5)} == {4}
    run(engine)


def test_known_answer_tokens_are_computed_one_a_step() -> None:
    """As above, without caching: the prompt in a tile, then the answer, as the first time."""
    engine = make(num_blocks=6, prefix_caching=False)
    engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
    engine.submit(Request(1, [7], 8), row=0)
    run_until_finished(engine, 1)
    assert tokens(engine, 0) == [7, 100, 101, 102]
    replay = run(engine)
    assert replay[0].admitted == {0: 0}
    assert [step.num_new_tokens for step in replay] == [{0: 1}] * 7
    assert [step.new_tokens for step in replay[:4]] == [{}, {}, {}, {0: 103}]
    row = engine.rows[0]
    assert row is not None
    assert row.num_preemptions == 1


def run_until_finished(engine: Engine, row: int) -> None:
    while phases(engine)[row] != "finished":
        engine.step()


def test_swapped_rows_come_back_as_they_were() -> None:
    engine = make(num_blocks=6, num_host_blocks=3, preemption_mode="swap")
    engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
    engine.submit(Request(1, [7], 8), row=0)
    for _ in range(3):
        engine.step()
    preempting = engine.step()
    assert preempting.preempted == {0: "swap"}
    assert preempting.copies_out == [(1, 1), (5, 2)]
    assert preempting.host_block_tables == {0: [1, 2]}
    assert preempting.free_host_block_ids == []
    assert (phases(engine)[0], computed(engine)[0]) == ("swapped", 3)
    assert engine.step().admitted == {}, "2 blocks and one for row 1 are wanted, one is free"
    back = engine.step()
    assert back.admitted == {0: 0}
    assert back.copies_in == [(1, 1), (2, 5)], "the first of 1, 5, 4, 3, 2, as they were freed"
    assert back.new_tokens == {0: 103}, "nothing is computed twice"
    assert back.free_host_block_ids == [2, 1]


def test_without_room_on_the_host_a_row_is_computed_again() -> None:
    for num_host_blocks, mode in ((3, "swap"), (2, "recompute"), (1, "recompute"), (0, "recompute")):
        engine = make(num_blocks=6, num_host_blocks=num_host_blocks, preemption_mode="swap")
        engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
        engine.submit(Request(1, [7], 8), row=0)
        assert [step.preempted for step in run(engine) if step.preempted] == [{0: mode}]
        assert tokens(engine, 0) == [7, *range(100, 107)]


def test_priority_comes_before_arrival() -> None:
    engine = make(max_num_seqs=1)
    for arrival, priority in enumerate([5, 5, -1, 5]):
        engine.submit(Request(arrival, [arrival], 2, priority=priority), row=arrival)
    assert [list(step.finished) for step in run(engine)] == [[2], [0], [1], [3]]


def test_the_lower_priority_gives_way_though_it_came_first() -> None:
    engine = make(num_blocks=6)
    engine.submit(Request(0, [7], 8, priority=1), row=0)
    engine.submit(Request(1, [1, 2, 3, 4], 9), row=1)
    assert [step.preempted for step in run(engine) if step.preempted] == [{0: "recompute"}]


def test_a_stop_token_belongs_to_the_answer() -> None:
    engine = make()
    engine.submit(Request(0, [1], 9, stop_token_ids=[102, 100]), row=0)
    engine.submit(Request(1, [2], 5, stop_token_ids=[103]), row=1)
    steps = run(engine)
    assert steps[0].finished == {0: "stop"}
    assert tokens(engine, 0) == [1, 100]
    assert steps[3].finished == {1: "stop"}, "a stop token at full length"


def test_finished_rows_are_freed_in_row_order() -> None:
    engine = make(num_blocks=8)
    engine.submit(Request(0, [1, 2, 3], 4), row=3)
    engine.submit(Request(1, [4, 5, 6, 7], 5), row=1)
    step = engine.step()
    assert step.finished == {1: "length", 3: "length"}
    assert step.free_block_ids == [5, 6, 7, 2, 1, 4, 3]


def test_an_aborted_request_leaves_nothing_behind() -> None:
    engine = make(num_blocks=6, num_host_blocks=3, preemption_mode="swap")
    engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
    engine.submit(Request(1, [7], 8), row=0)
    engine.submit(Request(2, [8], 9), row=2)
    engine.abort(2)
    assert phases(engine) == ["waiting", "waiting", "finished", None]
    for _ in range(4):
        engine.step()
    assert phases(engine)[:2] == ["swapped", "running"]
    engine.abort(1)
    check(engine)
    assert engine.host_pool.get_num_free_blocks() == 2
    engine.abort(0)
    check(engine)
    assert engine.step().free_block_ids == [1, 5, 4, 3, 2], "1 was free, the others were the row's"
    assert phases(engine)[:2] == ["finished", "finished"]
    row = engine.rows[1]
    assert row is not None
    assert (row.finish_reason, row.tokens) == ("abort", [1, 2, 3, 4, 100, 101, 102, 103])
    engine.abort(0)
    engine.abort(99)
    assert row.finish_reason == "abort"


def test_an_abort_in_the_middle_of_a_prompt_and_of_a_deferral() -> None:
    engine = make()
    prompt = list(range(1, 14))
    engine.submit(Request(0, prompt, 14), row=0)
    engine.submit(Request(1, prompt, 14), row=1)
    engine.step()
    engine.abort(0)
    step = engine.step()
    assert step.admitted == {1: 4}, "what was computed in time is found"
    assert step.num_new_tokens == {1: 5}
    check(engine)


def test_an_aborted_row_cannot_finish_again() -> None:
    engine = make()
    engine.submit(Request(0, [1], 2), row=0)
    run(engine)
    engine.abort(0)
    row = engine.rows[0]
    assert row is not None
    assert row.finish_reason == "length"


def test_blocks_that_leave_the_window_are_freed() -> None:
    engine = make(sliding_window=3, num_tiles=1, num_blocks=6)
    engine.submit(Request(0, list(range(1, 10)), 12), row=0)
    steps = run(engine)
    assert [step.block_tables.get(0) for step in steps[:3]] == [
        [0, 2],  # 4 computed; position 4 attends to 2, 3 and itself
        [0, 0, 0, 4],
        [0, 0, 0, 4, 5],  # 9: attends to 7, 8, 9
    ]
    assert steps[0].free_block_ids == [3, 4, 5, 1]
    assert steps[1].free_block_ids == [5, 1, 3, 2]


def test_with_a_window_a_request_may_be_longer_than_the_pool() -> None:
    sizes = {"sliding_window": 3, "num_tiles": 1, "max_num_seqs": 1}
    request = Request(0, list(range(1, 20)), 24)
    engine = make(num_blocks=5, **sizes)  # 2 tokens and a tile: 3 blocks, and one as they may lie across
    engine.submit(request, row=0)
    run(engine)
    assert len(tokens(engine, 0)) == 24
    with pytest.raises(ValueError, match="needs 4 blocks"):
        make(num_blocks=4, **sizes).submit(request, row=0)


def test_hits_beyond_the_window_are_let_go_at_once() -> None:
    """Were all four hits held, the row would find no fifth block, for ever."""
    engine = make(num_blocks=5, sliding_window=3, num_tiles=1, max_num_seqs=1)
    engine.submit(Request(0, list(range(1, 9)), 9), row=0)
    run(engine)
    assert lookup(engine, list(range(1, 10))) == [1, 2, 3, 4]
    engine.submit(Request(1, list(range(1, 12)), 12), row=0)
    step = engine.step()
    assert step.admitted == {0: 4}
    assert step.num_new_tokens == {0: 3}
    run(engine)


def test_in_a_window_a_swapped_row_needs_room_for_its_next_tiles_too() -> None:
    engine = make(
        block_size=1,
        num_tiles=1,
        sliding_window=8,  # so a row may hold 7 + 4 + 1 blocks
        num_blocks=16,
        max_blocks_per_seq=40,
        num_host_blocks=9,
        preemption_mode="swap",
    )
    engine.submit(Request(0, [1], 12), row=0)
    engine.submit(Request(1, [2] * 40, 41), row=1)
    steps = [engine.step() for _ in range(6)]
    assert steps[1].admitted == {1: 0}, "12 blocks, 1 for row 0, and another as it runs: 14 are free"
    assert steps[4].preempted == {1: "swap"}, "it holds 7 and row 0 holds 4: 5 wanted, 4 free"
    assert computed(engine)[:2] == [6, 12]
    assert len(steps[4].host_block_tables[1]) == 12
    assert len(steps[4].copies_out) == 7
    assert len(steps[4].free_block_ids) == 10
    assert steps[5].admitted == {}, "10 are enough for the 7, but not for 4 more"
    assert run(engine)[-1].finished == {1: "length"}


def test_what_cannot_be_served_is_refused_at_the_door() -> None:
    engine = make(num_blocks=4, max_blocks_per_seq=2)
    for request, message in (
        (Request(0, [], 2), "len.* must be in"),
        (Request(0, [1, 2], 2), "len.* must be in"),
        (Request(0, [1, 2], 6), "max_blocks_per_seq"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request, row=0)
    engine.submit(Request(0, [1, 2], 5), row=0)
    with pytest.raises(ValueError, match="row=0 must be empty or finished"):
        engine.submit(Request(1, [1], 2), row=0)
    with pytest.raises(ValueError, match="arrival=0 must be higher"):
        engine.submit(Request(0, [1], 2), row=1)
    with pytest.raises(ValueError, match="needs 4 blocks"):
        make(num_blocks=4).submit(Request(0, [1, 2, 3, 4, 5, 6, 7], 8), row=0)


def test_the_answers_are_the_models_own() -> None:
    """Chunks, hits, preemptions and all, over a real model."""
    rng = np.random.default_rng(0)
    rope = SimpleNamespace(theta=10000.0, dim=4, scaling=None)
    config = SimpleNamespace(
        layers=(SimpleNamespace(rope=rope, sliding_window=None),),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_model_len=64,
        tie_word_embeddings=False,
        embedding_scale=1.0,
        embedding_norm=False,
        num_positions=None,
        norm="rms",
        norm_eps=1e-5,
        norm_offset=0.0,
        norm_place="before",
        parallel=False,
        shared_norm=False,
        residual_scale=1.0,
        qk_norm=None,
        norm_after_rope=False,
        qkv_clip=None,
        scale=0.5,
        attention_soft_cap=None,
        alibi_slopes=None,
        sinks=False,
        activation="silu",
        gated=True,
        experts=None,
        logit_divisor=1.0,
        logit_soft_cap=None,
    )
    shapes = {
        "embedding": (23, 8),
        "lm_head": (23, 8),
        "norm": (8,),
        "layers.0.attention_norm": (8,),
        "layers.0.mlp_norm": (8,),
        "layers.0.qkv": (16, 8),
        "layers.0.o": (8, 8),
        "layers.0.gate_up": (12, 8),
        "layers.0.down": (8, 6),
    }
    weights = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    engine = make(greedy(config, weights), num_blocks=12, max_num_seqs=3)
    prompts = [rng.integers(0, 23, length).tolist() for length in (7, 3, 10)]
    for arrival, prompt in enumerate(prompts):
        engine.submit(Request(arrival, prompt, len(prompt) + 8), row=arrival)
    steps = run(engine)
    assert any(step.preempted for step in steps)
    for row, prompt in enumerate(prompts):
        assert tokens(engine, row) == prompt + model.generate(config, weights, prompt, 8)
        assert len(set(tokens(engine, row)[len(prompt) :])) > 2, "an answer worth comparing"


# Random workloads: nothing is foreseen but that they end, in time, with the right tokens.


def scramble(tokens: list[int]) -> int:
    """An answer out of the same few tokens as the prompts, so that it can be mistaken for one."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % 3


def alone(request: Request) -> list[int]:
    tokens = list(request.prompt)
    while len(tokens) < request.max_num_tokens:
        tokens.append(scramble(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens


def work(request: Request, tile_len: int) -> int:
    """Steps that a request takes at most while it is the first."""
    prompt_len = len(request.prompt)
    return cdiv(prompt_len, tile_len) + request.max_num_tokens - prompt_len - 1


COMMON = [0, 1, 2, 2, 0, 1, 0, 0, 2, 1, 1, 2]


@dataclasses.dataclass(frozen=True)
class Event:
    """A request, and how many steps follow before the next; perhaps the abort of another one then."""

    prompt: list[int]
    max_new_tokens: int
    stops: bool
    priority: int
    salt: int
    num_steps: int
    aborts: int | None


prompts = st.builds(
    lambda shared, own: (COMMON[:shared] + own) or [0],
    st.integers(0, len(COMMON)),
    st.lists(st.integers(0, 2), max_size=4),
)
events = st.builds(
    Event,
    prompt=prompts,
    max_new_tokens=st.sampled_from([1, 3, 8, 12]),
    stops=st.sampled_from([False, False, False, True]),
    priority=st.integers(0, 2),
    salt=st.sampled_from([0, 0, 0, 1]),
    num_steps=st.sampled_from([0, 0, 1, 4]),
    aborts=st.sampled_from([None, None, None, 0, 2, 5]),
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Event]]:
    """Requests, and an engine whose pool is just large enough for the largest, or a little larger."""
    requests = draw(st.lists(events, min_size=3, max_size=9))
    longest = max(len(event.prompt) + event.max_new_tokens for event in requests) - 1
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 4, 4]))
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        num_rows=2 * max_num_seqs,
        num_tiles=draw(st.integers(1, 3)),
        tile_len=draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 3)),
        num_blocks=2,
        max_blocks_per_seq=longest,
        num_host_blocks=draw(st.sampled_from([0, 4, 9, 30])),
        sliding_window=draw(st.sampled_from([None, None, None, 1, 2, 5, 8])),
        watermark_blocks=draw(st.sampled_from([0, 0, 2])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        reuse_answers=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
    )
    num_blocks = 1 + Engine(config, scramble)._blocks_of(longest) + draw(st.sampled_from([0, 0, 1, 2, 5]))
    return dataclasses.replace(config, num_blocks=num_blocks), requests


class Workload:
    """An engine, and the host's view of it: what has been submitted, and until when it must be finished."""

    def __init__(self, config: EngineConfig, fcfs: bool) -> None:
        self.engine, self.fcfs = Engine(config, scramble), fcfs
        self.num_steps = 0
        self.deadlines: dict[int, int] = {}  # of requests by arrival

    def unfinished(self) -> list[Row]:
        """In order of requests."""
        rows = [row for row in self.engine.rows if row is not None and row.phase is not Phase.FINISHED]
        return sorted(rows, key=lambda row: row.request.order)

    def submit(self, request: Request) -> None:
        """As soon as there is a place."""
        rows = self.engine.rows
        while all(row is not None and row.phase is not Phase.FINISHED for row in rows):
            self.step()
        free = [i for i, row in enumerate(rows) if row is None or row.phase is Phase.FINISHED]
        self.engine.submit(request, free[-1])
        works = [work(row.request, self.engine.config.tile_len) for row in self.unfinished()]
        total = sum(works) if self.fcfs else sum(works) * len(works)
        self.deadlines[request.arrival] = self.num_steps + total
        if not self.fcfs:  # who comes may hold back all others
            for row in self.unfinished():
                self.deadlines[row.request.arrival] = self.num_steps + total

    def step(self) -> Step:
        engine, config = self.engine, self.engine.config
        before = {row.index: (row.computed, row.num_tokens) for row in self.unfinished()}
        step = engine.step()
        self.num_steps += 1
        check(engine)
        assert not (step.preempted and step.admitted)
        assert len(step.num_new_tokens) <= config.max_num_seqs
        assert step.num_new_tokens or not before, "somebody gets on"
        num_tiles = 0
        for index, num_new in step.num_new_tokens.items():
            row = engine.rows[index]
            assert row is not None
            start = step.admitted.get(index, 0) * config.block_size or before[index][0]
            if start < row.prompt_len:
                assert start + num_new <= row.prompt_len, "an answer token in a tile"
                num_tiles += cdiv(start + num_new, config.tile_len) - start // config.tile_len
                assert (start + num_new) % config.tile_len == 0 or start + num_new == row.prompt_len
            else:
                assert num_new == 1
            assert (index in step.new_tokens) == (start + num_new == before[index][1])
        assert num_tiles <= config.num_tiles
        for index in step.finished:
            row = engine.rows[index]
            assert row is not None
            assert row.tokens == alone(row.request)
            assert self.num_steps <= self.deadlines[row.request.arrival], f"{row.request} came too late"
        unfinished = self.unfinished()
        running = [row for row in unfinished if row.phase is Phase.RUNNING]
        assert not self.fcfs or running == unfinished[: len(running)], "somebody has been overtaken"
        for row in unfinished:
            assert self.num_steps < self.deadlines[row.request.arrival], f"{row.request} waits too long"
        return step


@pytest.mark.parametrize("fcfs", [True, False])
def test_all_requests_finish_in_time_with_the_tokens_they_have_alone(fcfs: bool) -> None:
    happened: set[str] = set()

    @settings(max_examples=250, deadline=None, derandomize=True, database=None)
    @given(workloads())
    def play(drawn: tuple[EngineConfig, list[Event]]) -> None:
        config, events = drawn
        workload = Workload(config, fcfs)
        steps = []
        for arrival, event in enumerate(events):
            workload.submit(
                Request(
                    arrival,
                    event.prompt,
                    len(event.prompt) + event.max_new_tokens,
                    stop_token_ids=[1] if event.stops else [],
                    priority=0 if fcfs else event.priority,
                    salt=event.salt,
                )
            )
            steps += [workload.step() for _ in range(event.num_steps)]
            if event.aborts is not None:
                workload.engine.abort(event.aborts)
                check(workload.engine)
        while workload.unfinished():
            steps.append(workload.step())
        assert workload.engine.pool.get_num_free_blocks() == config.num_blocks - 1
        for step in steps:
            happened.update(step.preempted.values())
            happened.update("hit" for num_hits in step.admitted.values() if num_hits)
            happened.update(step.finished.values())
            happened.update("back" for _ in step.copies_in)

    play()
    assert happened == {"recompute", "swap", "hit", "stop", "length", "back"}
