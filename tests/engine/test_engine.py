"""The engine's thread and those who use it: streams, aborts, ends and errors, from many threads at once.

Every test runs under a time limit: what hangs, fails.
"""

import gc
import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import EngineDeadError, Handle, Item, collect
from jaxpaged.engine.request import Request
from jaxpaged.engine.texts import TextError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.state import FinishReason
from tests import tiny
from tests.engine.limits import LONG, limited


def asked(engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int) -> list[Request]:
    return [request for prompt in prompts for request in engine.door.admit(prompt, tiny.greedy(max_tokens))]


def is_right(handle: Handle, token_ids: list[int]) -> bool:
    request = handle.request
    return token_ids == tiny.reference_answer(
        tuple(request.prompt_token_ids.tolist()), request.params.max_tokens
    )


def begins_right(handle: Handle, token_ids: list[int]) -> bool:
    request = handle.request
    want = tiny.reference_answer(tuple(request.prompt_token_ids.tolist()), request.params.max_tokens)
    return token_ids == want[: len(token_ids)]


# Streams


@limited
def test_the_stream_is_the_result_is_the_reference(engine):
    prompts = tiny.prompts([1, 7, 40, 3, 90, 12, 33])
    lengths = [20, 1, 30, LONG, 9, 33, 64]
    handles = [engine.submit(p, tiny.greedy(n)) for p, n in zip(prompts, lengths, strict=True)]
    for handle in handles:
        deltas = list(handle)
        assert is_right(handle, [token for delta in deltas for token in delta.token_ids])
        assert handle.result() == collect(deltas)
        assert all(delta.request_id == handle.request_id for delta in deltas)
        assert [d.finish_reason for d in deltas[:-1]] == [FinishReason.NONE] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert all(delta.token_ids for delta in deltas[:-1])
    assert any(len(list(handle)) > 1 for handle in handles), "tokens come before the answer is ready"


@limited
def test_any_number_may_read_one_handle_any_number_of_times(engine):
    handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=60, temperature=0, logprobs=0))
    streams, results = zip(
        *[(tiny.start(list, handle), tiny.start(handle.result)) for _ in range(4)], strict=True
    )
    first, *others = [stream.result() for stream in streams]
    assert all(other == first for other in others)
    assert all(result.result() == collect(first) for result in results)
    assert list(handle) == first
    answer = handle.result()
    assert is_right(handle, answer.token_ids)
    assert len(answer.logprobs) == 60


@limited
def test_what_comes_while_others_run_is_answered_beside_them(engine, brake):
    hold = brake(engine)
    long = engine.submit([1, 2, 3], tiny.greedy(LONG))
    hold.allow(2)
    next(iter(long))
    short = engine.submit([4], tiny.greedy(1))
    hold.allow(3)
    assert is_right(short, short.result().token_ids)
    assert engine.stats.num_running == 1
    hold.off()
    assert is_right(long, long.result().token_ids)


@limited
def test_a_bad_request_is_refused_and_several_are_numbered_in_their_order(engine):
    before = engine.stats
    with pytest.raises(InputError, match=r"^prompt token=97 must be a token id"):
        engine.submit([1, 97], tiny.greedy(3))
    assert engine.submit_all([]) == []
    handles = engine.submit_all(asked(engine, [[1, 2], [1, 2]], 3))
    assert handles[1].request_id == handles[0].request_id + 1
    assert all(is_right(h, h.result().token_ids) for h in handles)
    tiny.until(lambda: engine.stats.num_running == 0)
    assert engine.stats.num_new_tokens == before.num_new_tokens + 2 * 3


@limited
def test_a_sink_gets_what_the_handle_would_and_one_that_raises_hurts_nobody(engine, brake, caplog):
    items: list[Item] = []
    done = threading.Event()

    def sink(item: Item) -> None:
        items.append(item)
        if item.finish_reason:
            done.set()

    def broken(item: Item) -> None:
        raise PanicError("gone")

    hold = brake(engine)
    hold.allow(2)
    bad = engine.submit_all(asked(engine, ([i] for i in range(3)), 30), broken)
    good = engine.submit([5], tiny.greedy(30), sink=sink)
    other = engine.submit([6], tiny.greedy(30))
    hold.off()
    done.wait()
    assert is_right(good, collect(items).token_ids)
    assert good.result() == collect(items)
    assert is_right(other, other.result().token_ids)
    assert [handle.result().finish_reason for handle in bad] == [FinishReason.ABORT] * 3
    # Said once a request, not at every delta.
    assert [r.exc_info[1].args for r in caplog.records] == [("gone",)] * 3


class PanicError(BaseException):
    """Error that is no `Exception`, as a panic in Rust code reaches Python."""


class Brittle:
    """A tokenizer that has text for some tokens only."""

    all_special_ids = ()

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return ["x" for _ in token_ids]

    def decode(self, token_ids: list[int], **_: bool) -> str:
        if 60 in token_ids:
            raise self.error
        return "x" * len(token_ids)


