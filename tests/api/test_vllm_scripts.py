"""Scripts written for vLLM, with their imports changed and nothing else; and the names they import."""

import dataclasses
import importlib
import re
import runpy
import time
from pathlib import Path

import pytest

import jaxpaged
from jaxpaged import (
    BeamSearchParams,
    EngineArgs,
    InputError,
    LLMEngine,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)
from jaxpaged.api import llm_engine
from jaxpaged.api.arg_utils import DEFAULT_MODEL, OF_LLM, AsyncEngineArgs
from jaxpaged.api.argument_parser import FlexibleArgumentParser
from jaxpaged.api.model import engine_config
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.models import loading
from tests import tiny, tiny_lora
from tests.tiny_gguf import write_gguf

GOLDENS = Path(__file__).parents[1] / "goldens"
SCRIPTS = Path(__file__).parents[2] / "examples" / "vllm_scripts"
GREEDY = tiny.greedy(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    """Make an engine with the sizes of test_llm.py, whose program it shares."""
    return jaxpaged.LLM.from_engine_args(EngineArgs(str(folder / "tiny.gguf"), **tiny.DEFAULTS))


@pytest.fixture(scope="module")
def script(folder, tmp_path_factory):
    """Call it with a script's name for what its `main` returns, on the tiny model."""
    changed = tmp_path_factory.mktemp("changed")

    def run(name, *flags, **more):
        source = (SCRIPTS / f"{name}.py").read_text()
        (changed / f"{name}.py").write_text(
            re.sub(r"^(from|import) vllm\b", r"\1 jaxpaged", source, flags=re.M)
        )
        module = runpy.run_path(str(changed / f"{name}.py"))
        kind = AsyncEngineArgs if name == "async_streaming" else EngineArgs
        sizes = [f"--{key}={value}" for key, value in tiny.DEFAULTS.items()]
        parser = kind.add_cli_args(FlexibleArgumentParser())
        args = parser.parse_args(["--model", str(folder / "tiny.gguf"), *sizes, *flags])
        vars(args).update(more)
        return module["main"](vars(args) if name == "chat" else args)

    return run


def reference(token_ids, length):
    answer = tiny.reference_answer(tuple(token_ids), length)
    return answer[: answer.index(0) + 1] if 0 in answer else answer


def test_basic_and_chat(script):
    for output in script("basic"):
        assert output.outputs[0].token_ids == reference(output.prompt_token_ids, 16)
    outputs = script("chat")
    assert [output.prompt for output in outputs] == [
        "user:Who\nam I?<|end|>",
        "system:Be short.<|end|>user:Hello<|end|>",
        "user: Who\nam I?\n",
        "system:Be short.<|end|>user:Hello<|end|>assistant:Hi, I am",
    ]
    for output in outputs:
        assert output.outputs[0].token_ids == reference(output.prompt_token_ids, 16)


def test_async_streaming_and_steps(script, llm, capsys):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    texts = script("async_streaming")
    want = [o.outputs[0].text for o in llm.generate(["The sea is", "The sky is", "The sun is"], params)]
    assert texts[:3] == want
    assert want[0].startswith(texts[3])
    assert "given-up: '' [abort]" in capsys.readouterr().out or texts[3] == want[0]
    finished = script("engine_steps")
    assert set(finished) == {"0", "1"}
    assert finished["0"].prompt == "To be or not to be,"
    assert finished["0"].outputs[0].token_ids == reference(finished["0"].prompt_token_ids, 12)
    assert len(finished["0"].outputs[0].logprobs) == len(finished["0"].outputs[0].token_ids)
    assert finished["0"].prompt_logprobs[0] is None


def test_logprobs_prefixes_and_beams(script, llm):
    [output] = script("logprobs")
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first, second = script("prefix_caching")
    assert [o.outputs for o in first] == [o.outputs for o in second]
    assert all(output.num_cached_tokens >= 64 for output in second)
    found = script("beam_search")
    params = jaxpaged.BeamSearchParams(beam_width=2, max_tokens=8)
    assert found == llm.beam_search(["The moon", "The stars"], params)


@pytest.mark.nightly
def test_adapters(script, folder):
    path = tiny_lora.write(folder / "adapter", 1)
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in tiny_lora.LORA.items() if value is not True
    ]
    alone, adapted = script("lora", "--enable-lora", *flags, lora_path=str(path))
    assert alone.outputs[0].token_ids == tiny_lora.reference_answer(None, alone.prompt_token_ids, 6)
    assert adapted.outputs[0].token_ids == tiny_lora.reference_answer(1, alone.prompt_token_ids, 6)
    assert adapted.lora_request.base_model_name == str(folder / "tiny.gguf")


