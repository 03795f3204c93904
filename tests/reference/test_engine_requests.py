"""The engine's oracle: priorities, ends, aborts, windows and the answers."""

from types import SimpleNamespace

import numpy as np
import pytest

from reference import model
from reference.engine import greedy
from reference.engine_state import Reach, Request
from tests.reference.engines import check, computed, lookup, make, phases, run, tokens


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
    engine = make(reaches=(Reach(window=3),), num_tiles=1, num_blocks=6)
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
    sizes = {"reaches": (Reach(window=3),), "num_tiles": 1, "max_num_seqs": 1}
    request = Request(0, list(range(1, 20)), 24)
    engine = make(num_blocks=5, **sizes)  # 2 tokens and a tile: 3 blocks, and one as they may lie across
    engine.submit(request, row=0)
    run(engine)
    assert len(tokens(engine, 0)) == 24
    with pytest.raises(ValueError, match="needs 4 blocks"):
        make(num_blocks=4, **sizes).submit(request, row=0)


def test_hits_beyond_the_window_are_let_go_at_once() -> None:
    """Were all four hits held, the row would find no fifth block, for ever."""
    engine = make(num_blocks=5, reaches=(Reach(window=3),), num_tiles=1, max_num_seqs=1)
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
        reaches=(Reach(window=8),),  # so a row may hold 7 + 4 + 1 blocks
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
        layers=(
            SimpleNamespace(
                rope=rope,
                sliding_window=None,
                attention_chunk=None,
                temperature=None,
                shares_kv=None,
                attends=True,
                has_state=False,
                feeds=True,
                norm_place=None,
                sparsity=0.0,
                head_dim=None,
                own=None,
            ),
        ),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_model_len=64,
        tie_word_embeddings=False,
        embedding_scale=1.0,
        embedding_norm=False,
        altup=None,
        layer_inputs=None,
        layer_scale=False,
        v_norm=False,
        value_scale=1.0,
        output_gate=None,
        num_positions=None,
        norm="rms",
        norm_eps=1e-5,
        norm_offset=0.0,
        norm_place="before",
        factors=SimpleNamespace(
            attention_in=1.0,
            attention_out=1.0,
            gate=1.0,
            down=1.0,
            attention_residual=1.0,
            mixer_residual=1.0,
            mlp_residual=1.0,
        ),
        normed_residual=False,
        parallel=False,
        shared_norm=False,
        residual_scale=1.0,
        qk_norm=None,
        norm_after_rope=False,
        qkv_clip=None,
        scale=0.5,
        attention_soft_cap=None,
        alibi_slopes=None,
        latent=None,
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