@pytest.mark.parametrize("error", [ValueError("no text"), PanicError("no text")], ids=["error", "panic"])
@limited
def test_a_failure_in_one_answers_text_ends_that_answer_alone(error, caplog):
    """A request with a stop string has its text made in the engine's thread, which all requests share."""
    config = EngineConfig(**tiny.DEFAULTS | tiny.SMALL)
    with Engine(config, tiny.CONFIG, tiny.load, tokenizer=Brittle(error)) as engine:
        others = [engine.submit([i], tiny.greedy(20)) for i in (5, 6)]
        bad = {"max_tokens": LONG, "temperature": 0.0, "allowed_token_ids": [60]}
        items: list[Item] = []
        stopping = engine.submit([7], SamplingParams(**bad, stop="zz"), sink=items.append)
        plain = engine.submit([8], SamplingParams(**bad))
        for handle in (stopping, plain):
            with pytest.raises(TextError, match=f"request {handle.request_id} .*: {error!r:.5}.*no text"):
                handle.result()
        assert [type(item) for item in items] == [TextError]
        tiny.until(lambda: engine.is_idle)
        assert engine.stats.num_free_blocks == engine.stats.num_blocks, "it goes on in its row"
        assert engine.stopped is None
        assert all(is_right(handle, [t for d in handle._items for t in d.token_ids]) for handle in others)


# Aborts


@limited
def test_an_aborted_request_ends_at_once_with_what_it_had(engine, brake):
    hold = brake(engine)
    handle = engine.submit([9, 8], tiny.greedy(LONG))
    hold.allow(6)
    stream = iter(handle)
    assert len([next(stream) for _ in range(5)]) == 5
    handle.abort()
    handle.abort()
    hold.off()
    answer = handle.result()
    assert answer.finish_reason is FinishReason.ABORT
    assert 5 <= len(answer.token_ids) <= 7, "the turn it was in, and the run that was under way"
    assert begins_right(handle, answer.token_ids)
    handle.abort()  # it has ended
    assert handle.result() == answer


@limited
def test_who_waits_behind_others_can_be_aborted_before_it_ran(engine, brake):
    """Thirty requests fill four running rows, four waiting ones and the host's queue."""
    hold = brake(engine)
    handles = engine.submit_all(asked(engine, ([i] for i in range(30)), 50))
    hold.allow(2)
    assert next(iter(handles[0])).token_ids
    assert (engine.stats.num_running, engine.stats.num_waiting) == (4, 26)
    engine.abort(handles[2:])
    hold.off()
    for i, handle in enumerate(handles):
        answer = handle.result()
        if i < 2:
            assert is_right(handle, answer.token_ids)
        else:
            assert answer.finish_reason is FinishReason.ABORT
            assert len(answer.token_ids) <= (3 if i < 4 else 0)
            assert begins_right(handle, answer.token_ids)


@limited
def test_an_abort_after_the_end_and_one_of_a_stranger_change_nothing(engine):
    handle = engine.submit([2, 4], tiny.greedy(4))
    answer = handle.result()
    handle.abort()
    engine.abort([handle, handle])
    engine.abort([])
    assert handle.result() == answer
    assert answer.finish_reason is FinishReason.LENGTH
    assert is_right(handle, engine.submit([2, 4], tiny.greedy(4)).result().token_ids)


@limited
def test_many_threads_submit_iterate_and_abort_at_random(engine):
    """Hundreds of requests from a dozen threads, in a pool too small for the rows that run together."""
    choices = [(tuple(p), n) for p in tiny.prompts([1, 5, 9, 30, 31, 40, 64, 90]) for n in (1, 7, 24)]

    def user(seed: int) -> list[tuple[Handle, list[int], FinishReason, bool]]:
        rng = random.Random(seed)
        seen = []
        for _ in range(8):
            picked = rng.choices(choices, k=rng.randint(1, 6))
            handles = engine.submit_all([r for p, n in picked for r in engine.door.admit(p, tiny.greedy(n))])
            given_up = {h.request_id for h in handles if rng.random() < 0.4}
            early = [h for h in handles if h.request_id in given_up and rng.random() < 0.5]
            engine.abort(early)
            for handle in handles:
                tokens: list[int] = []
                for delta in handle:
                    tokens += delta.token_ids
                    if handle.request_id in given_up:
                        handle.abort()
                seen.append((handle, tokens, delta.finish_reason, handle.request_id in given_up))
        return seen

    before = engine.stats
    users = [tiny.start(user, seed) for seed in range(12)]
    seen = [entry for each in users for entry in each.result()]
    assert len(seen) > 200
    reasons = [reason for *_, reason, _ in seen]
    for handle, tokens, reason, given_up in seen:
        if reason is FinishReason.ABORT:
            assert given_up
            assert begins_right(handle, tokens)
        else:
            assert is_right(handle, tokens)
    assert reasons.count(FinishReason.ABORT) > 20
    assert reasons.count(FinishReason.LENGTH) > 100
    assert engine.stats.num_hit_tokens > before.num_hit_tokens


# Ends


