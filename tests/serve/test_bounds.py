"""Tests of a body's bounds: it is counted before it is parsed, and the first mistake ends validation."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jaxpaged import InputError, SamplingParams
from jaxpaged.api import tokens
from jaxpaged.checks import shown
from jaxpaged.serve import bounds
from jaxpaged.serve.bounds import Limits, Size, check_entries, measure, parsed
from jaxpaged.serve.replies import ApiError
from jaxpaged.serve.schemas import CompletionRequest
from jaxpaged.text.limits import MAX_BAD_WORD_CHARS, MAX_STOPS

TEXTS = st.text(st.sampled_from('a"\\[]{},:/ \né😀'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def counted(value, depth=0):
    """Return what `measure` must return, worked out from the value itself."""
    if isinstance(value, str):
        return Size(depth, 1, 0, 1)
    if not isinstance(value, list | dict):
        return Size(depth, 1, 0, 0)
    inner = [counted(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    num_keys = len(value) if isinstance(value, dict) else 0
    return Size(
        max([depth + 1, *(each.depth for each in inner)]),
        1 + num_keys + (sum(each.values for each in inner) if inner else 1),
        1 + sum(each.containers for each in inner),
        num_keys + sum(each.texts for each in inner),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES, st.booleans(), st.integers(1, 9))
def test_json_is_counted_as_a_parser_would(value, ascii_only, chunk):
    """Chunks have any length: a text, or a run of backslashes, may go on in the next one."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "CHUNK", chunk)
        assert measure(body) == counted(value)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=40) | st.text('[]{}",:1\\ ', max_size=40).map(str.encode))
def test_any_bytes_are_a_value_or_a_mistake_that_is_told(body):
    status = 200
    try:
        parsed(body, Limits.of(4096, 8))
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


LIMITS = Limits(depth=4, values=40, containers=10, texts=10)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" * 5, "4 levels of nesting"),
        (b"[" + b"1," * 40, "40 values"),
        (b"[" + b"{}," * 11, "10 objects and lists"),
        (b"[" + b'"",' * 11, "10 texts"),
        (b"[" + b'{"":0},' * 11, "10 objects and lists"),
        ("Ģ[[[[[[".encode("utf-16"), "must be UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "must be JSON: Exceeds the limit"),
        (b'{"a": [NaN]}', "must be JSON: NaN is no number there"),
        (b'{"a": -Infinity}', "must be JSON: -Infinity is no number there"),
        (b'{"a": {"b": -1e999}}', "must be JSON: -1e999 is beyond the numbers of float64"),
        (b'{"a": ' + b"9" * 400 + b".5}", "must be JSON: 9{40} is beyond the numbers of float64"),
        (b'{"a"', "must be JSON: Expecting ':' delimiter at character 4"),
    ],
)
def test_what_a_body_has_too_much_of_is_said(body, told):
    with pytest.raises(ApiError, match=told):
        parsed(body, LIMITS)


def test_the_size_is_known_long_before_the_end():
    """A hostile body is read no further than its size is known."""
    seen = []
    size = measure(b"[" + b"{}," * 10**6, lambda size: seen.append(size) or size.containers < 1000)
    assert (len(seen), size.containers) == (1, 1 + (bounds.CHUNK + 1) // 3)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"stop": ["x"] * 65}, "stop has 65 entries in a list or an object, must have at most 64"),
        ({"stop": "x" * 16_385}, "stop has 16385 characters, must have at most 16384"),
        ({"bad_words": ["x" * 600] * 110}, "bad_words has 66000 characters, must have at most 65536"),
        ({"cache_salt": "x" * 1025}, "cache_salt has 1025 characters"),
        ({"model": "x" * 1025}, "model has 1025 characters"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids has 1025 entries"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias has 1025 entries"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata has 17 entries"),
        ({"messages": [{"content": [{}] * 4097}]}, "messages has 4097 entries"),
        ({"prompt": [{"a": [0]} | dict.fromkeys(map(str, range(4097)))]}, "prompt has 4098 entries"),
        ({"x": [[[1] * 4097]]}, "x has 4097 entries"),
        (dict.fromkeys(map(str, range(257))), "the body has 257 fields"),
    ],
)
def test_entries_are_counted_by_the_fields_they_are_in(body, told):
    with pytest.raises(ApiError, match=told):
        check_entries(body)


def test_lists_of_token_ids_may_be_long():
    ids = [7] * 100_000
    for body in ({"prompt": ids}, {"prompt": [ids, ids]}, {"tokens": ids}, {"allowed_token_ids": ids}, ids):
        check_entries(body)


def test_validation_stops_at_the_first_mistake():
    """For a list of a thousand entries, each form of a prompt reports one mistake."""
    adapter = TypeAdapter(CompletionRequest)
    for field in ({"prompt": [{}] * 1000}, {"prompt": "x", "stop_token_ids": [""] * 1000}):
        with pytest.raises(ValidationError) as told:
            adapter.validate_python(field)
        assert told.value.error_count() <= 4


def test_the_python_door_bounds_texts_before_it_cuts_them(llm, monkeypatch):
    asked = []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda *args, **more: asked.append(1) or encode(*args, **more)
    )
    for params, told in (
        ({"stop": ["x"] + [f"x{i}" for i in range(MAX_STOPS)]}, "stop has 65 texts, must have at most 64"),
        ({"bad_words": ["x" * (MAX_BAD_WORD_CHARS + 1)]}, "has 65537 characters, must have at most 65536"),
        ({"bad_words": [f"x{i}" for i in range(1025)]}, "bad_words has 1025 texts, must have at most 1024"),
    ):
        with pytest.raises(InputError, match=told):
            llm.engine.door.admit([1], SamplingParams(**params))
    assert not asked
    params = SamplingParams(bad_words=["bad words of one request"])
    for prompt in ([1], [2], [3]):
        llm.engine.door.admit(prompt, params)
    assert len(asked) == 2, "with and without a space before it, for all prompts"


def test_long_texts_are_cut_as_short_ones(llm, monkeypatch):
    """Long texts take another way, which does not block other threads; a file's own truncation changes
    nothing.
    """
    texts = ["ab c12", "  zz\n", "a" * 200, "<eos> b", "é"]
    for special in (True, False):
        want = [llm.tokenizer.encode(text, add_special_tokens=special) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "LONG_TEXT", 0)
            llm.tokenizer.backend_tokenizer.enable_truncation(2)
            llm.tokenizer.backend_tokenizer.enable_padding(length=7)
            patch.setattr(llm.tokenizer, "encode", None)
            assert [llm.llm.tokenize(text, add_special_tokens=special) for text in texts] == want


def test_no_more_of_a_value_is_written_down_than_a_message_shows():
    """What is quoted may be all of a body."""
    seen = []

    class Counted:
        def __repr__(self):
            seen.append(1)
            return "x"

    for value in ([Counted()] * 10**5, {i: [Counted()] for i in range(10**4)}, [[[Counted()] * 10**5]]):
        told = shown(value)
        assert (len(told), told[-3:]) == (203, "...")
    assert len(seen) < 1000
    assert shown("é" * 10**6) == repr("é" * 300)[:200] + "..."
    for value in ([1, ("a", {"b": [None]})], "", {}, [], (), 7, "x" * 198, {(1, 2): 3}):
        assert shown(value) == repr(value)
