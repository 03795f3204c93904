"""The doors under fire: any value is answered or refused in one sentence, and the next request is served."""

import math
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import jaxpaged
from jaxpaged import InputError, SamplingParams
from jaxpaged.api.model import engine_config
from jaxpaged.checks import shown
from jaxpaged.config import EngineConfig
from jaxpaged.engine.door import Salts
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.engine.request import device_request_id, since
from tests import tiny
from tests.tiny_gguf import write_gguf

OPTIONS = tiny.DEFAULTS
QUICK = {"temperature": 0, "max_tokens": 2}


class Odd:
    """A value of the user's own, without a name to show."""

    def __repr__(self):
        raise RuntimeError("no name")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("doors") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path):
    return jaxpaged.LLM(path, **OPTIONS)


numbers = st.one_of(
    st.integers(),
    st.integers(-3, 130),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, 10**12, 10**400, -1, -(2**31) - 1]),
    st.floats(),
    st.sampled_from([1e39, 1e-38, 1e-46, math.inf, -math.inf, math.nan]),
    st.booleans(),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
    st.sampled_from(
        [np.int8(3), np.uint64(2**63), np.float16(2), np.float64(1e300), np.bool_(True), np.array(3)]
    ),
)
plain = st.one_of(numbers, st.none(), st.text(max_size=8), st.binary(max_size=4))
anything = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.sets(st.integers(), max_size=3),
        st.dictionaries(
            st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), inner, max_size=3
        ),
        st.builds(np.array, st.lists(st.integers(-5, 200), max_size=4)),
    ),
    max_leaves=5,
)
# One field at a time: of several values one is always refused, and hides the others.
params = st.dictionaries(
    st.sampled_from(sorted(SamplingParams.__dataclass_fields__)),
    st.one_of(numbers, st.lists(numbers, max_size=2), anything),
    min_size=1,
    max_size=1,
)