PATHS = {
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "inputs": "PromptType TextPrompt TokensPrompt",
    "lora.request": "LoRARequest",
    "outputs": "CompletionOutput RequestOutput",
    "sampling_params": "BeamSearchParams RequestOutputKind SamplingParams",
    "utils": "FlexibleArgumentParser",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
}


def test_names_are_where_vllm_has_them():
    for module, names in PATHS.items():
        for name in names.split():
            found = getattr(importlib.import_module(f"jaxpaged.{module}"), name)
            assert getattr(jaxpaged, name, found) is found
    assert jaxpaged.AsyncLLMEngine is jaxpaged.AsyncLLM


def test_engine_args_are_the_options_of_llm(folder, llm):
    assert EngineArgs().model == DEFAULT_MODEL == loading.SMOLLM2
    args = EngineArgs(str(folder / "tiny.gguf"), enforce_eager=True, **tiny.DEFAULTS)
    assert jaxpaged.LLM(**dataclasses.asdict(args)).config == llm.config
    args.max_num_seqs = 0
    with pytest.raises(InputError, match="max_num_seqs=0 must be"):
        jaxpaged.LLM.from_engine_args(args)
    with pytest.raises(TypeError, match="max_seqs"):
        EngineArgs(max_seqs=1)
    with pytest.raises(InputError, match="engine_args='x' must be an EngineArgs"):
        LLMEngine.from_engine_args("x")


@pytest.mark.parametrize("path", ["tiny.gguf", GOLDENS / "gqa_tied"])
def test_a_users_rope_sets_how_long_sequences_may_be(path, folder):
    """vLLM's recipe for longer sequences, by each of its options; nothing is loaded before the refusal."""
    path = folder / path
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    for options in ({"rope_scaling": yarn}, {"hf_overrides": {"rope_parameters": yarn}}):
        with pytest.raises(InputError, match="max_model_len=4001 must be at most the model's 4000$"):
            jaxpaged.LLM(path, max_model_len=4001, **options)
    for options, message in (
        ({"hf_overrides": {"rope_scaling": yarn}, "rope_scaling": yarn}, "must be None beside hf_overrides"),
        ({"hf_overrides": [1]}, r"hf_overrides=\[1\] must be None or a mapping"),
        ({"hf_overrides": {"rope": yarn}}, "key='rope' must be a field of the model's config.json"),
        ({"hf_overrides": {"architectures": ["A"]}}, "must be None unless runner is 'pooling'"),
    ):
        with pytest.raises(InputError, match=message):
            jaxpaged.LLM(path, **options)


def test_engine_args_as_flags(capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="a")
    parser.add_argument("--my_own", type=int)
    flags = "--max_model_len 32 --enforce-eager --no-enable-prefix-caching --decode-widths 1 2 --my_own=3"
    flags += " --max-num-seqs=auto --no-async-scheduling --hf_overrides {} --gpu-memory-utilization .5"
    parsed = parser.parse_args(flags.split())
    args = EngineArgs.from_cli_args(parsed)
    assert (parsed.my_own, args.model, args.max_model_len, args.decode_widths) == (3, "a", 32, [1, 2])
    assert (args.enforce_eager, args.async_scheduling, args.enable_prefix_caching) == (True, False, False)
    assert (args.hf_overrides, args.gpu_memory_utilization, args.block_size) == ({}, 0.5, 16)
    scaled = ["--rope-scaling", '{"type": "linear", "factor": 4}', "--rope-theta", "77"]
    scaled = EngineArgs.from_cli_args(parser.parse_args(scaled))
    assert (scaled.rope_scaling, scaled.rope_theta) == ({"type": "linear", "factor": 4}, 77)
    with pytest.raises(InputError, match="max_num_seqs='auto' must be"):
        jaxpaged.LLM.from_engine_args(args)
    assert parser.parse_args(["--max-model-len", "auto"]).max_model_len == "auto"
    asynchronous = AsyncEngineArgs.from_cli_args(
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--enable-log-requests"])
    )
    assert asynchronous.enable_log_requests
    told = {name: value for name, value in asynchronous.options().items() if name not in OF_LLM}
    assert engine_config(told) == engine_config({})


