"""Importance ratio of learner and sampler: exactly 1 before the first update, in every company."""

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.research.learn.learner import padded
from tests import tiny, tiny_lora
from tests.engine.test_updates import compiling_nothing
from tests.models.test_decoder import GOLDENS
from tests.tiny_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("optimized")
NUM_NEW = 20  # tokens of each answer
# Pools that are too small for all full rows: here a row holds its window, and the tile that it computes.
TWO_KINDS = {"num_blocks": 1 + 24, "max_model_len": 96}  # nothing stays in it to be found
FEW = {"num_blocks": 1 + 16, "max_model_len": 96}
POOLS = {
    "mistral_window": {"num_blocks": 1 + 8, "max_num_batched_tokens": 4 + 32},
    "families/gemma2": TWO_KINDS,
    "families/gpt_oss": TWO_KINDS,
    "families/falcon_h1": FEW,
    "families/jamba": FEW,
    "families/lfm2": TWO_KINDS,
    "families/minimax": FEW,
    "families/nemotron_h_experts": FEW,
    "families/qwen3_5_text": TWO_KINDS,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # Each model with one dtype; the other one at night. A dense one is in tests/api/test_scoring.py, too.
        pytest.param("gqa_tied", "bfloat16", marks=pytest.mark.nightly),
        # By day `tests/engine/test_bits.py` has rows with windows that give way.
        pytest.param("mistral_window", "float32", marks=pytest.mark.nightly),
        pytest.param("families/mixtral", "bfloat16", marks=pytest.mark.slow),
        pytest.param("lora", "float32", marks=pytest.mark.slow),
        pytest.param("gqa_tied", "float32", marks=pytest.mark.nightly),
        pytest.param("families/qwen3", "float32", marks=pytest.mark.nightly),
        pytest.param("mistral_window", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("families/mixtral", "float32", marks=pytest.mark.nightly),
        pytest.param("lora", "bfloat16", marks=pytest.mark.nightly),
        # Layers with states.
        *(
            pytest.param(f"families/{name}", "float32", marks=pytest.mark.nightly)
            for name in ("lfm2", "qwen3_5_text", "nemotron_h_experts", "falcon_h1", "jamba", "minimax")
        ),
        pytest.param("families/deepseek_v3", "float32", marks=pytest.mark.nightly),  # latents
        # Caps of scores and logits; sinks and experts. Both have layers with a window, and without.
        pytest.param("families/gemma2", "float32", marks=pytest.mark.nightly),
        pytest.param("families/gpt_oss", "float32", marks=pytest.mark.nightly),
    ],
)
def test_the_importance_ratio_is_exactly_one(name, dtype, tmp_path):
    """Prompts share a prefix, each has three answers, and the pool is too small for all full rows."""
    options = tiny.DEFAULTS | {"dtype": dtype, "generation_config": "vllm"} | POOLS.get(name, tiny.SMALL)
    adapter, request = None, None
    if name == "lora":
        llm = LLM(write_gguf(tmp_path / "tiny.gguf"), **options | tiny_lora.LORA)
        request = tiny_lora.request(tmp_path, 0)
        adapter = llm.learner().adapter(request.lora_path)
    else:
        llm = LLM(GOLDENS / name, skip_tokenizer_init=True, **options)
    prefix, *tails = ([3 + token % 58 for token in its] for its in tiny.prompts([24, 16, 3, 9]))
    prompts = [[*prefix, *tail] for tail in tails]
    params = SamplingParams(
        n=3, max_tokens=NUM_NEW, temperature=1, seed=5, logprobs=0, ignore_eos=True, detokenize=False
    )
    before = llm.engine.stats.num_preemptions
    for _ in range(2):  # the second time with hits on whole prompts
        results = llm.generate(prompts, params, lora_request=request)
    assert llm.engine.stats.num_preemptions > before
    if POOLS.get(name) not in (TWO_KINDS, FEW):
        assert all(result.num_cached_tokens >= 24 for result in results)
    learner = llm.learner()
    assert_ratios_are_one(llm, learner, results, adapter)
    if name == "lora":
        learned = jax.tree.map(lambda its: its * its.dtype.type(1.5), adapter)
        former = [answer.token_ids for result in results for answer in result.outputs]
        with compiling_nothing():
            llm.update_lora(request, learned)
            results = llm.generate(prompts, params, lora_request=request)
        assert [answer.token_ids for result in results for answer in result.outputs] != former
        assert_ratios_are_one(llm, learner, results, learned)


def assert_ratios_are_one(llm, learner, results, adapter):
    told, whole = [], []
    for result in results:
        for answer in result.outputs:
            whole.append([*result.prompt_token_ids, *answer.token_ids])
            pairs = zip(answer.logprobs, answer.token_ids, strict=True)
            told.append([its[token].logprob for its, token in pairs])
    tokens, lengths = padded(whole)
    learned = np.asarray(learner.log_probs(llm.weights, tokens, lengths, adapter))
    its = np.stack([row[n - 1 - NUM_NEW : n - 1] for row, n in zip(learned, lengths, strict=True)])
    assert np.ptp(its) > 1
    ratio = np.exp(its - np.array(told, np.float32))
    assert ratio.tolist() == np.ones((9, NUM_NEW)).tolist()
