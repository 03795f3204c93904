"""vLLM's methods and arguments: each is served, taken where it asks for nothing, or refused in a sentence."""

import ast
import dataclasses
import inspect
import json

import pytest

from jaxpaged import LLM, AsyncLLM, SamplingParams
from jaxpaged.api.llm_engine import _OF_MODEL, LLMEngine
from jaxpaged.api.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from jaxpaged.api.vllm_helpers import ProfilerConfig
from jaxpaged.checks import InputError
from jaxpaged.pooling.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from jaxpaged.vllm_names.judge import known_names
from jaxpaged.vllm_names.methods import ARGUMENTS, METHODS, check_arguments, missing, profile_directory
from jaxpaged.vllm_names.options import translated

SIGNATURES = known_names()["signatures"]
CLASSES = {
    made.__name__: made
    for made in (
        *(LLM, AsyncLLM, LLMEngine, SamplingParams, RequestOutput, CompletionOutput, Logprob),
        *(BeamSearchOutput, BeamSearchSequence, PoolingRequestOutput, PoolingOutput, EmbeddingOutput),
        *(ClassificationOutput, ScoringOutput),
    )
}


def test_the_table_has_the_classes_that_scripts_call():
    assert SIGNATURES.keys() == CLASSES.keys()
    assert SIGNATURES["LLM"]["wait_for_completion"] == ["output_type", "use_tqdm"]
    assert SIGNATURES["AsyncLLM"]["abort"] == ["request_id", "internal"]
    assert SIGNATURES["LLMEngine"]["tokenizer"] is None