def test_a_scripts_own_flag_stays():
    parser = FlexibleArgumentParser()
    parser.add_argument("--log-level", default="debug")
    args = EngineArgs.add_cli_args(parser).parse_args([])
    assert args.log_level == "debug"
    assert EngineArgs.from_cli_args(args).max_num_seqs == 16


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_steps_give_each_answer_once(llm, kind):
    engine = llm.llm_engine
    assert engine.step() == []
    assert engine.model_config.max_model_len == 128
    params = SamplingParams(
        n=2, temperature=0.9, seed=1, max_tokens=20, ignore_eos=True, logprobs=1, output_kind=kind
    )
    told = {"a": [], "b": []}
    for request_id in told:
        assert engine.add_request(request_id, TokensPrompt(prompt_token_ids=[5, 6]), params) == request_id
    with pytest.raises(InputError, match="request_id='a' must be a string that no request under way has"):
        engine.add_request("a", "ab", params)
    assert engine.get_num_unfinished_requests() == 2
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[output.request_id].append(output)
    [want] = llm.generate([[5, 6]], params, use_tqdm=False)
    for outputs in told.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY
        for answer in want.outputs:
            its = [each for output in outputs for each in output.outputs if each.index == answer.index]
            if kind is RequestOutputKind.DELTA:
                assert [token for each in its for token in each.token_ids] == answer.token_ids
                assert "".join(each.text for each in its) == answer.text
            else:
                assert its[-1] == answer


def test_an_aborted_request_is_told_of_no_more_and_its_id_is_free(llm, brake):
    engine, hold = llm.llm_engine, brake(llm.engine)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("a", [5, 6], params)
    engine.add_request("b", [5, 7], tiny.greedy(3))
    hold.allow(3)
    engine.step()
    engine.abort_request(["a", "stranger"])
    engine.add_request("a", [5, 8], tiny.greedy(4))
    hold.off()
    told = {}
    while engine.has_unfinished_requests():
        told.update({output.request_id: output for output in engine.step() if output.finished})
    assert {name: output.prompt_token_ids for name, output in told.items()} == {"a": [5, 8], "b": [5, 7]}
    assert told["a"].outputs[0].token_ids == tiny.reference_answer((5, 8), 4)


def test_an_error_in_one_requests_text_ends_it_alone(llm, monkeypatch):
    """The error may come in the same step as other answers."""
    engine, texts = llm.llm_engine, llm_engine.texts

    def broken(tokenizer, request):
        if request.params.max_tokens != 7:
            return texts(tokenizer, request)

        def fail(delta):
            raise ValueError("no text")

        return fail

    monkeypatch.setattr(llm_engine, "texts", broken)
    engine.add_request("good", [5, 6], tiny.greedy(3))
    engine.add_request("bad", [5, 7], tiny.greedy(7))
    engine.add_request("too", [5, 8], tiny.greedy(3))
    told, errors = {}, []
    while engine.has_unfinished_requests():
        try:
            told.update({output.request_id: output for output in engine.step() if output.finished})
        except ValueError as error:
            errors.append(str(error))
    assert set(told) == {"good", "too"}
    assert errors == ["no text"]


def test_steps_of_an_engine_that_was_closed_say_so(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder / "tiny.gguf"), **tiny.DEFAULTS))
    engine.add_request("a", [5], SamplingParams(max_tokens=100, ignore_eos=True))
    while not engine.step():
        pass
    engine.llm.engine.close()
    for _ in range(3):
        with pytest.raises(EngineDeadError):
            drain(engine)


