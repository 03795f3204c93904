"""A state goes into a file and comes back; what is stepped from there is what the engine did."""

import dataclasses
import itertools
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.research import replay
from jaxpaged.research.replay import __main__ as words
from jaxpaged.sampling import no_scores
from jaxpaged.status import Status
from jaxpaged.step.plan import Plan
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import EngineState, FinishReason, Phase, without_kv
from reference.engine_state import Request
from tests import tiny
from tests.replay.setting import MIDDLE, OPTIONS, SETTING, STEP_CONFIG, VOCAB_SIZE, assert_equal, line_of
from tests.step.lockstep import STOP, Event, LockStep, compiled_step
from tests.step.sum_model import VOCAB
from tests.tiny_gguf import write_gguf


@dataclasses.dataclass
class History:
    """A run of the compiled step beside the oracle, by a model that reads its cache: from its middle on."""

    states: list[EngineState]  # after each step, without K and V
    decisions: list
    dump: replay.Dump
    seen_later: dict[str, int]  # what happened after the middle


def history(path, *, stops: bool) -> History:
    rng = random.Random(4)
    beginnings = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    events = []
    for arrival in range(14):
        prompt = rng.choice(beginnings)[: rng.randrange(4, 25)]
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        max_num_tokens = len(prompt) + rng.randrange(2, 30)
        request = Request(arrival, tuple(prompt), max_num_tokens, (STOP,) if stops else ())
        events += [Event((request,)), *[Event()] * rng.randrange(0, 4)]
    events[MIDDLE + 2] = dataclasses.replace(events[MIDDLE + 2], abort=4)  # which is in a row
    lock, states, decisions, answers, late = LockStep(SETTING), [], [], {}, []
    while events or lock.unfinished:
        num_steps = len(states) - MIDDLE
        if num_steps == 0:
            middle, seen = lock.state, dict(lock.seen)
            late = [replay.Event(0, request=line_of(request)) for request in lock.queue]
        event = events.pop(0) if events else Event()
        if num_steps >= 0:
            late += [replay.Event(num_steps, request=line_of(request)) for request in event.requests]
            if event.abort is not None:
                late.append(replay.Event(num_steps, abort=event.abort))
        lock.happen(event)
        decisions.append(jax.device_get(compiled_step(SETTING)(lock.state)[1]))
        lock.step()
        states.append(jax.device_get(without_kv(lock.state)))
        rows = states[-1].rows
        for row in np.flatnonzero(rows.phase == Phase.FINISHED):
            answer = rows.token_ids[row, rows.prompt_lens[row] : rows.num_tokens[row]]
            answers[int(rows.arrival[row])] = answer.tolist()
    replay.dump(middle, path, step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE, events=late, answers=answers)
    seen_later = {name: count - seen[name] for name, count in lock.seen.items()}
    return History(states[MIDDLE:], decisions[MIDDLE:], replay.load(path), seen_later)


def without_scores(state: EngineState) -> EngineState:
    return dataclasses.replace(state, scores=no_scores(1))


@pytest.mark.slow
def test_a_replay_does_just_what_was_done(tmp_path):
    """The replay starts in the middle of a history, with its answers: all decisions and states are equal."""
    was = history(tmp_path / "dump", stops=True)
    assert was.seen_later["preempted"] > was.seen_later["swapped"] > 0
    assert was.seen_later["hits"] > 0
    reasons = np.concatenate([state.rows.finish_reason for state in was.states])
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} <= set(reasons.tolist())
    steps = list(replay.replay(was.dump))
    assert len(steps) == len(was.states)
    for step, decision, state in zip(steps, was.decisions, was.states, strict=True):
        assert_equal(step.decision, decision)
        assert_equal(without_scores(step.after), without_scores(state))
    for step, follower in itertools.pairwise(steps):
        assert follower.before is step.after
    text = "\n".join(line for i, step in enumerate(steps) for line in words.describe(i, step))
    assert text.count("preempted, swapped out") == was.seen_later["swapped"]
    assert "swapped in; decode +1; blocks " in text
    num_recomputed = was.seen_later["preempted"] - was.seen_later["swapped"]
    assert text.count("preempted, to be recomputed") == num_recomputed
    assert sum(map(int, re.findall(r"admitted, (\d+) blocks hit", text))) == was.seen_later["hits"]
    assert text.count("finished, ABORT") == 1
    assert "broken" not in text
    unanswered = dataclasses.replace(was.dump, answers={})
    assert len(list(replay.replay(unanswered))) > len(steps)  # who stopped goes on


