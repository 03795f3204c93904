"""LLM: prompts and parameters in all their forms, results in vLLM's shape, and what is refused."""

import json
from pathlib import Path

import pytest

import jaxpaged
from jaxpaged import InputError, SamplingParams
from jaxpaged.models import loading
from reference import model as reference_model
from tests import tiny
from tests.tiny_gguf import write_gguf

GREEDY = tiny.greedy(6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf")
    return jaxpaged.LLM(path, dtype="float32", max_num_seqs=4, block_size=8)


def reference_answer(token_ids: list[int]) -> list[int]:
    """The oracle's greedy answer, cut after the model's end-of-sequence token 0."""
    answer = tiny.reference_answer(tuple(token_ids), 6)
    return answer[: answer.index(0) + 1] if 0 in answer else answer


def test_results_have_vllms_shape(llm):
    [result] = llm.generate("ab 12", GREEDY, use_tqdm=False)
    assert result.prompt == "ab 12"
    assert result.prompt_token_ids == llm.tokenizer.encode("ab 12")
    assert result.finished
    [answer] = result.outputs
    assert answer.index == 0
    assert answer.token_ids == reference_answer(result.prompt_token_ids)
    assert answer.text == llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 0 else "length")


def test_a_model_with_a_sliding_window_answers_as_transformers_does():
    """Prompts longer and shorter than the window, beside each other and in more than one tile."""
    folder = Path(__file__).parent / "goldens" / "mistral_window"
    golden = json.loads((folder / "golden.json").read_text())
    prompt, answer = golden["token_ids"], golden["answer"]
    llm = jaxpaged.LLM(folder, dtype="float32", max_num_seqs=4, block_size=8)
    params = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
    results = llm.generate([prompt[:5], prompt, prompt[:40]], params, use_tqdm=False)
    assert results[1].outputs[0].token_ids == answer
    checkpoint = loading.open_checkpoint(folder)
    for result in results:
        want = reference_model.generate(
            checkpoint.config, checkpoint.load_weights(), result.prompt_token_ids, len(answer)
        )
        assert result.outputs[0].token_ids == want


def test_all_forms_of_prompts_mean_the_same(llm):
    ids = llm.tokenizer.encode("ab 12")
    forms = ["ab 12", ids, {"prompt_token_ids": ids}, {"prompt": "ab 12"}]
    answers = [result.outputs[0].token_ids for result in llm.generate(forms, GREEDY, use_tqdm=False)]
    assert answers == [reference_answer(ids)] * 4
    for one in forms:
        assert llm.generate(one, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == answers[0]


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 5, 3)]
    results = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5, 3]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_more_prompts_than_rows_come_back_in_order(llm):
    prompts = tiny.prompts([1 + 3 * i for i in range(11)])
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [r.outputs[0].token_ids for r in results] == [reference_answer(p) for p in prompts]
    assert llm.stats.num_prompt_tokens == sum(map(len, prompts))
    assert llm.stats.num_new_tokens == sum(len(r.outputs[0].token_ids) for r in results)


def test_chat_applies_the_template_to_one_conversation_or_several(llm):
    turn = [{"role": "user", "content": "ab"}]
    [one] = llm.chat(turn, GREEDY, use_tqdm=False)
    assert one.prompt == "user:ab<|end|>"
    assert one.prompt_token_ids == llm.tokenizer.encode("user:ab<|end|>")
    two = llm.chat([turn, [*turn, {"role": "assistant", "content": "c"}]], GREEDY, use_tqdm=False)
    assert [r.prompt for r in two] == ["user:ab<|end|>", "user:ab<|end|>assistant:c<|end|>"]
    assert two[0].outputs == one.outputs


def test_sampling_is_repeatable_by_seed_and_differs_without(llm):
    def sampled(seed):
        params = SamplingParams(max_tokens=12, temperature=3.0, seed=seed, ignore_eos=True)
        return [r.outputs[0].token_ids for r in llm.generate(["ab", "ab"], params, use_tqdm=False)]

    assert sampled(1) == sampled(1)
    assert sampled(1)[0] == sampled(1)[1]
    assert sampled(1) != sampled(2)
    first, second = sampled(None)
    assert first != second


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], GREEDY, "prompts must have at least one prompt"),
        ("", GREEDY, "prompt 0: '' must not be empty"),
        (["a", ""], GREEDY, "prompt 1: '' must not be empty"),
        (["a", []], GREEDY, "prompt 1: the prompt must have at least one token"),
        (["a", 7], GREEDY, "prompt 1: 7 must be a string, a list of token ids, or a mapping"),
        ([{"text": "a"}], GREEDY, "prompt 0: {'text': 'a'} must be a string"),
        ([[5, 1000]], GREEDY, "prompt 0: prompt token=1000 must be a token id"),
        (
            ["a", [1] * 200],
            GREEDY,
            "prompt 1: the prompt has 200 tokens, must have less than max_model_len=128",
        ),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries, must have one for each of 2 prompts"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_runs(llm, prompts, params, message):
    steps = llm.engine.progress.num_steps
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.engine.progress.num_steps == steps


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([[]], "messages=.* must be a list with at least one message"),
        ([{"role": "user"}], "must have a 'role' and a 'content'"),
        ([{"role": "user", "content": 3}], "must have a 'role' and a 'content'"),
        (["hello"], "must be a list with at least one message"),
    ],
)
def test_bad_messages_are_refused(llm, messages, message):
    with pytest.raises(InputError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="option 'blocksize' must be one of attention, block_size, "):
        jaxpaged.LLM("smollm2", blocksize=3)


def test_a_length_beyond_the_models_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(InputError, match="max_model_len=129 must be at most the model's 128"):
        jaxpaged.LLM(path, max_model_len=129)
