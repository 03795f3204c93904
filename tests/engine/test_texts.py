"""Stop strings: the text is cut at the right character, the tokens at the right token, and nothing comes too
soon."""

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta, Score
from jaxpaged.engine.texts import Texts
from jaxpaged.models import loading
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.state import FinishReason
from reference import sampler as reference


class Pieces:
    """A tokenizer whose token i is piece i of a text."""

    all_special_ids = ()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], **options: bool) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [self.pieces[token] for token in token_ids]


def streamed(tokenizer, params, num_tokens, ends, reason=FinishReason.LENGTH):
    """Yield the deltas of tokens 0, 1, ..., divided at `ends`, the last with `reason`."""
    texts, deltas, begin = Texts(tokenizer, params), [], 0
    for end in sorted({*(end for end in ends if end < num_tokens), num_tokens}):
        new = list(range(begin, end))
        its_reason = reason if end == num_tokens else FinishReason.NONE
        deltas.append(texts(Delta(1, new, [Score(-float(token), 1) for token in new], 0, its_reason)))
        begin = end
        if deltas[-1].finish_reason:
            break
    return deltas


@given(
    pieces=st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    ends=st.lists(st.integers(1, 11), max_size=5),
)
@example(pieces=["aa", "b"], stop=["ab", "aab"], include=False, min_tokens=0, ends=[1])
@example(pieces=["ab", "ab"], stop=["ab"], include=True, min_tokens=1, ends=[])
def test_an_answer_ends_where_the_reference_ends_it(pieces, stop, include, min_tokens, ends):
    want_tokens, want_text, want_stop = reference.stopped(
        pieces, stop, include=include, min_tokens=min_tokens
    )
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    deltas = streamed(Pieces(pieces), params, len(pieces), ends)
    answer = collect(deltas)
    assert (answer.token_ids, answer.text) == (list(range(want_tokens)), want_text)
    assert answer.stop_reason == want_stop
    assert answer.finish_reason is (FinishReason.STOP if want_stop else FinishReason.LENGTH)
    assert answer.logprobs == [-float(token) for token in answer.token_ids]
    if not include:  # all is given that cannot become part of a stop string
        for i, delta in enumerate(deltas[:-1]):
            known = "".join(pieces[token] for d in deltas[: i + 1] for token in d.token_ids)
            given_out = sum(len(d.text) for d in deltas[: i + 1])
            assert given_out == max(len(known) - max(map(len, stop)) + 1, 0), delta


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_text_only_if_it_is_to_be_included(include, text):
    for stop in ((), ("x",)):
        params = SamplingParams(include_stop_str_in_output=include, stop=stop)
        deltas = streamed(Pieces(["a", "b"]), params, 2, [1], FinishReason.STOP)
        assert collect(deltas).text == text
        assert collect(deltas).token_ids == [0, 1]


def test_a_stop_string_is_seen_in_bytes_that_wait_for_the_next_token():
    """SentencePiece's line feed is a byte, and bytes are characters only when the next token is none."""
    tokenizer = Pieces(["a", "\n", "b"])
    tokenizer.convert_ids_to_tokens = lambda ids: [{1: "<0x0A>"}.get(i, "x") for i in ids]
    answer = collect(streamed(tokenizer, SamplingParams(stop="\n"), 3, [1, 2]))
    assert (answer.token_ids, answer.text, answer.stop_reason) == ([0, 1], "a", "\n")


def test_a_character_of_several_tokens_is_no_stop_string_before_it_is_whole():
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    ids = tokenizer.encode("say 𓀀 now")
    whole = len(tokenizer.encode("say 𓀀"))
    assert len(ids) > 4, "the character is of several tokens"
    texts, deltas = Texts(tokenizer, SamplingParams(stop=["𓀀", "\ufffd"])), []
    for token in ids:
        deltas.append(texts(Delta(1, [token], None, 0)))
        if deltas[-1].finish_reason:
            break
    assert (collect(deltas).token_ids, collect(deltas).text) == (ids[:whole], "say ")


def test_special_tokens_are_text_if_they_are_not_to_be_skipped():
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    delta = Delta(1, tokenizer.encode("<|im_start|>hi<|im_end|>"), None, 0, FinishReason.LENGTH)
    for skips, text in ((True, "hi"), (False, "<|im_start|>hi<|im_end|>")):
        params = SamplingParams(skip_special_tokens=skips)
        assert Texts(tokenizer, params)(delta).text == text
        assert Texts(tokenizer, dataclasses.replace(params, stop=("x",)))(delta).text == text
