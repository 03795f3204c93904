"""Whatever comes, others are answered: a victim's stream goes on, in little memory, beside hostile bodies."""

import asyncio
import contextlib
import gc
import threading
import time
from pathlib import Path

import pytest

from jaxpaged.api import async_llm
from tests import tiny
from tests.serve.conftest import soon
from tests.serve.hostile import BODIES, SIZE

VICTIM = {"prompt": "ab c12", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
# Of a body as any other, and of the largest that pass, an event loop's turn takes up to 30 ms of a processor.
MOST_WORK_S = 0.15
MOST_MEMORY = 64 * 2**20
# One of each kind for every run; all of them, with those that pass, are slow.
FEW = (
    "prompts {}",
    "prompts null",
    "bad words, fewer",
    "stop strings, fewer",
    "messages {}",
    "allowed tokens",
    "a field of numbers",
    "tokens",
)


class Turns:
    """The most work, in seconds of a processor, that an event loop's thread did between two looks at it.

    Not time that passes: a busy machine changes nothing.
    """

    def __init__(self, loop):
        self.worst, self._loop, self._is_watched = 0.0, loop, True
        self._done = asyncio.run_coroutine_threadsafe(self._watch(), loop)

    async def _watch(self):
        before = time.thread_time()
        while self._is_watched:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.worst, before = max(self.worst, now - before), now

    def stop(self):
        self._is_watched = False
        self._done.result(30)


@contextlib.contextmanager
def peak_memory():
    """Yield a list that gets the process's peak memory beyond what it began with, in bytes."""
    told = []
    if not Path("/proc/self/clear_refs").exists():  # no Linux: nothing is measured
        yield told
        told.append(0)
        return
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak is counted anew
    before = _status("VmRSS")
    yield told
    told.append(_status("VmHWM") - before)


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.fixture
def victim(served):
    """Run streams in a row all the time, and check that each has the answer it would have alone."""
    want = served.http.post("/v1/completions", json=VICTIM).json()["choices"][0]["text"]
    is_over, answers = threading.Event(), []

    def ask():
        while not is_over.is_set():
            stream = served.openai.completions.create(model="tiny", stream=True, extra_body=VICTIM, prompt="")
            answers.append("".join(chunk.choices[0].text for chunk in stream))

    asking = tiny.start(ask)
    yield answers
    is_over.set()
    asking.result(30)
    assert set(answers) == {want}


def attack(served, name, victim):
    path, make, status, told = BODIES[name]
    body = make()
    assert SIZE - 20_000 < len(body) <= SIZE
    seen = len(victim)
    gc.freeze()  # a collection is not to go over what other tests have left in this process
    turns = Turns(served.loop)
    with peak_memory() as memory:
        reply = served.http.post(path, content=body, headers={"content-type": "application/json"})
    soon(lambda: len(victim) > seen)
    turns.stop()
    gc.unfreeze()
    assert (reply.status_code, told in reply.text) == (status, True), reply.text[:300]
    assert turns.worst < MOST_WORK_S
    assert memory[0] < MOST_MEMORY


@pytest.mark.parametrize("name", FEW)
def test_a_hostile_body_stops_nobody(served, victim, name):
    attack(served, name, victim)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BODIES if name not in FEW])
def test_no_other_hostile_body_stops_anybody(served, victim, name):
    attack(served, name, victim)


def test_a_text_that_is_slow_to_cut_holds_up_nobody(served, monkeypatch):
    """Tokenizing it does not block the event loop, and delays others of its kind for a limited time only."""
    encode, go_on = served.llm.tokenizer.encode, threading.Event()

    def slow(text, **options):
        if len(text) > 10:
            go_on.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(async_llm, "TOKENIZED_HERE", 10)
    monkeypatch.setattr(served.llm, "max_read_s", 0.3)
    monkeypatch.setattr(served.llm.tokenizer, "encode", slow)

    def ask(prompt):
        return served.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})

    asked = [tiny.start(ask, "ab" * 10) for _ in range(async_llm.NUM_READERS + 2)]
    assert ask("ab").status_code == 200
    for each in asked:
        assert "was not cut into tokens within 0.3 s" in each.result(30).json()["error"]["message"]
    go_on.set()
    assert ask("ab" * 10).status_code == 200
