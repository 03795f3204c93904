"""The cache of grammars: compiled in a process with limits, kept in memory and in files."""

import json
import os
import subprocess

import numpy as np
import pytest

from jaxpaged import disk_cache
from jaxpaged.grammar import cache as cache_module
from jaxpaged.grammar import files, worker
from jaxpaged.grammar.cache import SUFFIX, GrammarCache
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.regex import parse_regex
from tests.grammar.languages import VOCABULARY, automaton

# 2**17 states for an automaton alone: lists to one level that hold such texts.
TEXT = {"type": "string", "pattern": "^(a|b)*a(a|b){16}$"}
BOMB = {"json": {"type": "array", "items": {"anyOf": [{"$ref": "#"}, TEXT]}}, "max_depth": 1}


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
    whole = file.read_bytes()
    cache.get(Constraint(choice=["other"])).result()
    [other] = {*tmp_path.glob(f"*{SUFFIX}")} - {file}
    for torn in (whole[:-9], other.read_bytes(), whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(torn)
        assert caches().get(Constraint(choice=["yes", "no"])).result().num_states == made.num_states
        assert file.read_bytes() == whole


def test_files_are_bounded_by_their_bytes_together(caches, tmp_path, monkeypatch):
    cache, size = caches(), 0
    for i in range(4):
        monkeypatch.setattr(cache_module, "MAX_BYTES", 3 * size + 9 if size else 2**30)
        cache.get(Constraint(choice=[f"{i}abc"])).result()
        files_ = [*tmp_path.glob(f"*{SUFFIX}")]
        size = size or files_[0].stat().st_size
        for file in files_:  # the order in which they came, whatever the clock's grain
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))
    assert len(files_) == 3


def test_what_takes_too_long_or_too_much_is_stopped_and_others_are_compiled(caches):
    cache = caches(cpu_seconds=1, max_states=10**6)
    with pytest.raises(GrammarError, match="more than 1 s of processor time"):
        cache.get(Constraint(**BOMB)).result()
    assert cache.get(Constraint(regex="a|b")).result().num_states == 2
    with pytest.raises(GrammarError, match="more than 160 MB"):
        caches(memory_bytes=160 << 20, max_states=10**6).get(Constraint(**BOMB)).result()


def test_small_ones_pass_large_ones_and_what_nobody_waits_for_ends(caches):
    """Costly ones of one client, each of which takes seconds; they are there to the end of the test."""
    cache = caches(cpu_seconds=60, max_states=10**8, memory_bytes=2 << 30)
    costly = [cache.get(Constraint(regex=f"(a|b)*a(a|b){{{17 + i}}}"), "hostile") for i in range(5)]
    again = cache.get(Constraint(regex="(a|b)*a(a|b){17}"), "another")
    for client in ("hostile", "other"):
        assert cache.get(Constraint(choice=["a", client]), client).result(timeout=60).num_states
    assert not any(future.done() for future in costly)
    for future in costly:
        assert future.cancel()
    assert cache.get(Constraint(choice=["b"])).result(timeout=60).num_states
    assert cache.under_way() == [Constraint(regex="(a|b)*a(a|b){17}").key()]
    cache.close()
    with pytest.raises(GrammarError, match="the engine was closed"):
        again.result()
    with pytest.raises(GrammarError, match="the engine was closed"):
        cache.get(Constraint(regex="b"))


def test_one_that_several_wait_for_is_compiled_once_and_a_refusal_is_remembered(caches, monkeypatch):
    cache = caches()
    begun, begin = [], worker.Worker.begin
    monkeypatch.setattr(
        worker.Worker, "begin", lambda self, fields: begun.append(fields) or begin(self, fields)
    )
    first, second, third = (cache.get(Constraint(regex="a{9}"), client) for client in "aab")
    assert third.cancel()
    assert first.result() is second.result()
    assert begun == [{"regex": "a{9}"}]
    for _ in range(2):
        with pytest.raises(GrammarError, match="a group is not closed"):
            cache.get(Constraint(regex="(")).result()
    assert begun == [{"regex": "a{9}"}, {"regex": "("}]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"json": {"format": ["date"]}}, "schema at # has a format that is not a string"),
        ({"json": {"type": None}, "disable_additional_properties": True}, "schema at # has type=None"),
        ({"json": {"type": 5, "x-a": 1}, "disable_additional_properties": True}, "schema at # has type=5"),
        ({"grammar": 'start: "\ud800"'}, "half a surrogate pair"),
        (
            {"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(5000))},
            "nested too deep",
        ),
        ({"regex": None, "choice": [5]}, "structured_outputs cannot be read: TypeError"),
    ],
    ids=str,
)
def test_a_malformed_constraint_gets_a_true_sentence_and_ends_no_other(worker_of_all, fields, why):
    process = worker_of_all.process
    with pytest.raises(GrammarError, match=why):
        worker_of_all.compile(fields)
    assert worker_of_all.compile({"regex": "a"}).num_states
    assert worker_of_all.process is process


@pytest.fixture(scope="module")
def worker_of_all():
    made = worker.Worker(VOCABULARY, Limits())
    made.compile({"regex": "a"})
    yield made
    made.close()


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
    key, rng = bytes(32), np.random.default_rng(0)
    file = files.to_file(automaton(parse_regex("ab|cd*")), key)
    assert files.from_file(file, key, size, Limits()) is not None
    assert files.from_file(file, bytes(31) + b"a", size, Limits()) is None
    assert files.from_file(file[:60], key, size, Limits()) is None
    for place in rng.integers(0, len(file), 100):
        torn = bytearray(file)
        torn[place] ^= 1 << rng.integers(8)
        assert files.from_file(bytes(torn), key, size, Limits()) is None
