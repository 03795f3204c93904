"""Engine options: every refusal names the value and the rule."""

import dataclasses
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig, EvictionPolicy
from jaxpaged.memory.eviction import EVICTION_POLICIES
from jaxpaged.memory.policies import POLICIES
from jaxpaged.sampling_params import SamplingParams, seed_bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be None or a positive int"),
        ({"max_tokens": -3}, "max_tokens=-3 must be None or a positive int"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be None or a positive int"),
        ({"max_tokens": True}, "max_tokens=True must be None or a positive int, at most"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a number >= 0"),
        ({"temperature": float("inf")}, "temperature=inf must be a number >= 0"),
        ({"temperature": "hot"}, "temperature='hot' must be a number >= 0"),
        ({"temperature": 10**400}, "temperature=1000.*... must be a number >= 0, at most 3.4e38"),
        ({"temperature": 10**5000}, "temperature=<int> must be a number >= 0"),
        ({"temperature": 1e39}, "temperature=1e.39 must be a number >= 0, at most 3.4e38"),
        ({"temperature": np.float64("nan")}, "must be a number >= 0"),
        ({"top_k": -2}, "top_k=-2 must be an int >= 0"),
        ({"top_k": 2**31}, "top_k=2147483648 must be an int >= 0, at most"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list of token ids, ints >= 0"),
        ({"stop_token_ids": [[1]]}, "must be a list of token ids"),
        ({"top_p": 0}, r"top_p=0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1 must be in \(0, 1\]"),
        ({"min_p": -0.5}, r"min_p=-0.5 must be in \[0, 1\]"),
        ({"seed": -(2**63) - 1}, r"seed=-\d+ must be None, -1 or an int in \[-2\*\*63, 2\*\*64\)"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be None, -1 or"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids=\[-1\] must be a list of token ids, ints >= 0"),
        ({"logprobs": 21}, r"logprobs=21 must be None or an int in \[0, 20\]"),
        ({"logprobs": -1}, r"logprobs=-1 must be None or an int in \[0, 20\]"),
        ({"prompt_logprobs": False}, r"prompt_logprobs=False must be None or an int in \[0, 20\]"),
        ({"min_tokens": -1}, "min_tokens=-1 must be an int >= 0"),
        ({"min_tokens": 17}, "min_tokens=17 must be at most max_tokens=16"),
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1 must be in \[-2, 2\]"),
        ({"frequency_penalty": "x"}, r"frequency_penalty='x' must be in \[-2, 2\]"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be a number > 0, at most 3.4e38"),
        ({"logit_bias": {"1": 2}}, "logit_bias={'1': 2} must be a mapping of token ids, ints >= 0, to num"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias={1: nan} must be a mapping of token ids"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias={1: inf} must be a mapping of token ids"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\] must be a mapping of token ids"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\] must be None or at least one token id"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5 must be a list of token ids"),
        ({"bad_words": "ab"}, "bad_words='ab' must be a list of Unicode texts that are not empty"),
        ({"stop": ["a", ""]}, r"stop=\['a', ''\] must be a list of Unicode texts that are not empty"),
        ({"stop": "\ud800"}, "stop=.* must be a list of Unicode texts"),
        ({"stop": "a", "detokenize": False}, r"stop=\('a',\) must be None with detokenize=False"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1 must be True or False"),
        (
            {"output_kind": 1},
            "output_kind=1 must be one of RequestOutputKind.CUMULATIVE, DELTA and FINAL_ONLY",
        ),
    ],
)
def test_bad_sampling_params_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' must be one of auto, float32, bfloat16, float16"),
        ({"attention": "triton"}, "attention='triton' must be one of auto, mosaic_gpu, native, xla"),
        ({"block_size": 0}, "block_size=0 must be a positive int"),
        ({"block_size": 2048}, "block_size=2048 must be a positive int, at most 1024"),
        ({"num_blocks": 1}, "num_blocks=1 must be None or an int >= 2"),
        ({"num_blocks": -5}, "num_blocks=-5 must be None or an int >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a positive int"),
        ({"max_num_seqs": 5000}, "max_num_seqs=5000 must be a positive int, at most 4096"),
        ({"max_model_len": 1}, "max_model_len=1 must be None or an int >= 2"),
        (
            {"max_num_batched_tokens": 47},
            "max_num_batched_tokens=47 must be None or an int >= 48, max_num_seqs and one tile of 32 prompt",
        ),
        ({"max_num_batched_tokens": "64"}, "max_num_batched_tokens='64' must be None or an int >= 48"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, "max_num_batched_tokens=64 must .* >= 96"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"reuse_answers": 1}, "reuse_answers=1 must be True or False"),
        ({"reuse_answers": True, "enable_prefix_caching": False}, "reuse_answers=True must be False without"),
        ({"eviction_policy": "mru"}, "eviction_policy='mru' must be one of lru, lru_split, fifo"),
        ({"preemption_mode": "kill"}, "preemption_mode='kill' must be one of recompute, swap"),
        ({"preemption_mode": ["swap"]}, r"preemption_mode=\['swap'\] must be one of recompute, swap"),
        ({"preemption_mode": "swap"}, "num_host_blocks=0 must be an int >= 2 to swap to"),
        (
            {"preemption_mode": "swap", "num_host_blocks": 1},
            "num_host_blocks=1 must be an int >= 2 to swap to",
        ),
        (
            {"preemption_mode": "swap", "num_host_blocks": True},
            "num_host_blocks=True must be an int >= 2 to swap to",
        ),
        ({"num_host_blocks": 9}, "num_host_blocks=9 must be 0 unless preemption_mode is 'swap'"),
        ({"num_host_blocks": -1}, "num_host_blocks=-1 must be 0 unless preemption_mode is 'swap'"),
        ({"scheduling_policy": "lottery"}, "scheduling_policy='lottery' must be one of fcfs, priority"),
        ({"scheduling_policy": None}, "scheduling_policy=None must be one of fcfs, priority"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 must be in \(0, 1\]"),
        ({"num_blocks": 2**27}, "num_blocks=134217728 must be None or an int >= 2, at most 134217727"),
        ({"max_model_len": 2**31}, "max_model_len=2147483648 must be None or an int >= 2, at most"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens=1000000000 must be .* at most 1048576"),
        ({"dtype": np.int8}, "dtype=<class 'numpy.int8'> must be one of"),
        ({"dtype": None}, "dtype=None must be one of"),
        ({"gpu_memory_utilization": float("nan")}, r"gpu_memory_utilization=nan must be in \(0, 1\]"),
        ({"seed": "x"}, r"seed='x' must be an int in \[-2\*\*63, 2\*\*64\)"),
        ({"max_logprobs": 100}, r"max_logprobs=100 must be an int in \[0, 20\], as many as a step tells of"),
        ({"max_logprobs": -1}, "max_logprobs=-1 must be an int in"),
        (
            {"speculative_config": 3},
            'speculative_config=3 must be None or a mapping such as {"method": "ngram"',
        ),
        ({"speculative_config": "{"}, "speculative_config='{' must be None or a mapping"),
        (
            {"speculative_config": {"models": "x"}},
            "speculative_config: key='models' must be one of method, num_s",
        ),
        (
            {"speculative_config": {"method": "medusa"}},
            "method='medusa' must be 'ngram', 'suffix', 'draft_model', 'eagle3', 'mtp' or 'grammar': other",
        ),
        (
            {"speculative_config": {"method": "eagle3"}},
            "speculative_config: model=None must be the name or the directory of the head that drafts",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 32}},
            r"speculative_config: num_speculative_tokens=32 must be an int in \[1, 31\]",
        ),
        (
            {"speculative_config": {"disable_by_batch_size": 0}},
            r"speculative_config: disable_by_batch_size=0 must be an int in \[1, 2147483647\]",
        ),
        (
            {"speculative_config": {"prompt_lookup_max": 3, "prompt_lookup_min": 4}},
            r"speculative_config: prompt_lookup_min=4 must be an int in \[1, prompt_lookup_max=3\]",
        ),
        (
            {"speculative_config": {"method": "suffix", "prompt_lookup_max": 3}},
            "speculative_config: prompt_lookup_max=3 must be left out: it is of method 'ngram'",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 7}},
            r"speculative_config: suffix_decoding_max_tree_depth=7 must be an int in \[8, 64\]",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 9999}},
            r"suffix_decoding_max_cached_requests=9999 must be an int in \[0, 4096\]",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_spec_factor": 0}},
            r"suffix_decoding_max_spec_factor=0 must be a number in \(0, 31\]",
        ),
        (
            {"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}},
            r"suffix_decoding_min_token_prob=1.5 must be a number in \[0, 1\]",
        ),
        (
            {"speculative_config": {"method": "draft_model"}},
            "speculative_config: model=None must be the name or the directory of the model that drafts",
        ),
        (
            {"speculative_config": {"method": "ngram", "model": "x"}},
            "speculative_config: model='x' must be left out: it is of method 'draft_model'",
        ),
        (
            {"speculative_config": {"model": "x", "quantization": 4}},
            "speculative_config: quantization=4 must be None or a string",
        ),
        (
            {"enable_trace_replay": True, "speculative_config": {"method": "ngram"}},
            r"speculative_config=.* must be None with enable_trace_replay",
        ),
        (
            {"logprobs_mode": "raw"},
            "logprobs_mode='raw' must be one of raw_logprobs, processed_logprobs, raw_l",
        ),
    ],
)
def test_bad_engine_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**options)


