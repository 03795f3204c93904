"""Tokens of a prompt's text, by a tokenizer of transformers."""

import functools
from typing import Any

from jaxpaged.checks import InputError, shown

LONG_TEXT = 50_000  # characters: a longer text takes the tokenizer's backend alone


def encode(
    tokenizer: Any, text: str, max_model_len: int, *, add_special_tokens: bool, cuts: str | None
) -> list[int]:
    """Return the token ids of a text: see `LLM.tokenize`. Raises `InputError`."""
    if not text:
        raise InputError("prompt='' must not be empty")
    if tokenizer is None:
        raise InputError("prompt must be token ids: the model has no tokenizer")
    if len(text) > max_model_len and len(text) > (max_chars := max_model_len * _longest_token(tokenizer)):
        if cuts is None:
            rule = f"more than max_model_len={max_model_len} tokens hold"
            raise InputError(f"the prompt has {len(text)} characters, {rule}")
        text = text[: 2 * max_chars] if cuts == "right" else text[-2 * max_chars :]
    try:
        text.encode()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and len(text) > LONG_TEXT:
            return _encoded(backend, text, add_special_tokens)
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except UnicodeEncodeError as error:
        raise InputError(
            f"prompt={shown(text)} must be Unicode text, without half a surrogate pair"
        ) from error
    return token_ids


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    """Return how many characters a token can stand for at most."""
    return max(map(len, tokenizer.get_vocab()))


def _encoded(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text by the tokenizer's backend, as its `encode` returns them.

    Other threads run meanwhile. The tokenizer itself would make several lists of all tokens, and keep other
    threads from running for most of a second where there are millions of tokens.
    """
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    token_ids: list[int] = encoding.ids
    return token_ids
