"""Recursive grammars, followed on the host by llguidance: a mask behind each token of an answer.

llguidance is an extra, and imported only where a grammar needs it. It is read first in the process with
limits (`jaxpaged.grammar.worker`): what takes too long, or breaks it, ends there.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import GrammarError
from jaxpaged.grammar.vocabulary import TokenBytes

# Without it llguidance allows, where a text is forced, only the tokens that its tokenizer would write.
EVERY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
# The engine waits for each mask, and each row has a matcher: less than llguidance's own bounds.
BOUNDS: dict[str, Any] = {
    "max_lexer_states": 20_000,  # of about 2 kB
    "max_items_in_row": 400,
    "step_max_items": 10_000,
    "step_lexer_fuel": 1_000_000,  # at 14,000 a millisecond
}
ITS_NAME = "structured_outputs.grammar"


def is_installed() -> bool:
    """Check whether llguidance can be imported."""
    return importlib.util.find_spec("llguidance") is not None


def check_installed() -> None:
    """Raise `GrammarError` if llguidance cannot be imported."""
    if not is_installed():
        raise GrammarError(f"{ITS_NAME} needs llguidance: pip install 'jaxpaged[structured]'")


def lark_source(grammar: str) -> str:
    """Return a grammar in Lark's notation as the source of a `Language`. Raises `GrammarError`."""
    check_installed()
    if "%llguidance" in grammar:
        raise GrammarError(f"{ITS_NAME} has %llguidance: its options must be ours")
    return grammar + EVERY_TOKEN


class Language:
    """A recursive grammar over one vocabulary.

    source: in llguidance's form of Lark, as `lark_source` returns it. Raises `GrammarError` for one that
        llguidance refuses, and if no text is in it.
    """

    def __init__(self, source: str, tokens: TokenBytes) -> None:
        self.source, self._tokens = source, tokens
        self._first = Matcher(_matcher(source, tokens), tokens)
        if not self._first.allowed().any():
            raise _refused("no text is in it")

    def matcher(self) -> "Matcher":
        """Return the place of an answer without tokens."""
        return self._first.copy()


class Matcher:
    """The place of an answer in a recursive grammar. For one thread."""

    def __init__(self, matcher: Any, tokens: TokenBytes) -> None:
        self._matcher, self._tokens = matcher, tokens

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._tokens)

    def advance(self, token: int) -> bool:
        """Move behind one more token. Returns False if it may not come; then this is not to be used again.

        An end-of-sequence token, where it is allowed, changes nothing.
        """
        if token in self._tokens.eos_ids:
            return bool(self.allowed()[token])
        if not 0 <= token < len(self._tokens.raw) or not self._tokens.raw[token]:
            return False
        return bool(self._matcher.consume_token(token))

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return which tokens may come next. Where none may, the answer ends: its end tokens may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        size = len(self._tokens.raw)
        made = np.unpackbits(bits, bitorder="little", count=8 * len(bits))[:size].astype(bool)
        made[list(self._tokens.eos_ids)] = False
        if self._is_complete or not made.any():
            made[list(self._tokens.eos_ids)] = True
        return made

    @property
    def _is_complete(self) -> bool:
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())


def _matcher(source: str, tokens: TokenBytes) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**BOUNDS, verbose_errors=False)
    made = LLMatcher(_tokenizer(tokens), LLMatcher.grammar_from_lark(source), log_level=0, limits=limits)
    if made.is_error():
        raise _refused(made.get_error())
    # A first mask that allows nothing but the end, where the end is not allowed.
    made.compute_bitmask()
    if made.is_error() or (made.is_stopped() and not made.is_accepting()):
        raise _refused("no text is in it")
    return made


def _refused(why: str) -> GrammarError:
    """Return the error for a grammar, with the first line of llguidance's words."""
    line, *_ = why.split("<backtrace>")[0].strip().splitlines() or [""]
    return GrammarError(f"{ITS_NAME} must be a grammar that llguidance follows: {shown(line.strip())}")


@functools.lru_cache(maxsize=2)
def _tokenizer(tokens: TokenBytes) -> Any:
    """Return llguidance's view of a vocabulary. One without an end gets an id behind all others for it."""
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = tokens.eos_ids or (len(tokens.raw),)
    raw = [*tokens.raw, *([b""] if ends[0] == len(tokens.raw) else [])]
    return LLTokenizer(TokenizerWrapper(_Vocabulary(raw, ends[0])), eos_token=list(ends), slices=None)


class _Vocabulary:
    """A vocabulary as `TokenizerWrapper` reads it."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids: list[int] = []

    def __call__(self, text: Any) -> list[int]:
        """Refuse to write tokens: nothing is forced, so nobody asks."""
        raise NotImplementedError(f"the tokens of {text!r} are not known")
