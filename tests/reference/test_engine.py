"""The engine's oracle: tiles, hits and preemption, worked out by hand."""

from typing import Any

from reference.engine import Engine
from reference.engine_state import Request, Step
from tests.reference.engines import computed, lookup, make, phases, run, tokens


def test_one_request_from_the_first_step_to_the_last() -> None:
    engine = make()
    engine.submit(Request(0, [1, 2, 3, 4, 5], 8), row=2)
    assert phases(engine) == [None, None, "waiting", None]
    first = engine.step()
    assert first.admitted == {2: 0}
    assert first.num_new_tokens == {2: 5}, "both its tiles"
    assert first.new_tokens == {2: [100]}
    assert first.block_tables == {2: [1, 2, 3]}, "block 0 is the null block"
    assert first.free_block_ids == list(range(4, 20))
    second = engine.step()
    assert (second.num_new_tokens, second.new_tokens) == ({2: 1}, {2: [101]})
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
    assert [step.new_tokens for step in chunks] == [{1: [101]}, {0: [100], 1: [102]}, {0: [101], 1: [103]}]
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
    assert [step.new_tokens for step in replay] == [{}, {0: [103]}, {0: [104]}]
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
    """The prompt is computed in a tile, then the answer token by token, as the first time."""
    engine = make(num_blocks=6, prefix_caching=False)
    engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
    engine.submit(Request(1, [7], 8), row=0)
    run_until_finished(engine, 1)
    assert tokens(engine, 0) == [7, 100, 101, 102]
    replay = run(engine)
    assert replay[0].admitted == {0: 0}
    assert [step.num_new_tokens for step in replay] == [{0: 1}] * 7
    assert [step.new_tokens for step in replay[:4]] == [{}, {}, {}, {0: [103]}]
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
    assert back.new_tokens == {0: [103]}, "nothing is computed twice"
    assert back.free_host_block_ids == [2, 1]


def test_without_room_on_the_host_a_row_is_computed_again() -> None:
    for num_host_blocks, mode in ((3, "swap"), (2, "recompute"), (1, "recompute"), (0, "recompute")):
        engine = make(num_blocks=6, num_host_blocks=num_host_blocks, preemption_mode="swap")
        engine.submit(Request(0, [1, 2, 3, 4], 9), row=1)
        engine.submit(Request(1, [7], 8), row=0)
        assert [step.preempted for step in run(engine) if step.preempted] == [{0: mode}]
        assert tokens(engine, 0) == [7, *range(100, 107)]
