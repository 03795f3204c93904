"""Parts from outside at each door: kept programs, `AsyncLLM`, the server, replays, several devices."""

import asyncio
import importlib
import shutil
import sys

import jax
import pytest

from jaxpaged import SamplingParams, code_digest, disk_cache
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine import programs
from jaxpaged.engine.setup import Setup
from jaxpaged.research import replay
from jaxpaged.research.lab import sweep, traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.replay import __main__ as replaying
from jaxpaged.research.verify import kernels
from jaxpaged.status import PagedMemoryError
from tests import tiny
from tests.lab.tracing import conversations, write
from tests.serve.conftest import serving
from tests.tiny_gguf import write_gguf

OUTSIDERS = "tests.outsiders"
slow = pytest.mark.slow
PARTS = {
    "attention": f"{OUTSIDERS}.attention:BOTH",
    "sampler": f"{OUTSIDERS}.sampler:always_seven",
    "eviction_policy": f"{OUTSIDERS}.policy:FOUND_LAST",
}


def named(path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{OUTSIDERS}.{module}"), name)


ELSEWHERE = [
    "pallas_attention:by_pallas",
    pytest.param(
        "ffi_attention:by_ffi",
        marks=[slow, pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")],
    ),
]


@pytest.mark.parametrize("path", ELSEWHERE)
def test_attention_in_pallas_or_by_ffi_equals_the_oracle(path):
    function = named(path)
    without = frozenset({"quantised", "block_sparse", "head_major", "alibi", "sinks", "soft_cap"})
    without |= {"sliding_window", "attention_chunk"}
    dtypes = function.support.dtypes
    terms = kernels.Terms(arrays="jax", without=without, only={} if dtypes is None else {"dtype": dtypes})
    its = [case for case in kernels.cases_of("paged_attention_v1") if terms.leaves_out(case) is None]
    served = 0
    for case in its[:: 1 + len(its) // 6]:
        try:
            served += kernels.check(function, "paged_attention_v1", case, terms) is not None
        except kernels.NotServed:
            continue
    assert served


@slow
@pytest.mark.parametrize("path", ELSEWHERE)
def test_an_engine_answers_by_it(path):
    driver = tiny.driver(**tiny.SMALL, attention=f"{OUTSIDERS}.{path}")
    prompts = tiny.prompts([24, 20, 30, 12, 25])
    answers = tiny.generate(driver, prompts, tiny.greedy(20))
    assert answers == [tiny.reference_answer(tuple(prompt), 20) for prompt in prompts]
    tiny.assert_nothing_is_held(driver)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("outsiders") / "tiny.gguf"))


@pytest.mark.nightly
def test_async_llm_and_the_server_answer_by_them(model):
    llm = AsyncLLM(model, **tiny.DEFAULTS, **PARTS)
    params = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)

    async def answer():
        async for output in llm.generate([1, 2, 3], params, "mine"):
            last = output
        return last.outputs[0].token_ids

    try:
        assert asyncio.run(answer()) == [7] * 5
        with serving(llm) as served:
            asked = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 1.0}
            extra = {"ignore_eos": True, "return_token_ids": True}
            [choice] = served.openai.completions.create(**asked, extra_body=extra).choices
            assert choice.token_ids == [7] * 5
            refused = served.http.post("/v1/completions", json=asked | {"top_k": 3})
            assert refused.status_code == 400
            assert "top_k=3 must be" in refused.json()["error"]["message"]
    finally:
        llm.shutdown()


@pytest.mark.nightly
def test_a_replay_runs_those_that_its_command_names_and_no_others(tmp_path, capsys):
    driver = tiny.driver(**tiny.SMALL, **PARTS)
    tiny.submit(driver, tiny.prompts([24, 20, 30, 12, 25]), tiny.greedy(30))
    for _ in range(9):
        driver.turn(max_steps=1)
    file = tmp_path / "report"
    replay.report(driver, file)
    assert replaying.main([str(file), "--steps", "3"]) == 2
    assert "policy" in capsys.readouterr().err
    names = [word for part in ("policy", "attention", "sampler") for word in (f"--{part}", path_of(part))]
    assert replaying.main([str(file), "--steps", "3", *names]) == 0
    assert capsys.readouterr().out.count("\nstep ") == 3