@limited
def test_closing_ends_what_is_in_flight_and_later_submits(own, brake):
    brake(own).allow(2)
    running = own.submit([1, 2], tiny.greedy(LONG))
    next(iter(running))
    waiting = own.submit_all(asked(own, ([i] for i in range(20)), LONG))
    items: list[Item] = []
    own.submit([3], tiny.greedy(LONG), sink=items.append)
    own.close()
    own.close()
    for handle in [running, *waiting]:
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            handle.result()
    assert isinstance(items[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        own.submit([1], tiny.greedy(1))
    running.abort()
    assert not tiny.thread_of(own).is_alive()


@limited
def test_answers_that_were_ready_can_still_be_read_after_the_end(own):
    handle = own.submit([1, 2], tiny.greedy(5))
    answer = handle.result()
    own.close()
    assert handle.result() == answer


@limited
def test_many_threads_may_close_while_others_submit(own):
    def submit(i: int) -> bool:
        try:
            return own.submit([i], tiny.greedy(3)).result().finish_reason is FinishReason.LENGTH
        except EngineDeadError:
            return False

    early = [tiny.start(submit, i) for i in range(8)]
    tiny.until(early[0].done)
    closing = [tiny.start(own.close) for _ in range(4)]
    late = [tiny.start(submit, i) for i in range(8)]
    assert [c.result() for c in closing] == [None] * 4
    assert early[0].result()
    assert all(f.result() in (True, False) for f in early + late)
    assert not submit(0)


@limited
def test_a_sink_may_close_the_engine(own, caplog):
    """A sink runs in the engine's thread, which cannot wait for itself."""
    handle = own.submit([1], tiny.greedy(LONG), sink=lambda item: own.close())
    tiny.thread_of(own).join()
    with pytest.raises(EngineDeadError):
        own.submit([1], tiny.greedy(1))
    assert handle.request_id == 1
    assert not caplog.records


@pytest.mark.parametrize("what", ["kept_run", "turn", "_read", "abort"])
@limited
def test_an_error_fails_all_in_flight_with_its_cause_and_all_that_comes_later(
    own, brake, monkeypatch, caplog, what
):
    hold = brake(own)
    hold.allow(2)
    running = own.submit([1, 2], tiny.greedy(LONG))
    next(iter(running))
    waiting = own.submit_all(asked(own, ([i] for i in range(20)), LONG))
    waits = tiny.start(waiting[-1].result)

    def breaks(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    driver = tiny.driver_of(own)
    monkeypatch.setattr(driver if what in vars(type(driver)) else driver.device, what, breaks)
    waiting[0].abort()
    hold.off()
    for read in (running.result, waiting[-1].result, waits.result, lambda: own.submit([1], tiny.greedy(1))):
        with pytest.raises(EngineDeadError, match="the engine stopped by MemoryError: no more") as caught:
            read()
        assert isinstance(caught.value.__cause__, MemoryError)
    tiny.thread_of(own).join()
    [message] = [record.message for record in caplog.records]
    assert message.startswith("the engine stops")
    own.close()


@limited
def test_forgetting_the_engine_ends_its_thread():
    engine = tiny.engine(**tiny.SMALL)
    thread = tiny.thread_of(engine)
    assert len(engine.submit([1, 2, 3], tiny.greedy(3)).result().token_ids) == 3
    del engine
    gc.collect()
    tiny.until(lambda: not thread.is_alive())


@limited
def test_an_engine_lives_while_a_handle_of_it_does():
    engine = tiny.engine(**tiny.SMALL)
    handle, thread = engine.submit([1, 2, 3], tiny.greedy(40)), tiny.thread_of(engine)
    del engine
    gc.collect()
    assert is_right(handle, handle.result().token_ids)
    del handle
    gc.collect()
    tiny.until(lambda: not thread.is_alive())


# What the driver does between


@limited
def test_the_next_run_is_dispatched_before_the_last_ones_report_is_read(monkeypatch):
    """The device never waits for Python."""
    driver = tiny.driver(**tiny.SMALL)
    events: list[tuple[str, int]] = []
    reports: list[Any] = []
    run, device_get = driver.device.kept_run, jax.device_get
    assert run is not None

    def recorded_run(*args: Any, **kwargs: Any) -> Any:
        state, report = run(*args, **kwargs)
        events.append(("run", len(reports)))
        reports.append(report)
        return state, report

    def recorded_get(value: Any) -> Any:
        events.append(("read", [report.status is value.status for report in reports].index(True)))
        return device_get(value)

    monkeypatch.setattr(driver.device, "kept_run", recorded_run)
    monkeypatch.setattr(jax, "device_get", recorded_get)
    [request_id] = tiny.submit(driver, [[1, 2, 3]], tiny.greedy(90))
    tokens: list[int] = []
    while driver.has_work:
        for delta in driver.turn(max_steps=8):
            assert delta.request_id == request_id
            tokens += delta.token_ids
    assert tokens == tiny.reference_answer((1, 2, 3), 90)
    reads = [n for what, n in events if what == "read"]
    assert reads == list(range(len(reads))), "every report is read once, in order"
    assert len(reads) >= 90 // 8
    for n in reads:
        assert events.index(("run", n + 1)) < events.index(("read", n))