@pytest.mark.nightly
def test_without_stop_tokens_it_needs_no_answers(tmp_path):
    was = history(tmp_path / "dump", stops=False)
    assert was.seen_later["preempted"] > 0
    steps = list(replay.replay(dataclasses.replace(was.dump, answers={})))
    assert len(steps) == len(was.states)
    for step, decision, state in zip(steps, was.decisions, was.states, strict=True):
        assert_equal(step.decision, decision)
        assert_equal(step.after.rows.phase, state.rows.phase)
        for got, want in ((step.after, state), (step.after.host, state.host)):
            assert_equal(got.tables.block_tables, want.tables.block_tables)
            assert_equal(got.tables.pool.free_queue, want.tables.pool.free_queue)


@pytest.mark.slow
def test_steps_in_which_nothing_is_to_do_count(tmp_path):
    """A request then comes when it came, however long the engine had waited for it."""
    event = replay.Event(3, request=line_of(Request(8, (1, 2, 3), 5)))
    replay.dump(
        SETTING.state(), tmp_path / "f", step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE, events=[event]
    )
    steps = list(replay.replay(replay.load(tmp_path / "f")))
    assert [int(step.decision.plan.num_new_tokens[0]) for step in steps] == [0, 0, 0, 3, 1]


PROMPTS = tiny.prompts([40, 34, 3, 3, 3, 3, 37])
PROMPTS[1][:21] = PROMPTS[0][:21]  # the second hits the first's


def filled_driver(**options) -> Driver:
    """Return a driver with seven requests, the last of which has no row; none has been computed."""
    driver = tiny.driver(**OPTIONS | options)
    for i, prompt in enumerate(PROMPTS):
        driver.add(tiny.request(driver, 1 + i, prompt, tiny.greedy(4 + i)))
    driver.fill_rows()
    return driver


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    return filled_driver()


def test_a_report_has_the_engine_and_its_queue(driver, tmp_path):
    before = jax.device_get(without_kv(driver.state))
    replay.report(driver, tmp_path / "report")
    dump = replay.load(tmp_path / "report")
    assert_equal(dump.state, before)
    assert_equal(jax.device_get(without_kv(driver.state)), before)
    assert (dump.step_config, dump.vocab_size) == (driver.step_config, tiny.CONFIG.vocab_size)
    assert dump.step_config == STEP_CONFIG, "the program is that of other tests"
    [event] = dump.events
    assert event.num_steps == 0
    assert event.request.arrival.tolist() == [7]
    assert event.request.token_ids.tolist() == [PROMPTS[6]]


@pytest.mark.nightly
def test_the_real_model_answers_where_nothing_was_computed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    small = {"max_num_batched_tokens": 3 + 32, "enable_prefix_caching": False}  # quick to compile
    replay.report(filled_driver(**small, preemption_mode="recompute", num_host_blocks=0), tmp_path / "report")
    model = str(write_gguf(tmp_path / "tiny.gguf"))
    steps = list(replay.replay(*replay.with_model(model, replay.load(tmp_path / "report"))))
    rows = steps[-1].after.rows
    assert sorted(rows.arrival.tolist()) == [2, 3, 4, 5, 6, 7]
    for row, request_id in enumerate(rows.arrival.tolist()):
        answer = rows.token_ids[row, rows.prompt_lens[row] : rows.num_tokens[row]].tolist()
        assert answer == tiny.reference_answer(tuple(PROMPTS[request_id - 1]), 3 + request_id)
    assert words.main([str(tmp_path / "report"), "--model", model]) == 0
    assert capsys.readouterr().out.count("\nstep ") == len(steps)


@pytest.mark.slow
def test_the_command_prints_each_step(driver, tmp_path, capsys):
    replay.report(driver, tmp_path / "report")
    assert words.main([str(tmp_path / "report"), "--steps", "7"]) == 0
    made_with, rest = capsys.readouterr().out.split("\n", 1)
    assert made_with.startswith("made with jaxpaged 0.1.0, jax 0.")
    assert rest == GOLDEN


@pytest.mark.parametrize("there_is", ["something computed", "something cached"])
def test_a_real_model_is_refused_where_k_and_v_would_be_missing(there_is, driver, tmp_path, capsys):
    shot = driver.snapshot()
    tables = shot.state.tables
    if there_is == "something computed":
        tables = dataclasses.replace(tables, seq_lens=tables.seq_lens + 1)
    else:
        cache = dataclasses.replace(tables.pool.prefix_cache, last=tables.pool.prefix_cache.last + 1)
        tables = dataclasses.replace(tables, pool=dataclasses.replace(tables.pool, prefix_cache=cache))
    state = dataclasses.replace(shot.state, tables=tables)
    replay.dump(state, tmp_path / "f", step_config=shot.step_config, vocab_size=shot.vocab_size)
    assert words.main([str(tmp_path / "f"), "--model", "no/matter"]) == 2
    assert "model: the state must have no computed tokens" in capsys.readouterr().err


def test_another_model_is_refused(driver, tmp_path, capsys):
    shot = driver.snapshot()
    replay.dump(shot.state, tmp_path / "f", step_config=shot.step_config, vocab_size=98)
    model = str(write_gguf(tmp_path / "tiny.gguf"))
    assert words.main([str(tmp_path / "f"), "--model", model]) == 2
    assert "must be the one that was served" in capsys.readouterr().err