@pytest.mark.parametrize("title", sorted(SIGNATURES))
def test_each_method_of_vllms_is_there_with_its_arguments_or_refused(title):
    made = CLASSES[title]
    fields = {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
    of_model = _OF_MODEL if title == "LLMEngine" else ()
    left = []
    for name, arguments in SIGNATURES[title].items():
        ours = getattr(made, name, getattr(LLM, name) if name in of_model else None)
        if ours is None and name not in fields:
            told = str(missing(title, name))
            if f"vLLM's {title}.{name} is not served: " not in told:
                left.append(name)
        elif arguments is not None and callable(ours) and name != "from_vllm_config":
            taken = inspect.signature(ours).parameters
            takes_others = any(each.kind is each.VAR_KEYWORD for each in taken.values())
            judged = ARGUMENTS if takes_others and title != "SamplingParams" else arguments * takes_others
            left += [f"{name}({each}=)" for each in arguments if each not in taken and each not in judged]
    assert not left


# Weights come as arrays, not as a transfer engine's request; parameters are made by names alone.
OF_OURS = {"update_weights", "from_optional", "from_vllm_config"}


@pytest.mark.parametrize("title", sorted(known_names()["calls"]))
def test_arguments_have_vllms_order_and_defaults(title):
    """Arguments that we take by position come first and in order; others are taken by name."""
    wrong = []
    for name, text in known_names()["calls"][title].items():
        ours = getattr(CLASSES[title], name) if hasattr(CLASSES[title], name) else None
        if not callable(ours) or name in OF_OURS:
            continue
        [function] = ast.parse(f"def f({text}): ...").body
        args = function.args
        ordered = [each.arg for each in (*args.posonlyargs, *args.args)]
        defaults = dict(zip(reversed(ordered), reversed(args.defaults), strict=False))
        defaults |= {each.arg: d for each, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d}
        taken = {n: p for n, p in inspect.signature(ours).parameters.items() if n != "self"}
        by_place = [n for n, p in taken.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if by_place[: len(ordered)] != ordered[: len(by_place)]:
            wrong.append(f"{name}: {by_place}, not {ordered}")
        for argument in defaults.keys() & taken.keys():
            told = ast.unparse(defaults[argument])
            if isinstance(defaults[argument], ast.Constant) and repr(taken[argument].default) != told:
                wrong.append(f"{name}: {argument}={taken[argument].default!r}, not {told}")
    assert not wrong


def test_attributes_of_classes_are_refused_in_a_sentence_too():
    for made, name, told in (
        (LLM, "apply_model", "vLLM's LLM.apply_model is not served: the model is arrays"),
        (AsyncLLM, "collective_rpc", "vLLM's AsyncLLM.collective_rpc is not served: there are no workers"),
        (LLMEngine, "collective_rpc", "vLLM's LLMEngine.collective_rpc is not served"),
        (SamplingParams, "verify", "vLLM's SamplingParams.verify is not served"),
        (LLM, "nothing", "'LLM' object has no attribute 'nothing'"),
    ):
        with pytest.raises(AttributeError, match=told):
            getattr(made, name)
    with pytest.raises(AttributeError, match="type object 'LLM' has no attribute '__nothing__'"):
        LLM.__nothing__  # noqa: B018


def test_the_table_of_refusals_has_no_names_that_vllm_lacks_or_that_are_served():
    for full in METHODS:
        title, _, name = full.rpartition(".")
        having = [t for t in SIGNATURES if name in SIGNATURES[t] and title in ("", t)]
        assert having, full
        assert not [t for t in having if hasattr(CLASSES[t], name) and not title], full
    every = {each for members in SIGNATURES.values() for its in members.values() for each in its or ()}
    assert ARGUMENTS.keys() - every <= {"log_requests"}


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("AsyncLLM.generate", {"data_parallel_rank": 1, "session_id": "a", "kv_hints": {"a": 1}}, None),
        ("AsyncLLM.generate", {"reasoning_ended": True, "reasoning_parser_kwargs": {}}, None),
        ("AsyncLLM.generate", {"reasoning_ended": False}, "must be None or True; use structured_outputs"),
        ("LLM.generate", {"mm_processor_kwargs": {"a": 1}}, "of vLLM's LLM.generate .*use prompts of text"),
        ("LLM.embed", {"lora_request": object()}, "must be None; use a model with its adapter merged"),
        ("LLM.embed", {"lora_request": None, "tokenization_kwargs": {}}, None),
        ("LLM.generate", {"use_tdqm": 1}, "argument 'use_tdqm' must be one of .*the nearest is 'use_tqdm'"),
        ("LLM.generate", {"session_id": "a"}, "argument 'session_id' must be one of prompts"),
        ("LLM.update_weights", {"request": {}}, "use weights, a mapping"),
    ],
)
def test_an_argument_that_is_not_served_is_judged_by_its_value(method, given, told):
    if told is None:
        check_arguments(method, given)
        return
    with pytest.raises(InputError, match=told):
        check_arguments(method, given)


def test_a_missing_attribute_is_told_with_what_to_take():
    output = CompletionOutput(0, "", [])
    with pytest.raises(
        AttributeError, match=r"CompletionOutput.lora_request is .*use RequestOutput.lora_req"
    ):
        _ = output.lora_request
    with pytest.raises(AttributeError, match="'CompletionOutput' object has no attribute 'nobody'"):
        _ = output.nobody
    with pytest.raises(AttributeError, match=r"SamplingParams.watermarking is not served: a watermark"):
        _ = SamplingParams().watermarking
    with pytest.raises(InputError, match="use from_engine_args"):
        AsyncLLM.from_vllm_config(None)


def test_a_profiler_config_says_where_traces_go():
    for config in (
        {"profiler": "torch", "torch_profiler_dir": "traces", "torch_profiler_with_stack": False},
        ProfilerConfig(torch_profiler_dir="traces"),
        json.dumps({"torch_profiler_dir": "traces"}),
    ):
        assert translated({"profiler_config": config}, ()) == {}
        assert profile_directory(config) == "traces"
    assert profile_directory(None) == ""
    for config, told in (
        ({"profiler": "cuda"}, "profiler_config: profiler='cuda'.* must be None or 'torch'"),
        ({"max_iterations": 3}, "use start_profile and stop_profile"),
        ({"torch_profile_dir": "a"}, "the nearest is 'torch_profiler_dir'"),
    ):
        with pytest.raises(InputError, match=told):
            translated({"profiler_config": config}, ())
