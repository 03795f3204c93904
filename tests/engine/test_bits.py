"""Tests that an answer has the same bits in any company, in programs compiled as users have them."""

import dataclasses
import functools
import random
from typing import Any

import pytest

from jaxpaged import LLM
from jaxpaged.engine import setup
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.request import Delta
from jaxpaged.models.config import LayerKind
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import StoredWeights, random_weights
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.native import attention
from tests import tiny, tiny_lora
from tests.marks import slow_and_nightly
from tests.models.test_decoder import FAMILIES, GOLDENS

pytestmark = pytest.mark.usefixtures("optimized")
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly

SWAP = tiny.SWAP | {"max_model_len": 128}


def mixed(*kinds: LayerKind) -> dict[str, Any]:
    """Return the options of an engine with two kinds of layers, in a pool as tight as the others'."""
    config = tiny.mixed(*kinds)
    load = functools.partial(tiny.load, config=config)
    return {
        "model_config": config,
        "load_model": load,
        "num_blocks": 1 + 23,
        "max_num_batched_tokens": 4 + 32,
    }


def with_tokens(vocab_size: int) -> dict[str, Any]:
    """Return the options of an engine over a model with so many tokens, which chooses for 2 rows or for 8."""
    config = dataclasses.replace(tiny.CONFIG, vocab_size=vocab_size)
    weights = random_weights(config, NAMES, 0)
    return {
        "model_config": config,
        "load_model": lambda form: Decoder(StoredWeights(config, NAMES, weights, form)),
        "decode_widths": (2,),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8 + 128,
    }


def everything(driver: Driver, prompts: list[list[int]], params: list[SamplingParams]) -> list[Delta]:
    ids = tiny.submit(driver, prompts, params)
    answers = tiny.drain(driver)
    return [dataclasses.replace(answers[i], request_id=0, num_hit_tokens=0) for i in ids]


@pytest.mark.parametrize(
    ("dtype", "options", "use_native"),
    [
        # Who multiplies, the dtype and how one gives way meet in pairs; some weights are quantised.
        pytest.param("float32", tiny.SMALL, "0", id="all by XLA, float32, recompute", marks=NIGHTLY),
        pytest.param(
            "bfloat16",
            SWAP | {"quantization": "int4"},
            "0",
            id="all by XLA, bfloat16, swap, int4",
            marks=NIGHTLY,
        ),
        pytest.param(
            "bfloat16", tiny.SMALL | {"decode_widths": (2,)}, "1", id="bfloat16, recompute", marks=NIGHTLY
        ),
        pytest.param(
            "float32",
            SWAP | {"load_model": tiny.load_quantised, "decode_widths": (1, 2)},
            "1",
            id="float32, swap, weights of files, narrower passes",
            marks=SLOW,
        ),
        pytest.param(
            "float32",
            SWAP | mixed(LayerKind(), LayerKind(sliding_window=11)),
            "1",
            id="float32, swap, two kinds of layers",
            marks=NIGHTLY,
        ),
        pytest.param(
            "bfloat16",
            tiny.SMALL | mixed(LayerKind(sliding_window=11), LayerKind()),
            "0",
            id="all by XLA, bfloat16, recompute, two kinds of layers",
            marks=SLOW,
        ),
        pytest.param("float32", tiny.SMALL | with_tokens(512), "1", id="512 tokens", marks=SLOW),
        pytest.param("float32", tiny.SMALL | with_tokens(2003), "1", id="2003 tokens", marks=NIGHTLY),
        pytest.param("float32", tiny.SMALL | with_tokens(49_152), "1", id="49152 tokens", marks=NIGHTLY),
    ],
)
def test_an_answer_is_the_same_bit_for_bit_in_any_company(dtype, options, use_native, monkeypatch):
    """Tokens and log-probabilities, greedy and sampled: alone, among others, in other rows and other orders,
    with prefixes found in the cache or not, preempted or not. Three of four rows choose at once, or all."""
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    if options.get("max_num_seqs", 4) == 4:
        monkeypatch.setattr(setup, "SCORES_AT_ONCE", 3 * tiny.CONFIG.vocab_size)
    rng = random.Random(0)
    shared = tiny.prompts([40], seed=1)[0]
    prompts = [shared[: rng.choice([0, 24, 40])] + p for p in tiny.prompts([5, 33, 50, 12, 60, 1, 40, 7])]
    params = [
        SamplingParams(
            max_tokens=rng.choice([1, 12, 45]),
            temperature=rng.choice([0.0, 1.5]),
            top_k=rng.choice([0, 9]),
            top_p=rng.choice([1, 0.8]),
            frequency_penalty=rng.choice([0, 0.8]),
            repetition_penalty=rng.choice([1, 1.3]),
            logit_bias=rng.choice([None, dict.fromkeys(range(40), 1.5)]),
            seed=i,
            logprobs=rng.choice([0, 5]),
            prompt_logprobs=rng.choice([None, 3]),
        )
        for i in range(len(prompts))
    ]
    driver = tiny.driver(dtype=dtype, **options)
    alone = []
    for prompt, p in zip(prompts, params, strict=True):
        assert driver.reset_prefix_cache()
        alone += everything(driver, [prompt], [p])
    assert (driver.stats.num_preemptions, driver.stats.num_hit_tokens) == (0, 0)
    for _ in range(3):
        order = rng.sample(range(len(prompts)), len(prompts))
        together = everything(driver, [prompts[i] for i in order], [params[i] for i in order])
        assert together == [alone[i] for i in order]
    assert driver.stats.num_hit_tokens > 0
    assert driver.stats.num_preemptions > 0
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_answers_behind_one_prefix_have_the_bits_that_they_have_alone(monkeypatch):
    """Attention reads the prefix once for all rows, however short it is: a program of this test alone."""
    monkeypatch.setattr(attention, "LEAST_SAVED", 0)
    shared = tiny.prompts([40], seed=1)[0]
    prompts = [shared + own for own in tiny.prompts([5, 3, 9, 1])]
    params = [SamplingParams(max_tokens=12, temperature=t, seed=t, logprobs=5) for t in (0, 1, 0, 1)]
    driver = tiny.driver(keep_programs=False, num_blocks=1 + 40)
    alone = []
    for prompt, p in zip(prompts, params, strict=True):
        assert driver.reset_prefix_cache()
        alone += everything(driver, [prompt], [p])
    assert everything(driver, prompts, params) == alone
    assert driver.stats.num_hit_tokens > 0


