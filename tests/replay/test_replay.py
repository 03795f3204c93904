"""A state goes into a file and comes back; what is stepped from there is what the engine did."""

import dataclasses
import io
import itertools
import json
import random
import re
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxpaged import replay, untrusted
from jaxpaged.checks import InputError
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.memory.policies import LRU_SPLIT
from jaxpaged.memory.prefix_cache import hash_block
from jaxpaged.replay import __main__ as words
from jaxpaged.sampling import no_scores
from jaxpaged.sampling_state import token_bits
from jaxpaged.status import Status
from jaxpaged.step.plan import Plan
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import EngineState, FinishReason, Phase, empty_rows, without_kv
from reference.engine_state import Request
from tests import tiny
from tests.step.lockstep import MAX_MODEL_LEN, STOP, VOCAB, Event, LockStep, Setting, compiled_step
from tests.tiny_gguf import write_gguf

# Preempts, by swap and, where the host pool is full, to be recomputed. The same as in `test_scheduler.py`.
SETTING = Setting("swap", num_blocks=1 + 17, num_host_blocks=1 + 14)
STEP_CONFIG = SETTING.config
MIDDLE = 14
VOCAB_SIZE = tiny.CONFIG.vocab_size  # no less than the history's own; so all dumps have one
# The driver's options for just the same step over a state of the same sizes: all is compiled once.
OPTIONS = {
    "attention": SETTING.config.attention,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 3 + 3 * 32,
    "block_size": 4,
    "num_blocks": 18,
    "preemption_mode": "swap",
    "num_host_blocks": 15,
    "max_model_len": "auto",  # as the cache has room for less than the model's length
    "model_config": dataclasses.replace(tiny.CONFIG, max_model_len=MAX_MODEL_LEN),
}


def line_of(request: Request):
    """The request as the engine takes it."""
    line = empty_rows(1, MAX_MODEL_LEN, VOCAB_SIZE)
    for array, value in (
        (line.phase, Phase.WAITING),
        (line.arrival, request.arrival),
        (line.prompt_lens, len(request.prompt)),
        (line.num_tokens, len(request.prompt)),
        (line.max_num_tokens, request.max_num_tokens),
    ):
        array[0] = value
    line.token_ids[0, : len(request.prompt)] = request.prompt
    line.rules.stop_tokens[0] = token_bits(request.stop_token_ids, VOCAB_SIZE)
    return line


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


def assert_equal(got, want) -> None:
    """Leaf by leaf, types too; of K and V shapes and types are all there is."""
    jax.tree.map(lambda a, b: None, got, want)  # the same structure
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if not isinstance(b, jax.ShapeDtypeStruct):
            np.testing.assert_array_equal(a, b, err_msg=str(path))


def without_scores(state: EngineState) -> EngineState:
    return dataclasses.replace(state, scores=no_scores(1))


@pytest.mark.slow
def test_a_replay_does_just_what_was_done(tmp_path):
    """From the middle of a history, with its answers: every decision, and every number of every state."""
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


@pytest.mark.slow
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


def test_steps_in_which_nothing_is_to_do_count(tmp_path):
    """So that a request comes when it came, however long the engine had waited for it."""
    event = replay.Event(3, request=line_of(Request(8, (1, 2, 3), 5)))
    replay.dump(
        SETTING.state(), tmp_path / "f", step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE, events=[event]
    )
    steps = list(replay.replay(replay.load(tmp_path / "f")))
    assert [int(step.decision.plan.num_new_tokens[0]) for step in steps] == [0, 0, 0, 3, 1]


@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        Setting(
            "window",
            num_blocks=20,
            block_size=3,
            sliding_window=10,
            reuse_answers=True,
            watermark_blocks=2,
            policy=LRU_SPLIT,
        ),
        Setting("no caching", num_blocks=9, prefix_caching=False),
    ],
    ids=lambda setting: setting.name,
)
def test_a_dump_comes_back_leaf_by_leaf(setting, tmp_path):
    state = setting.state()
    leaves, form = jax.tree.flatten(without_kv(state))
    rng = np.random.default_rng(0)
    noise = [
        leaf if isinstance(leaf, jax.ShapeDtypeStruct) else rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
        for leaf in leaves
    ]
    state = jax.tree.unflatten(form, noise)
    events = [
        replay.Event(0, request=line_of(Request(8, (1, 2, 3), 9, (5, 6)))),
        replay.Event(0, abort=3),
        replay.Event(4, request=line_of(Request(9, (4,), 2)), abort=8),
    ]
    config = dataclasses.replace(setting.config, attention="mosaic_gpu")
    replay.dump(
        state, tmp_path / "f", step_config=config, vocab_size=VOCAB_SIZE, events=events, answers={8: [5, 6]}
    )
    dump = replay.load(tmp_path / "f")
    assert_equal(dump.state, state)
    assert (dump.step_config, dump.vocab_size, dump.answers) == (config, VOCAB_SIZE, {8: [5, 6]})
    for got, want in zip(dump.events, events, strict=True):
        assert (got.num_steps, got.abort) == (want.num_steps, want.abort)
        assert (got.request is None) == (want.request is None)
        if want.request is not None:  # the tokens alone come back, not the places left over
            length = int(want.request.num_tokens[0])
            assert_equal(
                got.request, dataclasses.replace(want.request, token_ids=want.request.token_ids[:, :length])
            )