def test_drafts_are_asked_for_in_json_or_python():
    asked = EngineConfig(speculative_config='{"num_speculative_tokens": 3}').speculative_config
    assert asked == EngineConfig(speculative_config=dataclasses.asdict(asked)).speculative_config
    assert dataclasses.astuple(asked) == ("ngram", 3, 4, 2, *[None] * 7)
    by_suffix = EngineConfig(speculative_config={"method": "suffix"}).speculative_config
    assert dataclasses.astuple(by_suffix) == ("suffix", 7, None, None, 24, 0, 1.0, 0.1, *[None] * 3)
    assert by_suffix == EngineConfig(speculative_config=dataclasses.asdict(by_suffix)).speculative_config
    by_model = EngineConfig(speculative_config={"model": "x", "quantization": "int4"}).speculative_config
    assert (by_model.method, by_model.model, by_model.quantization) == ("draft_model", "x", "int4")
    assert by_model == EngineConfig(speculative_config=dataclasses.asdict(by_model)).speculative_config
    assert EngineConfig(speculative_config={"prompt_lookup_min": 6}).speculative_config.prompt_lookup_max == 6


def test_the_engine_offers_every_policy_that_keeps_content():
    assert [*get_args(EvictionPolicy)] == [*EVICTION_POLICIES]
    assert {policy.name for policy in POLICIES.values() if policy.keeps_content} < {*EVICTION_POLICIES}