def test_an_engine_is_reported_from_another_thread_and_after_its_death(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Driver, "compile", lambda self: None)

    def fail(self, max_steps=None):
        raise RuntimeError("no")

    with tiny.engine(**OPTIONS) as engine:
        thread = tiny.thread_of(engine)
        takers = []
        snapshot = Driver.snapshot
        monkeypatch.setattr(
            Driver, "snapshot", lambda self: (takers.append(threading.current_thread()), snapshot(self))[1]
        )
        replay.report(engine, tmp_path / "alive")
        assert takers == [thread]
        monkeypatch.setattr(Driver, "turn", fail)
        handle = engine.submit([5, 6, 7], tiny.greedy(3))
        with pytest.raises(EngineDeadError, match="no"):
            handle.result()
        assert "research.replay.report(engine, path)" in caplog.text
        replay.report(engine, tmp_path / "dead")
        assert takers == [thread, threading.current_thread()]
    dead = replay.load(tmp_path / "dead")
    assert_equal(dead.state, replay.load(tmp_path / "alive").state)
    assert dead.events[0].request.token_ids.tolist() == [[5, 6, 7]]


def test_who_asks_for_a_report_as_the_engine_stops_is_answered(monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    asked = threading.Event()

    def turn(self, max_steps=None):
        asked.wait()
        raise RuntimeError("no")

    monkeypatch.setattr(Driver, "turn", turn)
    with tiny.engine(**OPTIONS) as engine, ThreadPoolExecutor() as pool:
        engine.submit([5, 6, 7], tiny.greedy(3))
        shot = pool.submit(engine.snapshot)
        while not (engine._worker._questions or shot.done()):
            time.sleep(0.001)
        asked.set()
        assert [queued.request.request_id for queued in shot.result(timeout=20).queue] == [1]


def test_what_is_wrong_with_a_state_is_said():
    state = jax.device_get(without_kv(SETTING.state()))
    nobody = np.zeros(6, bool)
    none = np.zeros(6, int)
    nothing = Decision(Plan(none, none), nobody, none, nobody, nobody, leader_row=np.arange(6))
    tables = dataclasses.replace(state.tables, seq_lens=state.tables.seq_lens + 1)
    after = dataclasses.replace(state, tables=tables, status=np.int32(Status.DOUBLE_FREE))
    _, error, broken = words.describe(1, replay.Step(state, nothing, after, num_queued=0))
    assert error.startswith("  error: double free: ")
    assert broken.startswith("  broken: row 0 has 1 blocks, 0 of them out of its window, but names block 0")


GOLDEN = """\
6 rows of 112 tokens, 3 run together; blocks of 4 tokens; 17 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 1: WAITING; 40 prompt tokens, 40 in all; 0 computed
  row 1, request 2: WAITING; 34 prompt tokens, 34 in all; 0 computed
  row 2, request 3: WAITING; 3 prompt tokens, 3 in all; 0 computed
  row 3, request 4: WAITING; 3 prompt tokens, 3 in all; 0 computed
  row 4, request 5: WAITING; 3 prompt tokens, 3 in all; 0 computed
  row 5, request 6: WAITING; 3 prompt tokens, 3 in all; 0 computed
step 1: 1 ran, 6 wait; 7 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 1: admitted, 0 blocks hit; prompt +40; blocks 1-10
step 2: 2 ran, 5 wait; 2 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 1: decode +1; blocks 1-11
  row 1, request 2: admitted, 5 blocks hit; prompt +14; blocks 1-5 12-15
step 3: 2 ran, 5 wait; 2 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 1: decode +1
  row 1, request 2: decode +1
step 4: 2 ran, 5 wait; 8 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 1: decode +1; finished, LENGTH; blocks none
  row 1, request 2: decode +1
step 5: 3 ran, 3 wait; 5 of 17 blocks free; 14 of 14 host blocks free
  row 0, request 7: submitted, 37 prompt tokens
  row 1, request 2: decode +1; blocks 1-5 12-16
  row 2, request 3: admitted, 0 blocks hit; prompt +3; blocks 17
  row 3, request 4: admitted, 0 blocks hit; prompt +3; blocks 11
step 6: 3 ran, 3 wait; 15 of 17 blocks free; 14 of 14 host blocks free
  row 1, request 2: decode +1; finished, LENGTH; blocks none
  row 2, request 3: decode +1
  row 3, request 4: decode +1
step 7: 3 ran, 2 wait; 12 of 17 blocks free; 14 of 14 host blocks free
  row 2, request 3: decode +1; blocks 17 10
  row 3, request 4: decode +1; blocks 11 9
  row 4, request 5: admitted, 0 blocks hit; prompt +3; blocks 8
"""
