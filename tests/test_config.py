"""What a user may choose: every refusal names the value and the rule."""

from typing import get_args

import pytest

from jaxpaged.config import EngineConfig, EvictionPolicy, InputError, SamplingParams
from jaxpaged.memory.policies import POLICIES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be a positive int"),
        ({"max_tokens": -3}, "max_tokens=-3 must be a positive int"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be a positive int"),
        ({"max_tokens": True}, "max_tokens=True must be a positive int"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a number >= 0"),
        ({"temperature": float("inf")}, "temperature=inf must be a number >= 0"),
        ({"temperature": "hot"}, "temperature='hot' must be a number >= 0"),
        ({"top_k": -1}, "top_k=-1 must be an int >= 0"),
        ({"top_p": 0}, r"top_p=0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p=1.1 must be in \(0, 1\]"),
        ({"min_p": -0.5}, r"min_p=-0.5 must be in \[0, 1\]"),
        ({"seed": -1}, r"seed=-1 must be None or an int in \[0, 2\*\*32\)"),
        ({"seed": 2**32}, "seed=4294967296 must be None or"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids=\[-1\] must be at most 8 token ids >= 0"),
        ({"stop_token_ids": list(range(9))}, "must be at most 8 token ids"),
        ({"logprobs": 1}, r"logprobs=1 must be None or 0"),
        ({"logprobs": False}, r"logprobs=False must be None or 0"),
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
        ({"block_size": 2048}, "block_size=2048 must be at most 1024"),
        ({"num_blocks": 1}, "num_blocks=1 must be None or an int >= 2"),
        ({"num_blocks": -5}, "num_blocks=-5 must be None or an int >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a positive int"),
        ({"max_num_seqs": 5000}, "max_num_seqs=5000 must be at most 4096"),
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
        ({"eviction_policy": "fifo"}, "eviction_policy='fifo' must be one of lru, lru_split"),
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
        ({"seed": "x"}, r"seed='x' must be an int in \[0, 2\*\*32\)"),
    ],
)
def test_bad_engine_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**options)


def test_the_engine_offers_every_policy_that_keeps_content():
    keeping = [policy.name for policy in POLICIES.values() if policy.keeps_content]
    assert [*get_args(EvictionPolicy)] == keeping


def test_a_mistake_is_a_value_error_and_the_defaults_are_good():
    assert issubclass(InputError, ValueError)
    assert SamplingParams() == SamplingParams(max_tokens=16, temperature=1.0)
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)
    assert EngineConfig().dtype == "auto"


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