def drain(engine):
    while engine.has_unfinished_requests():
        engine.step()


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TAKES_TOOLS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ messages[0].content }}{{ tail }}"
)


def test_chat_takes_vllms_options(llm, folder, tmp_path):
    def prompt(*messages, **options):
        return llm.chat([*messages], tiny.greedy(1), use_tqdm=False, **options)[0].prompt

    user = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert prompt(user) == "user:a\nb<|end|>"
    parts = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert prompt(user, chat_template=parts, chat_template_content_format="openai") == "[a][b]"
    given = {"chat_template": TAKES_TOOLS, "chat_template_kwargs": {"tail": "!"}}
    assert prompt(user, tools=TOOLS, **given) == "<look>a\nb!"
    last = {"role": "assistant", "content": "so"}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(user, last, **going_on) == "user:a\nb<|end|>assistant:so"
    for messages, options, said in (
        ([user], {"continue_final_message": True}, "continue_final_message must be false"),
        ([user], {"tools": TOOLS}, "the model's chat template has no place for them"),
        (
            [user],
            {"chat_template_content_format": "xml"},
            "chat_template_content_format='xml' must be one of",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "image_url"),
        ([user], {"priority": 1}, "priority=1 must be 0 unless"),
    ):
        with pytest.raises(InputError, match=said):
            prompt(*messages, **options)
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].role }}?")
    sizes = tiny.DEFAULTS | {"chat_template": file}
    assert jaxpaged.LLM(folder / "tiny.gguf", **sizes).render_chat([user])["prompt"] == "user?"
    with pytest.raises(InputError, match="chat_template='nowhere' must be a file, or the text"):
        jaxpaged.LLM(folder / "tiny.gguf", chat_template="nowhere")


