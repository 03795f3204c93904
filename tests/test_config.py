"""What a user may choose: every refusal names the value and the rule."""

import pytest

from jaxpaged.config import EngineConfig, InputError, SamplingParams


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
    ],
)
def test_bad_sampling_params_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' must be one of auto, float32, bfloat16, float16"),
        ({"block_size": 0}, "block_size=0 must be a positive int"),
        ({"block_size": 2048}, "block_size=2048 must be at most 1024"),
        ({"num_blocks": 1}, "num_blocks=1 must be None or an int >= 2"),
        ({"num_blocks": -5}, "num_blocks=-5 must be None or an int >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a positive int"),
        ({"max_num_seqs": 5000}, "max_num_seqs=5000 must be at most 4096"),
        ({"max_model_len": 1}, "max_model_len=1 must be None or an int >= 2"),
        ({"max_prefill_tokens": 40}, "max_prefill_tokens=40 must be a multiple of 32"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization=1.5 must be in \(0, 1\]"),
        ({"seed": "x"}, r"seed='x' must be an int in \[0, 2\*\*32\)"),
    ],
)
def test_bad_engine_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**options)


def test_a_mistake_is_a_value_error_and_the_defaults_are_good():
    assert issubclass(InputError, ValueError)
    assert SamplingParams() == SamplingParams(max_tokens=16, temperature=1.0)
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)
    assert EngineConfig().dtype == "auto"
