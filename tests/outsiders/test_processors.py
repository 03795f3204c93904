"""Logits processors from outside, in the compiled loop: what they change, and what stays as it is."""

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.contracts import processors
from jaxpaged.contracts.host_processors import AdapterLogitsProcessor
from jaxpaged.engine import capacity
from jaxpaged.engine.door import Door
from jaxpaged.engine.setup import Setup
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests import tiny
from tests.outsiders import processor

PATH = "tests.outsiders.processor"
LISTED = [f"{PATH}:biased", processor.not_the_last, f"{PATH}:bars_all"]


def door_of(config):
    """Return the door of a tiny engine that is not made."""
    setup = Setup(config, tiny.CONFIG)
    setup.check()
    return Door(config, tiny.CONFIG, 128, capacity.cache_size(setup), setup.step_config(65))


def never_twice(prompt: list[int], count: int) -> list[int]:
    """Return the oracle's answer in which no token comes twice in turn."""
    tokens = list(prompt)
    for _ in range(count):
        logits = np.array(tiny.reference_logits(tuple(tokens))[-1])
        logits[tokens[-1]] = -np.inf
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_requests_that_give_arguments_are_processed_and_others_keep_their_bits():
    driver = tiny.driver(**tiny.SMALL, logits_processors=LISTED)
    prompts = tiny.prompts([5, 9, 12, 7, 6])
    plain = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    asked = [
        {"token": 5, "bias": 3.5},
        {"never_twice": True},
        {"token": 6, "bias": 9.0, "never_twice": True},
        {"nothing": 1},
    ]
    params = [SamplingParams(temperature=0, max_tokens=12, extra_args=each) for each in asked]
    requests = tiny.add(driver, 1, prompts, [*params, plain])
    together = tiny.drain(driver)
    first, second, third, fourth, last = (together[each.request_id] for each in requests)
    biased = SamplingParams(temperature=0, max_tokens=12, logit_bias={5: 3.5})
    assert first.token_ids == tiny.reference_greedy(prompts[0], biased)
    assert first.token_ids != tiny.reference_answer(tuple(prompts[0]), 12)
    assert second.token_ids == never_twice(prompts[1], 12)
    assert third.token_ids[::2] == [6] * 6
    assert 6 not in third.token_ids[1::2]
    assert fourth.token_ids == tiny.reference_answer(tuple(prompts[3]), 12), "it leaves no token"
    assert last.token_ids == tiny.reference_answer(tuple(prompts[4]), 12)
    [alone] = tiny.add(driver, 11, prompts[4:], [plain])
    assert tiny.drain(driver)[alone.request_id].scores == last.scores
    tiny.assert_nothing_is_held(driver)


def test_arguments_that_no_processor_has_are_refused_in_a_sentence():
    door = door_of(EngineConfig(**tiny.DEFAULTS, logits_processors=LISTED))
    for given, what in (
        ({"tokens": 5}, "extra_args: argument 'tokens'"),
        ({"token": 0.5}, "extra_args: token=0.5 must be an int in"),
        ({"bias": "a"}, "extra_args: bias='a' must be a number"),
        ({"never_twice": 1}, "extra_args: never_twice=1 must be"),
    ):
        with pytest.raises(InputError, match=what):
            door.admit([1], SamplingParams(extra_args=given))
    with pytest.raises(InputError, match="extra_args='a' must be None or a mapping"):
        SamplingParams(extra_args="a")
    [search, *_] = door.admit_search([1], BeamSearchParams(beam_width=2, max_tokens=2))
    assert search.arguments == ()


def test_what_is_no_processor_is_refused_in_a_sentence():
    for listed, what in (
        ("a:b", "logits_processors='a:b' must be None, or a list"),
        (["tests.outsiders.sampler:always_seven"], "must be a function under @processor"),
        ([f"{PATH}:nobody"], "has no attribute 'nobody'"),
        ([processor.biased, processor.biased], "argument='token' must be an argument of one processor"),
    ):
        with pytest.raises(InputError, match=what):
            Setup(EngineConfig(logits_processors=listed), tiny.CONFIG).check()
    with pytest.raises(InputError, match="by default an int, a float or a bool"):
        processors.processor(words="a")(lambda logits, request: logits)
    wrong = processors.Processor(lambda logits, request: logits[:1], name="wrong")
    with pytest.raises(ValueError, match=r"'wrong' must return float32\[2, 3\], not float32\[1, 3\]"):
        wrong(np.zeros((2, 3), np.float32), None)


def test_extra_arguments_without_processors_are_refused():
    with pytest.raises(InputError, match="extra_args=.* must be None without logits_processors"):
        door_of(EngineConfig(**tiny.DEFAULTS)).admit([1], SamplingParams(extra_args={"token": 1}))
    assert SamplingParams(extra_args={}).extra_args is None


class Barring(AdapterLogitsProcessor):
    """vLLM's form: a request bars the tokens of its prompt and its newest token."""

    @classmethod
    def validate_params(cls, params):
        if (params.extra_args or {}).get("bars", True) is not True:
            raise ValueError("bars must be True")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        def bar(prompt, answer, logits):
            logits[prompt + answer[-1:]] = -np.inf
            return logits

        return bar if params.extra_args else None


@pytest.mark.slow
def test_vllms_classes_are_called_by_the_host_and_others_keep_their_bits():
    driver = tiny.driver(**tiny.SMALL, logits_processors=[Barring])
    prompts = tiny.prompts([5, 9, 12])
    plain = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    asks = SamplingParams(temperature=0, max_tokens=12, extra_args={"bars": True})
    for round_ in range(2):  # the lines of the first are used again
        requests = tiny.add(driver, 1 + 10 * round_, prompts, [asks, plain, asks])
        together = tiny.drain(driver)
        for request, prompt in zip(requests[::2], prompts[::2], strict=True):
            tokens = list(prompt)
            for _ in range(12):
                logits = np.array(tiny.reference_logits(tuple(tokens))[-1])
                logits[[*prompt, *tokens[len(prompt) :][-1:]]] = -np.inf
                tokens.append(int(np.argmax(logits)))
            assert together[request.request_id].token_ids == tokens[len(prompt) :]
        assert together[requests[1].request_id].token_ids == tiny.reference_answer(tuple(prompts[1]), 12)
    with pytest.raises(InputError, match="extra_args: bars must be True"):
        driver.door.admit([1], SamplingParams(extra_args={"bars": 1}))
    tiny.assert_nothing_is_held(driver)