def test_prompts_take_vllms_fields(llm):
    prompt = TokensPrompt(prompt_token_ids=[5, 6], prompt="told back", multi_modal_data=None)
    [output] = llm.generate(prompt, tiny.greedy(2), use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("told back", [5, 6])
    with pytest.raises(InputError, match="multi_modal_data=.* must be left out: inputs that are not text"):
        llm.generate({"prompt": "ab", "multi_modal_data": {"image": object()}}, tiny.greedy(2))
    plain = {"tokenization_kwargs": {"add_special_tokens": False}, "use_tqdm": False}
    assert llm.generate("ab", tiny.greedy(1), **plain)[0].prompt_token_ids == [2]
    cut = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    for prompt in ("abab12", llm.tokenizer.encode("abab12")):
        [output] = llm.generate(prompt, tiny.greedy(1), tokenization_kwargs=cut, use_tqdm=False)
        assert output.prompt_token_ids == llm.tokenizer.encode("abab12")[:2]
    with pytest.raises(InputError, match="truncate_prompt_tokens=0 must be None, -1 or a positive int"):
        llm.generate("ab", tiny.greedy(1), tokenization_kwargs={"truncate_prompt_tokens": 0})
    with pytest.raises(InputError, match="tokenization_kwargs={'padding': True} must be None or a mapping"):
        llm.generate("ab", tiny.greedy(1), tokenization_kwargs={"padding": True})


def test_a_limited_number_of_searches_runs_at_a_time(llm, monkeypatch):
    sizes, submit = [], llm.engine.submit_all
    params = BeamSearchParams(beam_width=2, max_tokens=3)

    def noted(requests, sink):
        sizes.append(len(requests) // (2 * params.beam_width))  # rows of a search
        return submit(requests, sink)

    monkeypatch.setattr(llm.engine, "submit_all", noted)
    prompts = [[5, i] for i in range(5)]
    limited = llm.beam_search(prompts, params, concurrency_limit=2)
    assert limited == llm.beam_search(prompts, params)
    assert sizes == [2, 2, 1, 5]
    assert llm.beam_search([], params) == []
    with pytest.raises(InputError, match="concurrency_limit=0 must be None or an int >= 1"):
        llm.beam_search(prompts, params, concurrency_limit=0)
    with pytest.raises(InputError, match="include_stop_str_in_output=1 must be True or False"):
        BeamSearchParams(beam_width=2, max_tokens=3, include_stop_str_in_output=1)


def test_adapters_have_vllms_names():
    request = LoRARequest("poet", 3, "here", base_model_name="base")
    assert (request.name, request.adapter_id, request.path) == ("poet", 3, "here")
    with pytest.raises(InputError, match="base_model_name=1 must be None or a string"):
        LoRARequest("poet", 3, "here", base_model_name=1)


def test_prompts_are_queued_and_their_answers_waited_for(llm):
    prompts = [[1, 2, 3], [4, 5]]
    ids = llm.enqueue(prompts, GREEDY)
    more = llm.enqueue([6, 7, 8], GREEDY, mm_processor_kwargs={})
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == ids + more
    expected = llm.generate([*prompts, [6, 7, 8]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert llm.wait_for_completion(output_type=jaxpaged.RequestOutput) == []
    with pytest.raises(InputError, match="output_type=.* must be None or RequestOutput"):
        llm.wait_for_completion(int)
    with pytest.raises(InputError, match="mm_processor_kwargs=.*use prompts of text"):
        llm.enqueue(prompts, GREEDY, mm_processor_kwargs={"num_crops": 4})


def test_an_update_of_weights_has_a_beginning_an_end_and_a_version(llm):
    before = llm.get_weight_version()
    with pytest.raises(InputError, match="finish_weight_update must come after start_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update()
    with pytest.raises(InputError, match="must come after finish_weight_update"):
        llm.start_weight_update()
    llm.finish_weight_update(weight_version=str(before + 3))
    assert llm.get_weight_version() == llm.llm_engine.get_weight_version() == before + 3
    llm.update_weight_version(before + 3)
    with pytest.raises(InputError, match="new_version='v2' must be an int, or its digits"):
        llm.update_weight_version("v2")
    with pytest.raises(InputError, match="use weights, a mapping"):
        llm.update_weights(request={})


def test_caches_are_reset_by_vllms_arguments(llm, brake):
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.llm_engine.reset_prefix_cache(True)
    with pytest.raises(InputError, match="reset_connector=True must be False"):
        llm.reset_prefix_cache(reset_connector=True)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    answer = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    hold = brake(llm.engine)
    llm.enqueue([1, 2, 3], params)

    def during_the_request(*args):
        asked = tiny.start(llm.reset_prefix_cache, *args)
        while not asked.done():
            hold.allow(1)
            time.sleep(0.01)
        return asked.result()

    assert not during_the_request()
    assert during_the_request(True)
    hold.off()
    assert llm.wait_for_completion()[0].outputs[0].token_ids == answer


def test_a_profile_is_a_trace_of_jaxs(llm, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="profiler_config=None must be an object with torch_profiler_dir"):
        llm.start_profile()
    monkeypatch.setattr(llm, "profile_directory", str(tmp_path))
    with pytest.raises(InputError, match="use start_profile and stop_profile"):
        llm.start_profile(max_iterations=3)
    llm.start_profile("first")
    with pytest.raises(InputError, match="start_profile must come when no trace runs"):
        llm.start_profile()
    llm.generate([1, 2], GREEDY, use_tqdm=False)
    llm.stop_profile()
    assert list((tmp_path / "first").rglob("*.xplane.pb"))
    with pytest.raises(InputError, match="stop_profile must come after start_profile"):
        llm.stop_profile()


def test_what_is_not_served_says_what_to_take(llm):
    with pytest.raises(AttributeError, match="LLM.apply_model is not served: .*use LLM.weights"):
        llm.apply_model(print)
    with pytest.raises(AttributeError, match="LLMEngine.pin_lora is not served"):
        llm.llm_engine.pin_lora(1)
    assert (llm.get_world_size(), llm.runner_type) == (1, "generate")
    assert llm.model_config.max_model_len == llm.engine.door.max_model_len
    parallel = llm.llm_engine.vllm_config.parallel_config
    assert (parallel.data_parallel_rank, parallel.data_parallel_size) == (0, 1)
    with pytest.raises(InputError, match=r"model='.*tiny.gguf' must be a directory with a config.json"):
        _ = llm.model_config.hf_config
    assert [metric.name for metric in llm.llm_engine.get_metrics()]
