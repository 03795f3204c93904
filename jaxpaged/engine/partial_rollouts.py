"""Answers that go on from tokens that are known: partial rollouts, computed as if nothing had ended them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_int, is_int
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.request_queue import Queued
from jaxpaged.engine.texts import Texts
from jaxpaged.sampling_params import SamplingParams


def continued(requests: Sequence[Request], begun: Any, vocab_size: int, tokenizer: Any) -> list[Request]:
    """Return the requests for answers that go on, with the tokens that each has.

    begun: the tokens of the only answer, or a list with those of each; None for one that has ended, which is
        then left out. Raises `InputError` for tokens after which the answer would have ended.
    """
    entries = _each(begun, len(requests))
    prompt_logprobs = requests[0].params.prompt_logprobs
    check("prompt_logprobs", prompt_logprobs, "None with continue_from", prompt_logprobs is None)
    candidates = requests[0].params.prompt_logprob_token_ids
    check("prompt_logprob_token_ids", candidates, "None with continue_from", candidates is None)
    rule = f"a token id, an int in [0, {vocab_size})"
    made = []
    for request, entry in zip(requests, entries, strict=True):
        if entry is None:
            continue
        tokens = tuple(checked_int("continue_from: token", token, rule, 0, vocab_size - 1) for token in entry)
        _check_goes_on(request, tokens, tokenizer)
        made.append(dataclasses.replace(request, continues=tokens, is_continued=True))
    check("continue_from", begun, "tokens for one answer at least", bool(made))
    return made


def check_replay(params: SamplingParams, vocab_size: int, *, is_enabled: bool, has_begun: bool) -> None:
    """Raise `InputError` if an answer that is given cannot be replayed."""
    tokens = params.trace_decode_token_ids
    if tokens is not None:
        check("trace_decode_token_ids", tokens, "None without enable_trace_replay", is_enabled)
        check("continue_from", has_begun, "None with trace_decode_token_ids", not has_begun)
        rule = f"a token id, an int in [0, {vocab_size})"
        checked_int("trace_decode_token_ids: token", max(tokens), rule, 0, vocab_size - 1)


def with_replayed(queued: Queued) -> np.ndarray:
    """Return a request's tokens, and behind them those of its answer that are to be replayed, int32."""
    request, known = queued.request, queued.token_ids
    trace = request.params.trace_decode_token_ids
    if trace is None:
        return known
    prompt_len = len(request.prompt_token_ids)
    rest = trace[len(known) - prompt_len : request.max_num_tokens - prompt_len]
    return np.concatenate([known, np.array(rest, np.int32)])


def _each(begun: Any, count: int) -> list[Any]:
    """Return what is known of each answer."""
    rule = "a list of token ids" if count == 1 else f"a list of {count}, token ids or None for each answer"
    is_list = isinstance(begun, Sequence | np.ndarray) and not isinstance(begun, str | bytes)
    check("continue_from", begun, rule, is_list)
    if count == 1 and all(is_int(token) for token in begun):
        return [begun]
    ok = len(begun) == count and all(
        entry is None or (isinstance(entry, Sequence | np.ndarray) and not isinstance(entry, str | bytes))
        for entry in begun
    )
    check("continue_from", begun, rule, ok)
    return list(begun)


def _check_goes_on(request: Request, tokens: tuple[int, ...], tokenizer: Any) -> None:
    """Raise `InputError` if an answer of these tokens has ended."""
    max_tokens = request.max_num_tokens - len(request.prompt_token_ids)
    if len(tokens) >= max_tokens:
        raise InputError(
            f"continue_from has {len(tokens)} tokens, must have less than the answer's {max_tokens}"
        )
    ends = [token for token in tokens[request.params.min_tokens :] if token in request.stop_token_ids]
    if ends:
        raise InputError(f"continue_from must have no token that ends the answer: {ends[0]} is one")
    if request.grammar is not None:
        problem = request.grammar.problem([*tokens], request.grammar_opens)
        rule = f"the beginning of an answer that structured_outputs allow: {problem}"
        check("continue_from", [*tokens], rule, problem is None)
    if request.params.stop and tokenizer is not None:
        known_text = Texts(tokenizer, request.params, request.prompt_token_ids)(
            Delta(0, list(tokens), None, 0)
        )
        check(
            "continue_from",
            known_text.stop_reason,
            "without a stop string in it",
            not known_text.finish_reason,
        )