def test_a_hash_function_of_ones_own_is_refused(tmp_path):
    state = SETTING.state()
    cache = dataclasses.replace(state.tables.pool.prefix_cache, hash_fn=lambda *args: hash_block(*args))
    pool = dataclasses.replace(state.tables.pool, prefix_cache=cache)
    state = dataclasses.replace(state, tables=dataclasses.replace(state.tables, pool=pool))
    with pytest.raises(InputError, match="hash_fn=.* must be prefix_cache.hash_block"):
        replay.dump(state, tmp_path / "f", step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The bytes of a dump."""
    path = tmp_path_factory.mktemp("replay") / "dump"
    replay.dump(SETTING.state(), path, step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE)
    return path.read_bytes()


def rewritten(file: bytes, **entries: np.ndarray | None) -> bytes:
    """The dump with entries replaced, or left out where None."""
    arrays = dict(np.load(io.BytesIO(file))) | {
        name.replace("__", "."): value for name, value in entries.items()
    }
    out = io.BytesIO()
    np.savez(out, **{name: value for name, value in arrays.items() if value is not None})
    return out.getvalue()


def with_header(file: bytes, *keys: str, value: object) -> bytes:
    """The dump with one value of its header replaced."""
    header = json.loads(str(np.load(io.BytesIO(file))["header"]))
    part = header
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return rewritten(file, header=np.array(json.dumps(header)))


def with_array_header(file: bytes, header: str) -> bytes:
    """The dump, its status with another header of an .npy file."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename == "state.status.npy":
                data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
            new.writestr(member.filename, data)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: b"", "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: b"a line of text", "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: saved(np.arange(3)), "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: saved(np.array([{}])), "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: file[: len(file) // 2], "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: file[:-1], "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: rewritten(file, header=None), "must be a file that jaxpaged.replay wrote, undamaged"),
        (lambda file: rewritten(file, header=np.array("{}")), "must be a file that jaxpaged.replay wrote"),
        (lambda file: rewritten(file, state__rows__phase=None), "must be a file that jaxpaged.replay wrote"),
        (lambda file: rewritten(file, state__status=np.zeros(2, np.int32)), "must be a file that jaxpaged"),
        (lambda file: rewritten(file, state__status=np.zeros((), np.int64)), "must be a file that jaxpaged"),
        (lambda file: rewritten(file, header=np.array("[" * 10**6)), "JSON must have at most 32 lists"),
        (lambda file: with_header(file, "sizes", "num_rows", value=10**12), "num_rows, max_model_len="),
        (lambda file: with_header(file, "vocab_size", value=10**12), "vocab_size=1000000000000 must be"),
        (lambda file: with_header(file, "num_requests", value=10**9), "must be a file that jaxpaged"),
        (lambda file: with_header(file, "kv", "dtype", value="m8[s/0]"), "dtype='m8[s/0]' must be one of"),
        (
            lambda file: with_header(file, "kv", "layout", "kv_layout", value="evil_layout:Layout"),
            "its layout 'evil_layout:Layout' is not one of ours: name it with --layout",
        ),
        (
            lambda f: with_array_header(f, "{'descr': 'm8[s/0]', 'fortran_order': False, 'shape': ()}"),
            "an array's type is 'm8[s/0]', must be a number or text",
        ),
        (
            lambda f: with_array_header(f, "{'descr': '<i8', 'fortran_order': False, 'shape': (10**15,)}"),
            "must be a file that jaxpaged.replay wrote|the archive cannot be read",
        ),
        (
            lambda f: with_array_header(f, "{'descr': '<i8', 'fortran_order': False, 'shape': (2000, 2000)}"),
            "does not have 8 bytes",
        ),
        (
            lambda file: rewritten(file, header=np.array('{"version": 1}')),
            "version=1 must be 5, the one that this jaxpaged reads",
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(change, message, file, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(change(file))
    with pytest.raises(InputError) as error:
        replay.load(path)
    assert any(each in str(error.value) for each in message.split("|")), str(error.value)
    assert str(error.value).startswith(f"dump '{path}'")
    assert "\n" not in str(error.value)
    assert "evil_layout" not in sys.modules


def test_an_archive_is_unpacked_up_to_a_limit(tmp_path):
    """Zeros of a thousand times the file's size."""
    np.savez_compressed(tmp_path / "bomb", zeros=np.zeros(2**24, np.int8))
    assert (tmp_path / "bomb.npz").stat().st_size < 2**15
    with pytest.raises(InputError, match=r"have 16777\d+ bytes, must have at most 1048576$"):
        untrusted.read_npz(tmp_path / "bomb.npz", max_bytes=2**20)


def test_whatever_byte_is_wrong_a_dump_is_refused_or_whole(file, tmp_path):
    """Not every byte of a .npz means something; what is read is never what was not written."""
    rng = random.Random(0)
    whole = without_kv(SETTING.state())
    num_refused = 0
    for _ in range(40):
        damaged = bytearray(file)
        damaged[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
        (tmp_path / "file").write_bytes(damaged)
        try:
            dump = replay.load(tmp_path / "file")
        except InputError:
            num_refused += 1
        else:
            assert_equal(dump.state, whole)
            assert dump.step_config == STEP_CONFIG
    assert num_refused > 20


def test_a_missing_file_is_told(tmp_path, capsys):
    assert words.main([str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"jaxpaged: dump '{tmp_path / 'none'}' cannot be read: No such file or directory\n"


PROMPTS = tiny.prompts([40, 34, 3, 3, 3, 3, 37])
PROMPTS[1][:21] = PROMPTS[0][:21]  # the second hits the first's


def filled_driver(**options) -> Driver:
    """Seven requests, the last of which has no row; none has been computed."""
    driver = tiny.driver(**OPTIONS | options)
    for i, prompt in enumerate(PROMPTS):
        driver.add(tiny.request(driver, 1 + i, prompt, tiny.greedy(4 + i)))
    driver._fill_rows()
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


@pytest.mark.slow
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
        thread = engine._worker._thread
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
        assert "jaxpaged.replay.report(engine, path)" in caplog.text
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
