"""Experts of tokens over HTTP, with vLLM's names: those that the oracle's router chooses."""

import base64
import io
import json

import numpy as np
import pytest
import tokenizers
import transformers

from jaxpaged.api.async_llm import AsyncLLM
from tests import tiny
from tests.engine.test_routed import ASKED, FOLDER, oracles
from tests.serve.conftest import serving

ANSWERED = {
    "max_tokens": 9,
    "n": 2,
    "temperature": 1,
    "seed": 4,
    "ignore_eos": True,
    "return_token_ids": True,
}


def read(text):
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    options = tiny.DEFAULTS | tiny.SMALL | {"generation_config": "vllm", "max_model_len": 128}
    llm = AsyncLLM(FOLDER, tokenizer=folder, **options | ASKED)
    with serving(llm) as made:
        yield made
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": list(range(4, 24))}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5 w6 w7 w8"}]}),
    ],
)
def test_choices_tell_their_experts_at_their_end(served, path, prompt):
    """Whole and in a stream; the prompt's beginning is left out where that is asked."""
    body = served.http.post(path, json=ANSWERED | prompt).json()
    its = body if "prompt_token_ids" in body else body["choices"][0]
    wants = [oracles([*its["prompt_token_ids"], *each["token_ids"]], FOLDER) for each in body["choices"]]
    for choice, want in zip(body["choices"], wants, strict=True):
        assert read(choice["routed_experts"]).dtype == np.uint8
        np.testing.assert_array_equal(read(choice["routed_experts"]), want)
    asked = ANSWERED | prompt | {"routed_experts_prompt_start": 3, "stream": True}
    with served.http.stream("POST", path, json=asked) as reply:
        lines = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    told = [each for line in lines for each in line["choices"] if "routed_experts" in each]
    assert all(each["finish_reason"] == "length" for each in told)
    for choice in sorted(told, key=lambda each: each["index"]):
        np.testing.assert_array_equal(read(choice["routed_experts"]), wants[choice["index"]][3:])
    assert len(told) == 2
