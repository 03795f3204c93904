"""SmolLM2-135M-Instruct with its real weights, against what transformers answers with them in float32."""

import json
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text())["prompts"]
# Below this gap between the two best logits, the order of sums may decide: there a comparison ends.
MIN_GAP = 1e-3


@pytest.fixture(scope="module", params=[None, pytest.param("gguf", marks=pytest.mark.slow)])
def llm(request):
    """Return an engine with the real weights. Kept quantised they are the same, to the last bit."""
    return LLM("smollm2", dtype="float32", quantization=request.param, max_num_seqs=4, max_model_len=256)


def test_prompts_become_the_same_tokens(llm):
    for golden in GOLDENS:
        if golden["chat"]:
            prompt = llm.render_chat([{"role": "user", "content": golden["prompt"]}])
            assert prompt["prompt_token_ids"] == golden["prompt_token_ids"]
        else:
            assert llm.tokenizer.encode(golden["prompt"]) == golden["prompt_token_ids"]


def test_greedy_tokens_equal_transformers(llm):
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    prompts = [golden["prompt_token_ids"] for golden in GOLDENS]
    together = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
    for golden, answer in zip(GOLDENS, together, strict=True):
        unsure = [i for i, gap in enumerate(golden["gaps"]) if gap < MIN_GAP]
        end = unsure[0] if unsure else len(golden["gaps"])
        assert end == 64, "the goldens were chosen to be sure to the end"
        assert answer.token_ids[:end] == golden["token_ids"][:end]
        assert len(answer.token_ids) == 64
        assert answer.finish_reason == "length"
    [alone] = llm.generate(prompts[2], params, use_tqdm=False)
    assert alone.outputs[0] == together[2]


def test_it_stops_at_the_end_of_its_turn(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [result] = llm.chat(question, SamplingParams(max_tokens=64, temperature=0), use_tqdm=False)
    [answer] = result.outputs
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == llm.tokenizer.eos_token_id


@pytest.mark.slow
def test_answers_are_the_same_bit_for_bit_in_any_company(llm):
    """Cold, in company and with hits, in the shapes of a real model; greedy and sampled."""
    assert_same_in_any_company(llm)
    assert llm.engine.stats.num_preemptions == 0


@pytest.mark.slow
def test_answers_in_bfloat16_are_the_same_when_their_rows_give_way():
    llm = LLM("smollm2", dtype="bfloat16", max_num_seqs=4, max_model_len=192, num_blocks=1 + 12)
    assert_same_in_any_company(llm)
    assert llm.engine.stats.num_preemptions > 0


def assert_same_in_any_company(llm):
    shared = GOLDENS[1]["prompt_token_ids"] + GOLDENS[1]["token_ids"]
    prompts = [shared[:48] + GOLDENS[i]["token_ids"][: 9 * i] for i in range(4)]
    params = [SamplingParams(max_tokens=24, temperature=i % 2, seed=i, logprobs=0) for i in range(4)]

    def answers(prompts, params):
        results = llm.generate(prompts, params, use_tqdm=False)
        return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results]

    alone = []
    for prompt, p in zip(prompts, params, strict=True):
        llm.reset_prefix_cache()
        alone += answers(prompt, p)
    assert answers(prompts[::-1], params[::-1]) == alone[::-1]
    assert answers(prompts, params) == alone
    assert llm.engine.stats.num_hit_tokens > 0
