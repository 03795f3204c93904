"""The text of a request's deltas, as they come: whole characters, up to a stop string."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.request import Delta, Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step import channels
from jaxpaged.step.state import FinishReason
from jaxpaged.text.detokenizer import Detokenizer, Step


class TextError(RuntimeError):
    """An error in making text from a request's tokens: that request ends, no other. Its cause is the
    tokenizer's error.
    """

    def __init__(self, request_id: int, cause: BaseException) -> None:
        super().__init__(
            f"the text of request {request_id} could not be made from its tokens: "
            f"{type(cause).__name__}: {cause}"
        )
        self.request_id = request_id
        self.__cause__ = cause


class Texts:
    """A function of one request's deltas, one after the other, that returns them with their text.

    A stop string ends the answer. That delta is the last: it has the tokens until the string was complete,
    and the text up to it, or with it if it is to be included. Text that may become a stop string is held back
    until that is certain.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] | np.ndarray = ()
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt_token_ids=prompt_token_ids,
        )
        self._stop = tuple(params.stop or ())
        self._includes = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        # Characters that a stop string may begin with.
        self._overlap = max(map(len, self._stop), default=1) - 1
        self._num_tokens = 0
        # The end of what is settled: all that may be part of a stop string, or has not been given.
        self._text = ""
        self._num_given = 0  # of these characters
        self._searched = ""  # as many of the last characters known, settled or not, that have been searched

    def __call__(self, delta: Delta) -> Delta:
        """Return the delta with its text. Raises `TextError` for whatever goes wrong in the tokenizer."""
        try:
            return self._with_text(delta)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust code is no `Exception`
            raise TextError(delta.request_id, error) from error

    def _with_text(self, delta: Delta) -> Delta:
        is_last = delta.finish_reason is not FinishReason.NONE
        # A token that stops is no text, unless it is to be included.
        leaves_out = delta.finish_reason is FinishReason.STOP and not self._includes
        token_ids = delta.token_ids[:-1] if leaves_out else delta.token_ids
        if not self._stop:
            return dataclasses.replace(delta, text=self._detokenizer.add(token_ids, is_last=is_last))
        for count, token in enumerate(token_ids, 1):
            self._num_tokens += 1
            if stop := self._find(self._detokenizer.step(token)):
                return self._ended(delta, count, *stop)
        if is_last:
            self._text += self._detokenizer.add([], is_last=True)
        held_back = 0 if is_last or self._includes else self._overlap
        return dataclasses.replace(delta, text=self._give(max(len(self._text) - held_back, 0)))

    def _find(self, step: Step) -> tuple[str, int, str] | None:
        """Return the first stop string that ends within the characters that a token made known, its end, and
        the text it is in: of characters that are whole, though the next token may make them others.
        """
        if step.is_taken_back:
            self._searched = self._last(self._text)
        self._text += step.settled
        if not step.known:
            return None
        text = self._searched + step.known
        places = [(text.find(stop, max(len(self._searched) - len(stop) + 1, 0)), stop) for stop in self._stop]
        ends = [(place + len(stop), stop) for place, stop in places if place >= 0]
        self._searched = self._last(text)
        if not ends or self._num_tokens <= self._min_tokens:
            return None
        end, stop = min(ends, key=lambda each: each[0])
        known = self._text + self._detokenizer.ahead
        return stop, len(known) - len(text) + end, known

    def _last(self, text: str) -> str:
        return text[-self._overlap :] if self._overlap else ""

    def _ended(self, delta: Delta, num_tokens: int, stop: str, end: int, text: str) -> Delta:
        self._text = text
        return dataclasses.replace(
            delta,
            token_ids=delta.token_ids[:num_tokens],
            scores=None if delta.scores is None else delta.scores[:num_tokens],
            weight_versions=delta.weight_versions[:num_tokens],
            channels=channels.without_last(delta.channels, len(delta.token_ids) - num_tokens),
            finish_reason=FinishReason.STOP,
            stop_reason=stop,
            text=self._give(end if self._includes else end - len(stop)),
        )

    def _give(self, end: int) -> str:
        """Return the settled text up to there that was not given yet, and forget what is no longer needed."""
        text = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        done = max(min(self._num_given, len(self._text) - self._overlap), 0)
        self._text, self._num_given = self._text[done:], self._num_given - done
        return text


def texts(tokenizer: Any, request: Request) -> Callable[[Delta], Delta]:
    """Return what gives the deltas of one request that come out of the engine their text.

    Those of a request with stop strings have theirs: the engine needs to know where it ends.
    """
    params = request.params
    if tokenizer is None or params.stop or not params.detokenize:
        return lambda delta: delta
    return texts_of(tokenizer, request)


def texts_of(tokenizer: Any, request: Request) -> Texts:
    """Return what gives a request's deltas their text, behind the tokens with which its answer begins."""
    made = Texts(tokenizer, request.params, request.prompt_token_ids)
    if request.continues:
        made(Delta(request.request_id, list(request.continues), None, 0))
    return made