def test_a_mistake_is_a_value_error_and_the_defaults_are_good():
    assert issubclass(InputError, ValueError)
    assert SamplingParams() == SamplingParams(max_tokens=16, temperature=1.0)
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)
    assert EngineConfig().dtype == "auto"


def test_sampling_params_are_brought_into_one_form_and_copied():
    params = SamplingParams(stop="a", bad_words=["b", "b"], logit_bias={np.int64(3): 1}, seed=-1)
    assert (params.stop, params.bad_words, params.logit_bias) == (("a",), ("b",), {3: 1.0})
    assert params.seed is None
    copy = params.clone()
    assert copy == params
    assert copy.logit_bias is not params.logit_bias
    assert SamplingParams(logit_bias={}, stop=None, bad_words=None) == SamplingParams()


def test_each_bit_of_a_seed_counts_and_small_ones_are_the_devices_own():
    assert [seed_bits(seed) for seed in (0, 7, 2**32 - 1)] == [0, 7, 2**32 - 1]
    large = 0x123456789ABCDEF0
    drawn = {seed_bits(seed) for seed in (large, *(large ^ 2**bit for bit in range(64)))}
    assert len(drawn) == 33  # a bit and the one 32 places above it change the same
    assert large not in drawn
    assert all(0 <= bits < 2**32 for bits in (*drawn, seed_bits(-(2**63)), seed_bits(2**64 - 1)))
    assert SamplingParams(n=2, seed=2**64 - 1).of_answer(1).seed == 0
    assert SamplingParams(n=2, seed=-2).of_answer(1).seed == 2**64 - 1
    assert EngineConfig(seed=2**63).seed == 2**63


def test_optional_parameters_are_as_servers_get_them():
    nothing = dict.fromkeys(set(SamplingParams.__dataclass_fields__) - {"max_tokens"})
    assert SamplingParams.from_optional(**nothing) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    given = SamplingParams.from_optional(logit_bias={"7": 500, 8: -200, "9": 1}, temperature=None)
    assert given == SamplingParams(logit_bias={7: 100, 8: -100, 9: 1})
    for bias in ({"x": 1}, {"1": "2"}, {"1": float("nan")}, {"1": True}, 3):
        with pytest.raises(InputError, match="^logit_bias=.* must be a mapping of token ids"):
            SamplingParams.from_optional(logit_bias=bias)


def test_numbers_and_types_of_other_libraries_are_pythons_own_afterwards():
    given = {"max_tokens": np.int64(5), "temperature": np.float32(0.5), "top_k": -1, "seed": np.uint32(7)}
    params = SamplingParams(**given, stop_token_ids=[np.int32(3)], top_p=1)
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, top_k=0, seed=7, stop_token_ids=(3,), top_p=1.0
    )
    for name in ("max_tokens", "temperature", "seed", "top_p"):
        assert type(getattr(params, name)) in (int, float)
    assert SamplingParams(max_tokens=None, stop_token_ids=None).stop_token_ids == ()
    config = EngineConfig(
        block_size=np.int16(8), num_blocks=np.int64(9), gpu_memory_utilization=np.float64(0.5)
    )
    assert (type(config.block_size), type(config.num_blocks)) == (int, int)
    assert type(EngineConfig(tensor_parallel_sums=np.int64(8)).tensor_parallel_sums) is int
    for dtype in ("half", np.float16, np.dtype("float16"), jnp.float16):
        assert EngineConfig(dtype=dtype).dtype == "float16"
    assert EngineConfig(dtype=jnp.bfloat16).dtype == "bfloat16"
    assert EngineConfig(dtype="float").dtype == "float32"


@pytest.mark.parametrize(
    ("options", "num_tiles"),
    [
        ({}, 16),
        ({"max_num_seqs": 64}, 16),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 36}, 1),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 67}, 1),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 68}, 2),
    ],
)
def test_what_decoding_rows_leave_of_the_budget_goes_to_whole_prompt_tiles(options, num_tiles):
    assert EngineConfig(**options).num_prefill_tiles == num_tiles