def refusal(call: Callable[[], object]) -> str:
    """Return the message with which a call is refused; empty if it is not. Other errors are raised."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


# Hundreds of cases a second where they are refused; those that are answered take a few steps.
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(prompts=[], options={}, priority=np.array(3))
@example(prompts=np.array(3), options={}, priority=None)
@given(prompts=anything, options=params, priority=st.one_of(st.none(), anything))
def test_any_values_are_answered_or_refused_and_the_next_request_is_served(llm, prompts, options, priority):
    for call in (
        lambda: llm.generate(prompts, SamplingParams(**QUICK), use_tqdm=False, priority=priority),
        lambda: llm.generate([[5]], SamplingParams(**QUICK | options), use_tqdm=False),
        lambda: llm.generate([[5]], prompts, use_tqdm=False),
        lambda: llm.chat(prompts, SamplingParams(**QUICK), use_tqdm=False),
    ):
        refused = refusal(call)
        assert "\n" not in refused
        assert len(refused) < 2000
    [result] = llm.generate([[5, 6]], SamplingParams(**QUICK), use_tqdm=False)
    assert result.outputs[0].token_ids == tiny.reference_answer((5, 6), 2)


@settings(max_examples=300, deadline=None)
@given(
    options=st.dictionaries(st.sampled_from(sorted(EngineConfig.__dataclass_fields__)), anything, max_size=2)
)
def test_any_engine_options_are_good_or_refused(options):
    assert "\n" not in refusal(lambda: engine_config(options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stop_token_ids": [10**12]},
            r"stop_token_ids: token=1000000000000 must be a token id, an int in \[0, 97\)",
        ),
        ({"stop_token_ids": [97]}, "stop_token_ids: token=97 must be a token id"),
        ({"temperature": 10**400}, "temperature=10.* must be a number >= 0, at most 3.4e38"),
        ({"temperature": 1e39}, "temperature=1e.39 must be a number >= 0"),
    ],
)
def test_what_once_killed_the_engine_is_refused_at_the_door(llm, options, message):
    with pytest.raises(InputError, match=message):
        llm.generate([[1]], SamplingParams(**options), use_tqdm=False)
    assert len(llm.generate([[1]], tiny.greedy(3), use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 5e-324, 3e38])
def test_extreme_temperatures_are_what_they_tend_to(llm, temperature):
    """A tiny one is greedy, also where float32 has no such number; a huge one is as good as uniform."""
    options = SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True, seed=3)
    [result] = llm.generate([[4, 2]], options, use_tqdm=False)
    if temperature < 1:
        assert result.outputs[0].token_ids == tiny.reference_answer((4, 2), 8)
    else:
        assert len(set(result.outputs[0].token_ids)) > 4


def test_prompts_of_one_salt_share_blocks_and_others_do_not(llm):
    [prompt] = tiny.prompts([20], seed=91)
    llm.reset_prefix_cache()
    answers = []
    for salt, num_hits in ((None, 0), (None, 16), ("a", 0), ("b", 0), ("a", 16), (None, 16)):
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [result] = llm.generate(asked, tiny.greedy(4), use_tqdm=False)
        assert result.num_cached_tokens == num_hits, salt
        answers.append(result.outputs[0].token_ids)
    assert answers == [tiny.reference_answer(tuple(prompt), 4)] * 6


@pytest.mark.parametrize("salt", ["", 3, b"x"])
def test_a_salt_is_a_string(llm, salt):
    with pytest.raises(InputError, match="cache_salt=.* must be None or a string of 1 to 1024 characters"):
        llm.generate({"prompt": "ab", "cache_salt": salt}, use_tqdm=False)


def test_salts_have_numbers_of_their_own_and_only_the_last_are_remembered(monkeypatch):
    monkeypatch.setattr(Salts, "MOST", 3)
    salts = Salts()
    assert salts.number(None) == 0
    first = [salts.number(salt) for salt in "abcab"]
    assert first[:2] == first[3:]
    assert len({0, *first}) == 4
    assert salts.number("d") not in first
    assert salts.number("a") == first[0]
    assert salts.number("c") not in first, "c was used longest ago, and is forgotten"


def test_names_of_requests_go_round_without_naming_nobody():
    period = 2**32 - 1
    for start in (1, 2**31 - 3, period - 3, 5 * period - 2):
        names = [device_request_id(start + i) for i in range(6)]
        assert len({0, *names}) == 7
        assert all(-(2**31) <= name < 2**31 for name in names)
        ages = [since(name, names[0]) for name in names]
        assert ages == sorted(ages)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"ab", r"^prompt=b'ab' must be a string, a list of token ids, or a mapping"),
        ([b"ab", "ab"], r"^prompt 0: prompt=b'ab' must be a string"),
        (
            {"prompt": "a", "multi_modal_data": 1},
            "multi_modal_data=1 must be left out: inputs that are not text are not supported",
        ),
        ("a\ud800", "must be Unicode text, without half a surrogate pair"),
        ("a" * 10_000, "the prompt has 10000 characters, more than max_model_len=128 tokens hold"),
        ([[1, 2.5]], r"prompt token=2.5 must be a token id, an int in \[0, 97\)"),
        ([1, True], "prompt token=True must be a token id"),
        (np.array([1.5]), "prompt_token_ids=array.* must be a list of token ids"),
        ({1, 2}, "prompts={1, 2} must be a prompt or a list of prompts"),
        (7, "prompts=7 must be a prompt or a list of prompts"),
    ],
)
def test_strange_prompts_are_refused(llm, prompt, message):
    with pytest.raises(InputError, match=message):
        llm.generate(prompt, use_tqdm=False)


def test_arrays_and_numpys_numbers_are_token_ids(llm):
    want = tiny.reference_answer((1, 2, 3), 2)
    for ids in (
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint8),
        [np.int64(1), 2, np.int8(3)],
        range(1, 4),
    ):
        for form in (ids, [ids], {"prompt_token_ids": ids}):
            [result] = llm.generate(form, SamplingParams(**QUICK), use_tqdm=False)
            assert result.prompt_token_ids == [1, 2, 3]
            assert all(type(token) is int for token in result.prompt_token_ids)
            assert result.outputs[0].token_ids == want


def test_nothing_asked_is_nothing_answered(llm):
    assert llm.generate([], use_tqdm=False) == []
    assert llm.chat([], use_tqdm=False) == []


def test_options_have_vllms_names_and_others_are_named():
    ours = engine_config({"num_gpu_blocks_override": 9, "seed": None, "trust_remote_code": True})
    assert ours == EngineConfig(num_blocks=9)
    assert engine_config({"tensor_parallel_size": np.int64(1), "dtype": "half"}).dtype == "float16"
    for options, message in (
        (
            {"pipeline_parallel_size": 2},
            "^pipeline_parallel_size=2, an option of vLLM's .*, is not supported: must be None or 1; use ",
        ),
        ({"pipeline_parallel_size": True}, "^pipeline_parallel_size=True, an option of vLLM's"),
        ({"data_parallel_size": 0}, "^data_parallel_size=0 must be a positive int, at most 256$"),
        ({"tensor_parallel_size": True}, "^tensor_parallel_size=True must be a positive int, at most 256$"),
        ({"quantization": "fp4"}, "^quantization='fp4' must be None or one of gguf, int8, int4, fp8$"),
        (
            {"quantization": ["int8"]},
            r"^quantization=\['int8'\] must be None or one of gguf, int8, int4, fp8$",
        ),
        ({"quantization": np.zeros(0)}, "quantization=array.* must be None or one of gguf, int8, int4, fp8$"),
        ({"num_blocks": 8, "num_gpu_blocks_override": 9}, "^num_blocks is given twice, the second time as 9"),
        ({"blocksize": 3}, "^option 'blocksize' must be one of attention, block_size, "),
    ):
        with pytest.raises(InputError, match=message):
            engine_config(options)


def test_a_value_is_shown_short_whatever_it_is():
    assert shown(Odd()) == "<Odd>"
    assert shown(10**5000) == "<int>"
    assert len(shown("x" * 1000)) < 210


# What must not wait for itself, nor for a thread that is not there.


def test_a_sink_that_would_wait_for_its_own_thread_is_refused(llm):
    errors: list[str] = []
    done = threading.Event()

    def sink(item):
        for call in (
            llm.engine.snapshot,
            llm.engine.reset_prefix_cache,
            lambda: llm.engine.submit([1], tiny.greedy(1)).result(),
        ):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))
        done.set()

    llm.engine.submit([1, 2], tiny.greedy(1), sink=sink)
    assert done.wait(60)
    assert [error.split(":")[0] for error in errors] == [
        "a sink must not ask for a snapshot",
        "a sink must not reset the prefix cache",
        "a sink must not wait for an answer",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # of forking with threads
def test_a_forked_child_is_refused(llm):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: llm.engine.submit([1], tiny.greedy(1)), llm.engine.snapshot, llm.engine.close):
            try:
                call()
                said.append("fine")
            except RuntimeError as error:
                said.append(str(error))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    sentence = "the engine belongs to the process that made it: a forked child must make its own"
    assert lines == [sentence, sentence, "fine"]
    assert len(llm.generate([[1]], tiny.greedy(2), use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_a_dead_engine_says_so(path):
    llm = jaxpaged.LLM(path, **OPTIONS)
    llm.engine.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        llm.generate([[1]], use_tqdm=False)
