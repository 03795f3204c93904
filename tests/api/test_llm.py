"""LLM: prompts and parameters in all their forms, results in vLLM's shape, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import jaxpaged
from jaxpaged import BeamSearchParams, InputError, SamplingParams
from jaxpaged.engine.driver import Driver
from jaxpaged.models import loading
from jaxpaged.models.weights import by_role
from reference import model as reference_model
from tests import tiny
from tests.api.tiny_llm import GREEDY, OPTIONS, reference_answer
from tests.tiny_gguf import write_gguf


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


@pytest.mark.nightly
def test_a_model_with_a_sliding_window_answers_as_transformers_does():
    """Prompts longer and shorter than the window, beside each other and in more than one tile."""
    folder = Path(__file__).parents[1] / "goldens" / "mistral_window"
    golden = json.loads((folder / "golden.json").read_text())
    prompt, answer = golden["token_ids"], golden["answer"]
    llm = jaxpaged.LLM(folder, **OPTIONS)
    params = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
    results = llm.generate([prompt[:5], prompt, prompt[:40]], params, use_tqdm=False)
    assert results[1].outputs[0].token_ids == answer
    checkpoint = loading.open_checkpoint(folder)
    weights = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    for result in results:
        want = reference_model.generate(checkpoint.config, weights, result.prompt_token_ids, len(answer))
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


def test_nobody_reads_an_answer_before_its_end(llm, monkeypatch):
    """A run of the loop may then be longer than where tokens are read as they come."""
    asked, submit = [], llm.engine.submit_all

    def note(requests, sink):
        asked.extend(requests)
        return submit(requests, sink)

    monkeypatch.setattr(llm.engine, "submit_all", note)
    llm.generate(["a", "bc"], SamplingParams(n=2, max_tokens=2, temperature=1, seed=3), use_tqdm=False)
    assert [request.is_read_whole for request in asked] == [True] * 4


def test_chat_applies_the_template_to_one_conversation_or_several(llm):
    turn = [{"role": "user", "content": "ab"}]
    [one] = llm.chat(turn, GREEDY, use_tqdm=False)
    assert one.prompt == "user:ab<|end|>"
    assert one.prompt_token_ids == llm.tokenizer.encode("user:ab<|end|>")
    two = llm.chat([turn, [*turn, {"role": "assistant", "content": "c"}]], GREEDY, use_tqdm=False)
    assert [r.prompt for r in two] == ["user:ab<|end|>", "user:ab<|end|>assistant:c<|end|>"]
    assert two[0].outputs == one.outputs


def test_a_conversation_that_is_too_long_is_cut_where_that_is_asked_for(llm):
    """The end that is named is cut, also where no context could hold the text; a short text stays whole."""
    messages = [{"role": "user", "content": "ab" * 3000 + "12"}]
    params = SamplingParams(truncate_prompt_tokens=3, max_tokens=1)
    [left] = llm.chat(messages, params, use_tqdm=False)
    assert llm.tokenizer.decode(left.prompt_token_ids) == "12<|end|>"
    params.truncation_side = "right"
    [right] = llm.chat(messages, params, use_tqdm=False)
    assert llm.tokenizer.decode(right.prompt_token_ids) == "use"
    with pytest.raises(InputError, match="characters, more than max_model_len=128 tokens hold"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_what_is_changed_after_a_request_was_made_does_not_reach_it(llm):
    params = SamplingParams(max_tokens=6, temperature=0, logit_bias={5: 3.0})
    want = llm.generate([[4, 2]], params, use_tqdm=False)[0].outputs[0].token_ids
    [request] = llm.engine.door.admit([4, 2], params)
    params.max_tokens, params.logit_bias = 1, None
    assert (request.params.max_tokens, request.params.logit_bias) == (6, {5: 3.0})
    assert [len(r.outputs[0].token_ids) for r in llm.generate([[4, 2]], params, use_tqdm=False)] == [1]
    params.max_tokens, params.logit_bias = 6, {5: 3}
    assert llm.generate([[4, 2]], params, use_tqdm=False)[0].outputs[0].token_ids == want
    params.logit_bias[5] = float("nan")  # in place, where no assignment sees it
    with pytest.raises(InputError, match="^logit_bias={5: nan} must be"):
        llm.generate([[4, 2]], params, use_tqdm=False)
    llm.get_default_sampling_params().max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 16


def test_sampling_is_repeatable_by_seed_and_differs_without(llm):
    def sampled(seed):
        params = SamplingParams(max_tokens=12, temperature=3.0, seed=seed, ignore_eos=True)
        return [r.outputs[0].token_ids for r in llm.generate(["ab", "ab"], params, use_tqdm=False)]

    assert sampled(1) == sampled(1)
    assert sampled(1)[0] == sampled(1)[1]
    assert sampled(1) != sampled(2)
    first, second = sampled(None)
    assert first != second


def test_several_answers_share_a_prompt_and_each_is_what_it_is_alone(llm):
    """Seven of one prompt where four can run, beside another: a prompt is computed once, or found."""
    params = SamplingParams(n=7, max_tokens=9, temperature=3.0, seed=2**32 - 3, ignore_eos=True, logprobs=1)
    prompts = [[5, *range(40)], [6]]
    llm.reset_prefix_cache()
    before = llm.engine.stats
    results = llm.generate(prompts, params, use_tqdm=False)
    done = llm.engine.stats
    assert done.num_prompt_tokens - before.num_prompt_tokens < 2 * len(prompts[0])
    assert done.num_free_blocks == done.num_blocks
    for prompt, result in zip(prompts, results, strict=True):
        assert [answer.index for answer in result.outputs] == list(range(7))
        assert len({tuple(answer.token_ids) for answer in result.outputs}) == 7
        for answer in result.outputs:
            alone = SamplingParams(
                max_tokens=9,
                temperature=3.0,
                seed=params.seed + answer.index,
                ignore_eos=True,
                logprobs=1,
            )
            [[want]] = [r.outputs for r in llm.generate([prompt], alone, use_tqdm=False)]
            assert answer == dataclasses.replace(want, index=answer.index)
    with pytest.raises(
        InputError, match="^n=2 must be 1 with temperature=0, where all answers are the same$"
    ):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InputError, match="^n=7 must be 1: for several, give `submit_all`"):
        llm.engine.submit([1], params)


def test_tokens_found_in_the_prefix_cache_are_counted(llm):
    [prompt] = tiny.prompts([20], seed=77)
    [cold] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert cold.num_cached_tokens == 0
    both = llm.generate([prompt, prompt[:16]], GREEDY, use_tqdm=False)
    # Two blocks of 8; of a prompt that is all there, the last token is computed, and so its block.
    assert [result.num_cached_tokens for result in both] == [16, 8]
    assert both[0].outputs == cold.outputs


def test_bad_words_are_not_in_the_answer(llm):
    """A word of one token, in a row beside one that may have it; and one of several."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    [free] = llm.generate([[7, 9]], params, use_tqdm=False)
    token_ids = free.outputs[0].token_ids
    words = [llm.tokenizer.decode([token]).strip() for token in token_ids]
    word = next(word for word in words if word and len(llm.tokenizer.encode(word)) == 1)
    text = free.outputs[0].text
    longer = next(text[i : i + 3] for i in range(len(text)) if text[i : i + 3].isalnum())
    for bad in ([word], [longer], [longer, word]):
        asked = [dataclasses.replace(params, bad_words=bad), params]
        without, with_it = llm.generate([[7, 9]] * 2, asked, use_tqdm=False)
        assert with_it.outputs == free.outputs
        ids = without.outputs[0].token_ids
        for each in bad:
            its = llm.tokenizer.encode(each, add_special_tokens=False)
            assert its not in [ids[i : i + len(its)] for i in range(len(ids))]


