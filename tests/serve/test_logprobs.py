"""Tests of tokens' names, their bytes, and their offsets in the text."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged.api.outputs import Logprob, RequestMetrics
from jaxpaged.api.streams import Answers
from jaxpaged.engine.request import Delta, Request, Score
from jaxpaged.models import loading
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.serve.logprobs import CompletionLogprobs, TextOffsets, TokenNames, chat_logprobs
from tests.text.test_detokenizer import DECODERS, LETTERS, made

BOS = 1
PARROT = "Hi 🦜 é中"


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request):
    if request.param == "byte_level":
        return loading.open_checkpoint("smollm2").tokenizer
    return made(DECODERS["byte_fallback"])


def outputs(tokenizer, prompt, deltas):
    """Return the outputs of an answer that comes in these deltas, with log-probabilities of its own
    tokens.
    """
    params = SamplingParams(logprobs=1, output_kind=RequestOutputKind.DELTA)
    request = Request(np.array(prompt, np.int32), params, 0, 0, (), (), (), 99, request_id=1)
    answers = Answers([request], SimpleNamespace(tokenizer=tokenizer))
    answers.handles = [SimpleNamespace(metrics=RequestMetrics(0.0, None, None))]
    for ids in deltas:
        yield answers.output(Delta(1, ids, [Score(-1.0, 1, ((token, -1.0),)) for token in ids], 0))


def written(tokenizer, prompt, answer, echo=None, *, cut=()):
    """Return the lists of /v1/completions for a prompt's and an answer's tokens, the last ones in deltas."""
    names = TokenNames(tokenizer, as_ids=False)
    places = TextOffsets(tokenizer, SamplingParams(), np.array(prompt, np.int32), echo or "")
    writer, told = CompletionLogprobs(names, 1, places), {}
    ends = [*cut, len(answer)]
    deltas = [answer[begin:end] for begin, end in zip([0, *cut], ends, strict=True)]
    for i, output in enumerate(outputs(tokenizer, prompt, deltas)):
        [its], its_prompt = output.outputs, prompt if echo is not None and not i else []
        each = [*([None] * len(its_prompt)), *its.logprobs]
        for name, values in writer.of([*its_prompt, *its.token_ids], each, len(its_prompt)).items():
            told.setdefault(name, []).extend(values)
    return told


def cut(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def starts(tokenizer, ids, text):
    """Count, by bytes alone, how many characters of the text are whole before each token."""
    names, at, told = TokenNames(tokenizer, as_ids=False), 0, text.encode()
    for token in ids:
        its = bytes(names.bytes_of(token))
        if not at and not told.startswith(its):
            its = its.removeprefix(b" ")  # SentencePiece's, before a first word
        assert told[at : at + len(its)] == its
        yield len(told[:at].decode(errors="ignore"))
        at += len(its)
    assert at == len(told)


def test_an_echos_places_are_those_in_its_text(tokenizer):
    ids = cut(tokenizer, PARROT)
    told = written(tokenizer, [BOS, *ids], ids[:1], PARROT)
    assert told["text_offset"] == [0, *starts(tokenizer, ids, PARROT), len(PARROT)]
    if " é" in told["tokens"]:
        at = told["text_offset"][told["tokens"].index(" é")], told["text_offset"][told["tokens"].index("中")]
        assert at == (4, 6)


def test_bytes_are_the_tokens_own_and_a_character_is_the_name_of_the_token_that_completes_it(tokenizer):
    """Whole and in fragments, and also of a token that another would have completed it by."""
    ids, prompt = cut(tokenizer, PARROT), cut(tokenizer, "b")
    [whole] = outputs(tokenizer, prompt, [ids])
    logprobs = whole.outputs[0].logprobs
    names = TokenNames(tokenizer, as_ids=False)
    content = chat_logprobs(names, 1, ids, logprobs)["content"]
    told = [(each["token"].strip(), each["bytes"]) for each in content]
    last = [name for name, _ in told].index("🦜")
    parrot = [byte for _, its in told[: last + 1] for byte in its][-4:]
    assert parrot == [240, 159, 166, 156]
    assert told[last][1] in ([156], [166, 156])
    assert told[last - 1][0] == "", "a part of it"
    assert "".join(each["token"] for each in content).strip() == PARROT
    fragments = [o.outputs[0].logprobs for o in outputs(tokenizer, prompt, [[token] for token in ids])]
    assert [entries for each in fragments for entries in each] == logprobs


def test_places_of_random_texts_whole_and_in_fragments(tokenizer):
    rng = random.Random(0)
    for _ in range(100):
        # What the small tokenizer knows or has in bytes.
        text = "b" + "".join(rng.choices(LETTERS.replace("\t", ""), k=12))
        ids = cut(tokenizer, text)
        split = rng.randint(1, len(ids) - 1)
        while "\ufffd" in tokenizer.decode(ids[:split]) + tokenizer.decode(ids[split:]):
            split = rng.randint(1, len(ids))
        prompt, answer = ids[:split], ids[split:]
        echo = tokenizer.decode(prompt)
        text = tokenizer.decode(ids)
        want = [*starts(tokenizer, ids, text)]
        ends = sorted(rng.sample(range(1, len(answer)), min(2, len(answer) - 1))) if answer else []
        told = written(tokenizer, prompt, answer, echo, cut=ends)
        assert told["text_offset"] == want
        alone = written(tokenizer, prompt, answer, cut=ends)
        assert "".join(alone["tokens"]) == text[len(echo) :]
        assert alone["text_offset"] == [at - len(echo) for at in want[split:]]


def test_a_special_token_has_a_width_where_it_is_text_alone():
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    prompt = [end, start, *cut(tokenizer, "Hi 🦜"), end]
    told = written(tokenizer, prompt, [start, *cut(tokenizer, " you")], "<|im_start|>Hi 🦜<|im_end|>")
    assert told["text_offset"][:3] == [0, 0, 12], "the first was added by the tokenizer, the second is text"
    assert told["text_offset"][-3:] == [16, 26, 26], "the answer leaves special tokens out"


def test_a_token_that_is_not_in_the_text_is_looked_for_nearby():
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    ids = [token for word in (" one", " two", " three") for token in cut(tokenizer, word)]
    assert written(tokenizer, ids, [], "One   two three")["text_offset"] == [0, 6, 9]


def test_tokens_of_the_same_name_are_all_told():
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    half, other, letter = (tokenizer.convert_tokens_to_ids(name) for name in ("ð", "ã", "a"))
    entries = {
        token: Logprob(-float(rank), rank, "" if token != letter else "a")
        for rank, token in enumerate((half, letter, other), 1)
    }
    names = TokenNames(tokenizer, as_ids=False)
    for token, want in (
        (other, {f"token_id:{half}": -1.0, "a": -2.0, "": -3.0}),
        (half, {"": -1.0, "a": -2.0, f"token_id:{other}": -3.0}),
    ):
        places = TextOffsets(tokenizer, SamplingParams(), np.array([1], np.int32))
        told = CompletionLogprobs(names, 3, places).of([token], [entries])
        assert told["top_logprobs"] == [want]
        assert told["top_logprobs"][0][told["tokens"][0]] == told["token_logprobs"][0]