# It has few numbers in some rows, so that a narrower pass would have other bits.
@pytest.mark.parametrize("name", slow_and_nightly(FAMILIES, ["families/gemma4_text"]))
def test_narrower_passes_of_a_family_have_the_same_bits(name):
    """An answer alone in an engine of 16 rows is the one among ten others."""
    options = {
        "max_num_seqs": 16,
        "num_blocks": 400,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
    }
    llm = LLM(GOLDENS / name, skip_tokenizer_init=True, **tiny.DEFAULTS | options)
    prompts = [[3 + token % 58 for token in its] for its in tiny.prompts([40, 9, *[20] * 9])]
    params = SamplingParams(
        max_tokens=12, temperature=1, seed=4, logprobs=0, ignore_eos=True, detokenize=False
    )

    def answers(prompts: list[list[int]]) -> list[Any]:
        found = [result.outputs[0] for result in llm.generate(prompts, params)]
        return [(answer.token_ids, answer.cumulative_logprob) for answer in found]

    assert [*answers(prompts[:1]), *answers(prompts[1:2])] == answers(prompts)[:2]


@SLOW
def test_an_adapter_changes_no_bit_of_rows_without_one(monkeypatch, tmp_path):
    """Neither in their company, nor as room that nobody uses. Those with one are the same in any company.

    Of XLA's own products, which it may fuse otherwise in a program with adapters; `test_lora` has the others.
    """
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    prompts = tiny.prompts([5, 33, 50, 12, 60, 40])
    params = [SamplingParams(max_tokens=12, temperature=0, logprobs=3, prompt_logprobs=1)] * len(prompts)
    want = everything(tiny.driver(), prompts, params)
    driver = tiny_lora.driver(tmp_path)
    assert everything(driver, prompts, params) == want
    adapters = [None, 0, 1, None, 2, 0]

    def asked(places: list[int]) -> list[Delta]:
        ids = []
        for i in places:
            adapter = None if adapters[i] is None else tiny_lora.request(tmp_path, adapters[i])
            [request] = tiny.numbered(driver.door.admit(prompts[i], params[i], lora_request=adapter))
            driver.add(request)
            ids.append(request.request_id)
        found = tiny.drain(driver)
        return [dataclasses.replace(found[i], request_id=0, num_hit_tokens=0) for i in ids]

    alone = [answer for i in range(len(prompts)) for answer in asked([i])]
    assert all((alone[i] == want[i]) == (adapters[i] is None) for i in range(len(prompts)))
    for order in ([0, 1, 2, 3, 4, 5], [4, 0, 5, 3, 1, 2]):
        assert asked(order) == [alone[i] for i in order]
