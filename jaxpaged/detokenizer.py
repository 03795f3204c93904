"""Text of token ids as they come: whole characters only, and joined the same as the text of all at once."""

import functools
import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder says for bytes that are no character (yet)
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece's that stands for one byte


class Detokenizer:
    """One answer's text, piece by piece. A token may be part of a character: its text comes with the rest's.

    `tokenizer` is a transformers tokenizer. `spaces_between_special_tokens`, where they are not left out, is
    for those that the tokenizers library does not run: it puts no spaces there.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, bool] = {"skip_special_tokens": skip_special_tokens}
        self._token_ids: list[int] = []
        self._num_given = 0  # characters
        # Tokens that wait for the next one. A run of byte tokens has its text as a whole: with one byte that
        # does not fit, none of them is a character.
        self._held: list[int] = []
        # Left out, so a run goes on behind them.
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        # Of tokenizers that the tokenizers library runs; the others' texts are compared here.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        else:
            self._options["spaces_between_special_tokens"] = spaces_between_special_tokens
        self._begin = 0  # the tokens from here on are decoded together; those before have been given
        self._read = 0  # and up to here they have been given, too

    def add(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """The text that these tokens complete; with the last ones also what is no whole character."""
        text = ""
        for token, name in zip(token_ids, self._tokenizer.convert_ids_to_tokens(token_ids), strict=True):
            self._held.append(token)
            if not (BYTE.fullmatch(name or "") or token in self._special):
                text += self._step(self._held)
                self._held = []
        self._num_given += len(text)
        if is_last:
            self._token_ids += self._held
            text += self._decode(0)[self._num_given :]
        return text

    @property
    def held(self) -> str:
        """The text of tokens that wait for the next one, if it is none of theirs; "" for half a character."""
        if not self._held:
            return ""
        self._token_ids += self._held
        text = self._decode(0)[self._num_given :]
        del self._token_ids[-len(self._held) :]
        return "" if text.endswith(REPLACEMENT) else text

    def _step(self, token_ids: list[int]) -> str:
        self._token_ids += token_ids
        if self._backend is not None:
            return self._stream.step(self._backend, token_ids) or ""
        given, text = self._decode(self._begin, self._read), self._decode(self._begin)
        if len(text) <= len(given) or text.endswith(REPLACEMENT):
            return ""
        self._begin, self._read = self._read, len(self._token_ids)
        return text[len(given) :]

    def _decode(self, begin: int, end: int | None = None) -> str:
        text = self._tokenizer.decode(
            self._token_ids[begin:end], clean_up_tokenization_spaces=False, **self._options
        )
        return str(text)


def text_of(tokenizer: Any, token_ids: Sequence[int], **options: bool) -> str:
    """The text of a whole answer."""
    return Detokenizer(tokenizer, **options).add(token_ids, is_last=True)


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
