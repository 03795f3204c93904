"""Vocabulary of a tokenizer: each token's text and its bytes, which may be part of a character."""

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"  # what a decoder says for bytes that are no character (yet)
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece's that stands for one byte
# Decoders of the tokenizers library that give each token its text by itself, but for the first.
EACH_ALONE = ("Metaspace", "Replace", "Strip", "WordPiece")


class Token(NamedTuple):
    """Text and bytes of a token."""

    text: str  # behind others; of bytes that are no character, U+FFFD
    first: str  # the same at a text's beginning
    raw: bytes  # its own
    is_byte: bool = False  # whether it is one of SentencePiece's bytes: a run of them is read as a whole


class Decoder(NamedTuple):
    """Rules by which a tokenizer decodes, where a token's text does not depend on its neighbours."""

    is_byte_level: bool  # all tokens are bytes; otherwise texts, beside `Token.is_byte`
    steps: Any = None  # the tokenizers library's decoder for a token's text, None for its name alone
    has_bytes: bool = False
    between: str = ""  # stands before each but the first
    strip: tuple[str, int] = ("", 0)  # a character, and how many of it a text's beginning loses


class Vocabulary:
    """The tokens of one tokenizer, each looked up once.

    `decoder` is None where the tokenizer itself has to be asked for the text of tokens together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.special = self._special()
        self.decoder = None if self._backend is None else _read(self._backend.decoder)
        self._tokens: dict[int, Token] = {}

    def __getitem__(self, token: int) -> Token | None:
        """Return the entry of a token; None for an id without a name, which has no text."""
        entry = self._tokens.get(token)
        if entry is None:
            name = self._name(token)
            if name is None:
                return None
            entry = self._tokens[token] = self._token(token, name)
        return entry

    def name(self, token: int, before: "Spelled | None" = None) -> str:
        """Return the name of a token: its text, or the text that it completes with the tokens before it.

        A token that ends within a character is called "", and the one that completes it by all of it.
        """
        entry = self[token]
        if entry is None:
            return ""
        text, is_whole, _ = _spell(before or Spelled(), entry)
        return text if is_whole else ""

    def after(self, token: int, before: "Spelled") -> "Spelled":
        """Return the unfinished character, if any, after one more token."""
        entry = self[token]
        if entry is None:
            return before
        text, is_whole, left = _spell(before, entry)
        return Spelled() if is_whole else Spelled(text, left)

    def raw(self, token: int) -> bytes:
        """Return a token's own bytes; none for an id without a name."""
        entry = self[token]
        return b"" if entry is None else entry.raw

    def _name(self, token: int) -> str | None:
        if self._backend is not None:
            name: str | None = self._backend.id_to_token(token)
        else:
            [name] = self._tokenizer.convert_ids_to_tokens([token])
        return name

    def _token(self, token: int, name: str) -> Token:
        decoder = self.decoder
        if decoder is not None and decoder.is_byte_level:
            raw = _level_bytes(name)
            text = raw.decode("utf-8", "replace")
            return Token(text, text, raw)
        is_byte = BYTE.fullmatch(name)
        if is_byte and (decoder is None or decoder.has_bytes):
            raw = bytes.fromhex(is_byte[1])
            text = raw.decode("utf-8", "replace")
            return Token(text, text, raw, is_byte=True)
        if decoder is None:
            text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
            return Token(text, text, text.encode("utf-8", "replace"))
        first = text = name
        if decoder.steps is not None:
            # Behind a token that is there only to be one before it.
            first, text = decoder.steps.decode([name]), decoder.steps.decode(["x", name])
            text = text[len(decoder.steps.decode(["x"])) :]
        text = decoder.between + text
        return Token(text, first, text.encode("utf-8", "replace"))

    def _special(self) -> frozenset[int]:
        """Return the token ids that `skip_special_tokens` leaves out."""
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            return frozenset(i for i, token in added.items() if token.special)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(self._tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


class Spelled(NamedTuple):
    """The end of tokens that is within a character: text before it that no token was called by, and bytes."""

    text: str = ""
    left: bytes = b""


class Names:
    """Names of the tokens of one sequence, in order."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._spelled = Spelled()

    def of(self, token: int, others: Sequence[int]) -> list[str]:
        """Return the names of tokens behind the text so far, and then add `token` to that text."""
        names = [self._vocabulary.name(other, self._spelled) for other in others]
        self._spelled = self._vocabulary.after(token, self._spelled)
        return names


@functools.lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the tokenizer's vocabulary, the same one each time."""
    return Vocabulary(tokenizer)


def _spell(before: Spelled, token: Token) -> tuple[str, bool, bytes]:
    """Return a token's text behind others, whether it ends with a whole character, and the bytes left."""
    text = token.text
    if REPLACEMENT not in text or _is_text(token.raw):
        return text, True, b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(before.left + token.raw)
    left: bytes = decoder.getstate()[0]
    return before.text + text, not left, left


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(decoder: Any) -> Decoder | None:
    """Return how a decoder of the tokenizers library makes text, if each token's share is its own."""
    if decoder is None:
        return Decoder(is_byte_level=False, between=" ")
    steps = _flat(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoder(is_byte_level=True)
    strip = "", 0
    if kinds[-1:] == ["Strip"] and "Fuse" in kinds and not steps[-1]["stop"]:
        strip = steps[-1]["content"], steps[-1]["start"]
        steps, kinds = steps[:-1], kinds[:-1]
    if kinds[-1:] == ["Fuse"]:
        kinds = kinds[:-1]
    has_bytes = kinds[-1:] == ["ByteFallback"]
    if has_bytes:
        kinds = kinds[:-1]
    if not all(kind in EACH_ALONE for kind in kinds):
        return None
    made = _decoder(steps[: len(kinds)]) if kinds else None
    return Decoder(is_byte_level=False, steps=made, has_bytes=has_bytes, strip=strip)


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for each in state["decoders"] for step in _flat(each)]


def _decoder(steps: list[dict[str, Any]]) -> Any:
    """Return the tokenizers library's decoder with these steps."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    described = {"model": model, "decoder": {"type": "Sequence", "decoders": steps}}
    return Tokenizer.from_str(json.dumps(described)).decoder


def _level_bytes(name: str) -> bytes:
    """Return the bytes of a byte-level token; of a name that is none, its own."""
    bytes_of = _bytes_of_letters()
    if all(letter in bytes_of for letter in name):
        return bytes(bytes_of[letter] for letter in name)
    return name.encode("utf-8", "replace")


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte for each letter of GPT-2's alphabet: printable ones of Latin-1 are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
