"""The cache of grammars: compiled in a process with limits, kept in memory and in files."""

import json
import subprocess
from concurrent.futures import Future

import numpy as np
import pytest

from jaxpaged import disk_cache
from jaxpaged.grammar import files, worker
from jaxpaged.grammar.cache import SUFFIX, GrammarCache
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.regex import parse_regex
from tests.grammar.languages import VOCABULARY, automaton

BOMB = "(a|b)*a(a|b){16}"  # of 2**17 states


class Bytes:
    """A tokenizer of bytes, with two special tokens and an end of sequence behind them."""

    all_special_ids = (256, 257)

    def convert_ids_to_tokens(self, ids):
        return [f"<0x{i:02X}>" if i < 256 else f"<special{i}>" for i in ids]

    def decode(self, ids, **_):
        return "".join(self.convert_ids_to_tokens(ids))


class Constraint:
    """A constraint by its fields."""

    def __init__(self, **fields):
        self.key = lambda: json.dumps(fields)


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Make caches with files in one folder."""
    tmp_path.chmod(0o700)
    made = []

    def make(**limits):
        made.append(GrammarCache(Bytes(), 300, [257], Limits(**limits)))
        return made[-1]

    disk_cache.keep_in(tmp_path)
    yield make
    disk_cache.keep_in(None)
    for each in made:
        each.close()


def test_a_grammar_is_compiled_once_and_found_in_its_file(caches, tmp_path, monkeypatch):
    cache = caches()
    made = cache.get(Constraint(choice=["yes", "no"])).result()
    assert made.allowed(made.start).nonzero()[0].tolist() == [ord("n"), ord("y")]
    [file] = tmp_path.glob(f"*{SUFFIX}")
    monkeypatch.setattr(subprocess, "Popen", None)  # what is on disk needs no process
    found = caches().get(Constraint(choice=["yes", "no"])).result()
    assert (found.masks == made.masks).all()
    assert (found.next_state == made.next_state).all()
    monkeypatch.undo()
    file.write_bytes(file.read_bytes()[:-9])
    assert caches().get(Constraint(choice=["yes", "no"])).result().num_states == made.num_states
    assert len(file.read_bytes()) == len(files.to_bytes(made))


def test_what_takes_too_long_or_too_much_is_stopped_and_others_are_compiled(caches):
    cache = caches(cpu_seconds=1, max_states=10**6)
    with pytest.raises(GrammarError, match="more than 1 s of processor time"):
        cache.get(Constraint(regex=BOMB)).result()
    assert cache.get(Constraint(regex="a|b")).result().num_states == 2
    with pytest.raises(GrammarError, match="more than 160 MB"):
        caches(memory_bytes=160 << 20, max_states=10**6).get(Constraint(regex=BOMB)).result()


def test_one_that_is_under_way_is_compiled_once_and_a_closed_cache_says_so(caches, monkeypatch):
    cache = caches()
    called_back, add = [], Future.add_done_callback
    monkeypatch.setattr(Future, "add_done_callback", lambda *its: called_back.append(add(*its)))
    first, second = (cache.get(Constraint(regex="a{9}")) for _ in range(2))
    assert first.result() is second.result()
    assert len(called_back) == 1  # a second one could forget what was asked for after this
    process = cache._worker._process
    cache.close()
    assert process.poll() is not None
    with pytest.raises(GrammarError, match="the engine was closed"):
        cache.get(Constraint(regex="b"))


def test_a_refusal_comes_with_its_place(caches):
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(GrammarError, match="uniqueItems") as caught:
        caches().get(Constraint(json=schema)).result()
    assert caught.value.path == "#/properties/a~1b"


def test_a_file_that_no_automaton_of_ours_wrote_is_none():
    whole = files.to_bytes(automaton(parse_regex("ab|cd*")))
    size = len(VOCABULARY.raw)
    assert files.from_bytes(whole, size, Limits()) is not None
    assert files.from_bytes(whole, size + 8, Limits()) is None
    assert files.from_bytes(whole, size, Limits(max_states=2)) is None
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 100):
        torn = bytearray(whole)
        torn[place] ^= 1 << rng.integers(8)
        found = files.from_bytes(bytes(torn), size, Limits())
        assert found is None or all(  # whatever it says, no token leads out of its tables
            -1 <= found.step(s, t) < found.num_states for s in range(found.num_states) for t in range(size)
        )


def test_a_message_that_ends_early_is_the_end(tmp_path):
    file = tmp_path / "messages"
    file.write_bytes(b"\x09\x00\x00\x00{}")
    with file.open("rb") as source, pytest.raises(EOFError):
        worker.answers(source, source)
