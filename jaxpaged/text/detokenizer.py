"""Text of token ids as they come: whole characters only, and joined the same as the text of all at once.

A token takes constant time, however long the answer is and however many tokens wait for the next.
"""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.text.vocabulary import REPLACEMENT, Vocabulary, vocabulary_of

CONTEXT = 8  # tokens of a prompt that may change what follows, where the tokenizer has to be asked
PATIENCE = 8  # tokens without a whole character, after which the tokenizer is asked more and more seldom


class Step(NamedTuple):
    """Result of one more token."""

    settled: str = ""  # characters that will not change any more
    # Characters known with this token, settled or not: those settled later are not known anew.
    known: str = ""
    is_taken_back: bool = False  # whether what was known and not settled is wrong


class Detokenizer:
    """One answer's text, piece by piece. A token may be part of a character: its text comes with the rest's.

    `tokenizer` is a transformers tokenizer. `prompt_token_ids` are what the answer goes on from: behind a
    prompt, a first word keeps its space. `spaces_between_special_tokens`, where they are not left out, is
    for tokenizers that the tokenizers library does not run: it puts no spaces there.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] | np.ndarray = (),
    ) -> None:
        self._vocabulary = vocabulary_of(tokenizer)
        self._skipped = self._vocabulary.special if skip_special_tokens else frozenset()
        self._stream: _Stream
        decoder = self._vocabulary.decoder
        if decoder is None:
            options = {"skip_special_tokens": skip_special_tokens}
            if getattr(tokenizer, "backend_tokenizer", None) is None:
                options["spaces_between_special_tokens"] = spaces_between_special_tokens
            before = [int(token) for token in prompt_token_ids[-CONTEXT:] if self._has_text(int(token))]
            self._stream = _Window(tokenizer, options, self._vocabulary, before)
        elif decoder.is_byte_level:
            self._stream = _Bytes(self._vocabulary)
        else:
            before = []
            for token in prompt_token_ids:
                before += [int(token)] if self._has_text(int(token)) else []
                if len(before) > decoder.strip[1]:
                    break
            self._stream = _Pieces(self._vocabulary, before)
        self._num_settled = self._num_ahead = 0

    @property
    def num_known(self) -> int:
        """Number of characters that are known, settled or not."""
        return self._num_settled + self._num_ahead

    @property
    def ahead(self) -> str:
        """The characters that are known and not settled."""
        return self._stream.ahead

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text that these tokens settle; with the last ones also what is no whole character."""
        text = "".join([self.step(token).settled for token in token_ids])
        return text + self._stream.finish() if is_last else text

    def step(self, token: int) -> Step:
        """Return the text that one more token settles."""
        if not self._has_text(token):
            return Step()
        step = self._stream.step(token)
        self._num_settled += len(step.settled)
        if step.settled or step.is_taken_back:
            self._num_ahead = 0
        else:
            self._num_ahead += len(step.known)
        return step

    def _has_text(self, token: int) -> bool:
        return token not in self._skipped and self._vocabulary[token] is not None


class _Stream(Protocol):
    """Text of tokens that have names and are not left out."""

    @property
    def ahead(self) -> str: ...

    def step(self, token: int) -> Step: ...

    def finish(self) -> str:
        """Return the text of what is left, whole characters or not."""