def path_of(part):
    return PARTS["eviction_policy" if part == "policy" else part]


@pytest.mark.nightly
def test_a_token_that_is_not_in_the_vocabulary_ends_the_engine_with_the_reason():
    driver = tiny.driver(**tiny.SMALL, sampler=f"{OUTSIDERS}.sampler:out_of_range")
    with pytest.raises(PagedMemoryError, match="a sampler from outside has chosen a token that is not in"):
        tiny.generate(driver, [[1, 2, 3]], SamplingParams(max_tokens=3))


OWN = """
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpaged.contracts import CacheSpec, Ranking, sampler


def token():
    return 7


def sign():
    return 1


def rank(queue, block_ids, is_first, now):
    return sign() * now, now


RANKING = Ranking(rank, contract=1)


def length():
    return 9


@dataclass(frozen=True)
class Window(CacheSpec):
    contract = 1

    def first_read(self, num_tokens):
        first = num_tokens + 1 - length()
        return first * (first > 0)

    def most_kept(self, num_in_flight):
        return length() - 1 + num_in_flight


WINDOW = Window()


@sampler(contract=1)
def own(logits, options, positions):
    return jnp.full(positions.shape, token(), jnp.int32)
"""


@pytest.fixture
def somebodys(tmp_path, monkeypatch):
    """Make a module of parts whose helpers a test replaces."""
    (tmp_path / "somebodys_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys_parts", raising=False)
    monkeypatch.setattr(code_digest, "_last", {})
    return importlib.import_module("somebodys_parts")


@pytest.mark.nightly
def test_a_kept_program_does_not_answer_for_code_that_was_changed(somebodys, tmp_path, monkeypatch):
    """A second start finds the program; one with another helper must not, nor what JAX has traced.

    By day the next test, and that of programs in `test_code_digest.py`, show both without an engine's loop.
    """
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "programs")

    def start():
        monkeypatch.setattr(programs, "_loaded", {})
        driver = tiny.driver(**tiny.SMALL, sampler="somebodys_parts:own")
        [answer] = tiny.generate(driver, [[1, 2, 3]], SamplingParams(max_tokens=4))
        return answer, len(list((tmp_path / "programs").glob("*.program")))

    assert start() == ([7] * 4, 1)
    assert start() == ([7] * 4, 1)
    monkeypatch.setattr(somebodys, "token", lambda: 8)
    assert start() == ([8] * 4, 2)


@pytest.mark.parametrize(
    ("option", "part", "helper"), [("sampler", "own", "token"), ("layer_kind", "WINDOW", "length")]
)
def test_an_engine_traces_changed_parts_anew(somebodys, monkeypatch, option, part, helper):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))

    def check():
        config = EngineConfig(**tiny.DEFAULTS, **{option: f"somebodys_parts:{part}"})
        Setup(config, tiny.CONFIG).check()
        return len(cleared)

    assert [check(), check()] == [0, 0]
    monkeypatch.setattr(somebodys, helper, lambda: 8)
    assert [check(), check()] == [1, 1]


@pytest.mark.nightly
def test_the_laboratory_ranks_by_the_code_that_there_is(somebodys, tmp_path, monkeypatch):
    trace = traces.read(write(tmp_path / "trace.jsonl", conversations()))

    def hits(policy):
        [found] = sweep.sweep(trace, [Combination(policy, 64, 1600)], warmup=0)
        return found.hit_tokens.tolist()

    before = hits("somebodys_parts:RANKING")
    monkeypatch.setattr(somebodys, "sign", lambda: -1)
    assert hits("somebodys_parts:RANKING") != before
