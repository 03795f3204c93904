"""Scripts written for vLLM, with their imports changed and nothing else; and the names they import."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

import jaxpaged
from jaxpaged import EngineArgs, InputError, LLMEngine, RequestOutputKind, SamplingParams, TokensPrompt
from jaxpaged.engine.arg_utils import DEFAULT_MODEL, AsyncEngineArgs
from jaxpaged.models import loading
from jaxpaged.utils.argparse_utils import FlexibleArgumentParser
from tests import tiny, tiny_lora
from tests.serve.test_async_llm import in_event_loop
from tests.tiny_gguf import write_gguf

SCRIPTS = Path(__file__).parents[1] / "examples" / "vllm_scripts"
GREEDY = tiny.greedy(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    """Sizes as in test_llm.py, whose program it shares."""
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


def test_adapters(script, folder):
    path = tiny_lora.write(folder / "adapter", 1)
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in tiny_lora.LORA.items() if value is not True
    ]
    alone, adapted = script("lora", "--enable-lora", *flags, lora_path=str(path))
    assert alone.outputs[0].token_ids == tiny_lora.reference_answer(None, alone.prompt_token_ids, 6)
    assert adapted.outputs[0].token_ids == tiny_lora.reference_answer(1, alone.prompt_token_ids, 6)
    assert adapted.lora_request.base_model_name == str(folder / "tiny.gguf")