def test_what_needs_a_tokenizer_is_refused_without_one(path):
    llm = jaxpaged.LLM(path, skip_tokenizer_init=True, **OPTIONS)
    for options in ({"stop": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(InputError, match="must be None for a model without a tokenizer"):
            llm.generate([[1]], SamplingParams(**options), use_tqdm=False)
    llm.engine.close()


@pytest.mark.nightly
def test_without_parameters_the_models_own_defaults_are_taken(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "goldens" / "gqa_tied", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.0, "max_new_tokens": 3, "eos_token_id": null}'
    )
    for source, defaults in (
        ("auto", SamplingParams(temperature=0, max_tokens=3)),
        ("vllm", SamplingParams()),
    ):
        llm = jaxpaged.LLM(tmp_path, generation_config=source, **OPTIONS)
        assert llm.get_default_sampling_params() == defaults
        [result] = llm.generate([[1, 2]], use_tqdm=False)
        assert len(result.outputs[0].token_ids) <= defaults.max_tokens
        llm.engine.close()


def test_another_tokenizer_or_none_may_be_asked_for(path, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    llm.tokenizer.save_pretrained(tmp_path)
    other = jaxpaged.LLM(path, tokenizer=tmp_path, **OPTIONS)
    assert other.tokenizer.encode("ab 12") == llm.tokenizer.encode("ab 12")
    none = jaxpaged.LLM(path, skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(InputError, match="prompt must be token ids: the model has no tokenizer"):
        none.generate("ab", use_tqdm=False)
    with pytest.raises(InputError, match="chat: the model must have a chat template"):
        none.chat([{"role": "user", "content": "a"}])


@pytest.mark.slow
def test_by_default_a_second_call_finds_all_prompts_of_the_first(path):
    """Six prompts through two rows: more than the rows hold at once stays findable."""
    llm = jaxpaged.LLM(path, **OPTIONS | {"num_blocks": None, "max_num_seqs": 2})
    prompts = tiny.prompts([60, 70, 80, 90, 100, 110], seed=5)
    for hits in ([0] * 6, [(len(prompt) - 1) // 8 * 8 for prompt in prompts]):
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [result.num_cached_tokens for result in results] == hits


def test_blocks_are_kept_for_answers_and_searches_and_of_nothing_else(llm):
    """An engine without tiers says so; an export has no blocks to keep."""
    prompt, message = {"prompt": "ab", "kv_cache_ttl": 5}, "kv_cache_ttl=5 must be "
    with pytest.raises(InputError, match=message + "None without kv_offloading_size"):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    with pytest.raises(InputError, match=message + "None without kv_offloading_size"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(InputError, match=message + "left out here"):
        llm.export_blocks(prompt)
    with pytest.raises(InputError, match="continue_from=.* must be left out here"):
        llm.beam_search({"prompt": "ab", "continue_from": [5]}, BeamSearchParams(beam_width=2, max_tokens=2))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "^prompt='' must not be empty"),
        (["a", ""], GREEDY, "^prompt 1: prompt='' must not be empty"),
        (["a", []], GREEDY, "prompt 1: the prompt must have at least one token"),
        (["a", 7], GREEDY, "prompt 1: prompt=7 must be a string, a list of token ids, or a mapping"),
        (
            [{"text": "a"}],
            GREEDY,
            "^key of a prompt='text' must be one of prompt, prompt_token_ids, cache_salt",
        ),
        (["a", [5, 1000]], GREEDY, "prompt 1: prompt token=1000 must be a token id"),
        ([[5, 1000]], GREEDY, "^prompt token=1000 must be a token id"),
        ({"prompt_token_ids": 5}, GREEDY, "^prompt_token_ids=5 must be a list of token ids"),
        ({"prompt_token_ids": "ab"}, GREEDY, "^prompt_token_ids='ab' must be a list of token ids"),
        (
            ["a", [1] * 200],
            GREEDY,
            "prompt 1: the prompt has 200 tokens, must have less than max_model_len=128",
        ),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries, must have one for each of 2 prompts"),
        ("a", [{"max_tokens": 3}], "sampling_params={'max_tokens': 3} must be a SamplingParams"),
        ("a", 3, "sampling_params=3 must be a SamplingParams or a list of them"),
        (
            "a",
            SamplingParams(allowed_token_ids=[0], min_tokens=3),
            r"^allowed_token_ids=\[0\] must have a token to choose as an answer's first: min_tokens=3 bars",
        ),
        (
            "a",
            SamplingParams(allowed_token_ids=[5], bad_words=["#"]),
            r"^allowed_token_ids=\[5\] must have a token to choose as an answer's first: bad_words bar some$",
        ),
        (
            "a",
            SamplingParams(allowed_token_ids=[5, 6], bad_words=["##", "#$"]),
            r"^allowed_token_ids=\[5, 6\] must have a token to choose behind the answer's tokens \[5\]: ",
        ),
        (
            "a",
            SamplingParams(stop_token_ids=[*range(97)], min_tokens=1),
            "^the vocabulary must have a token to choose as an answer's first: min_tokens=1 bars those that",
        ),
        ("a", SamplingParams(logprobs=5), "^logprobs=5 must be at most max_logprobs=4$"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_runs(llm, prompts, params, message):
    steps = llm.engine.stats.num_steps
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    tiny.until(lambda: llm.engine.is_idle)
    assert llm.engine.stats.num_steps == steps


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([[]], "messages=.* must be a list with at least one message"),
        ([{"role": "user"}], "messages.0.content=None must be a string or a list of parts"),
        ([{"role": "user", "content": 3}], "messages.0.content=3 must be a string or a list of parts"),
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