class _Bytes:
    """Decoder of a vocabulary whose tokens are all bytes: invalid bytes become replacement characters."""

    ahead = ""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> Step:
        text = self._decoder.decode(self._vocabulary.raw(token))
        return Step(text, text)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Run:
    """A run of byte tokens, read as a whole: with one byte that does not fit, none is a character."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_wrong = False
        self._ahead: list[str] = []

    @property
    def ahead(self) -> str:
        return "".join(self._ahead)

    def add(self, byte: bytes) -> Step:
        self._bytes += byte
        if self._is_wrong:
            return Step()
        try:
            known = self._decoder.decode(byte)
        except UnicodeDecodeError:
            self._is_wrong, self._ahead = True, []
            return Step(is_taken_back=True)
        self._ahead.append(known)
        return Step(known=known)

    def text(self) -> str:
        """Return the text of the run as a whole."""
        try:
            return self._bytes.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._bytes)


def _settled(text: str, ahead: str) -> Step:
    """Return the step of a settled text after `ahead` was shown early: the rest of the text, or all of it if
    `ahead` was wrong.
    """
    if text.startswith(ahead):
        return Step(text, text[len(ahead) :])
    return Step(text, text, is_taken_back=True)


class _Pieces:
    """Tokens with a text each, and runs of byte tokens between them."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int]) -> None:
        assert vocabulary.decoder is not None
        self._vocabulary, self._is_first = vocabulary, True
        self._stripped, self._num_to_strip = vocabulary.decoder.strip
        self._num_to_strip_ahead = 0  # behind the characters known of a run
        self._run: _Run | None = None
        for token in before:
            self.step(token)
        self.finish()

    @property
    def ahead(self) -> str:
        return "" if self._run is None else self._strip(self._run.ahead, self._num_to_strip)[0]

    def step(self, token: int) -> Step:
        entry = self._vocabulary[token]
        assert entry is not None
        if entry.is_byte:
            if self._run is None:
                self._run, self._num_to_strip_ahead = _Run(), self._num_to_strip
            self._is_first = False
            step = self._run.add(entry.raw)
            known, self._num_to_strip_ahead = self._strip(step.known, self._num_to_strip_ahead)
            return step._replace(known=known)
        ahead, text = self.ahead, self._close_run() + (entry.first if self._is_first else entry.text)
        self._is_first = False
        text, self._num_to_strip = self._strip(text, self._num_to_strip)
        return _settled(text, ahead)

    def finish(self) -> str:
        text, self._num_to_strip = self._strip(self._close_run(), self._num_to_strip)
        return text

    def _close_run(self) -> str:
        run, self._run = self._run, None
        return "" if run is None else run.text()

    def _strip(self, text: str, num_to_strip: int) -> tuple[str, int]:
        """Return the text without what an answer's beginning loses, and how much it may still lose."""
        while text and num_to_strip:
            if text[0] != self._stripped:
                return text, 0
            num_to_strip, text = num_to_strip - 1, text[1:]
        return text, num_to_strip


class _Window:
    """Tokens whose text is asked of the tokenizer, together with those before them."""

    def __init__(
        self, tokenizer: Any, options: dict[str, bool], vocabulary: Vocabulary, before: Sequence[int]
    ) -> None:
        self._tokenizer, self._options, self._vocabulary = tokenizer, options, vocabulary
        self._token_ids = [*before]  # the last ones given, and those that have not been
        self._num_given = len(self._token_ids)
        self._held: list[int] = []  # a run of byte tokens
        self._run: _Run | None = None

    @property
    def ahead(self) -> str:
        return "" if self._run is None else self._run.ahead

    def step(self, token: int) -> Step:
        entry = self._vocabulary[token]
        assert entry is not None
        self._held.append(token)
        if entry.is_byte:
            self._run = self._run or _Run()
            return self._run.add(entry.raw)
        num_waiting = len(self._token_ids) - self._num_given
        ahead, self._run = self.ahead, None
        self._token_ids += self._held
        self._held = []
        if num_waiting > PATIENCE and num_waiting & (num_waiting - 1):
            return Step(is_taken_back=bool(ahead))
        given, text = self._decode(self._num_given), self._decode()
        if len(text) <= len(given) or text.endswith(REPLACEMENT):
            return Step(is_taken_back=bool(ahead))
        self._token_ids = self._token_ids[self._num_given :]
        self._num_given = len(self._token_ids)
        return _settled(text[len(given) :], ahead)

    def finish(self) -> str:
        given = self._decode(self._num_given)
        self._token_ids += self._held
        return self._decode()[len(given) :]

    def _decode(self, end: int | None = None) -> str:
        token_ids = self._token_ids[:end]
        if not token_ids:
            return ""
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False, **self._options))
