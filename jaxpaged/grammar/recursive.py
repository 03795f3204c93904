"""Recursive grammars, followed on the host by llguidance: a mask behind each token of an answer.

llguidance is an extra, and imported only where a grammar needs it. It is read first in the process with
limits (`jaxpaged.grammar.worker`): what takes too long, or breaks it, ends there.
"""

import copy
import functools
import importlib.util
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import GrammarError, LostError
from jaxpaged.grammar.vocabulary import TokenBytes

# Without it llguidance allows, where a text is forced, only the tokens that its tokenizer would write.
EVERY_TOKEN = '\n%llguidance {"no_forcing": true}\n'
# The engine waits for each mask, and each row has a matcher: less than llguidance's own bounds.
BOUNDS: dict[str, Any] = {
    "max_lexer_states": 50_000,  # of about 2 kB: twenty texts of 2,000 characters
    "max_items_in_row": 400,
    "step_max_items": 10_000,
    "step_lexer_fuel": 1_000_000,  # at 14,000 a millisecond
}
# A schema's objects have an item for each property that may come next; its items are few beside them.
BOUNDS_OF_JSON = BOUNDS | {"max_items_in_row": 2_000, "step_max_items": 50_000}
JSON_SOURCE = "// JSON\n"  # the beginning of a schema's source
# Answers that are tried before a grammar is taken, and tokens of each: most of what is too much is seen so.
NUM_TRIED, TRIED_TOKENS = 2, 16
MOST_LEXERS = 3  # that an answer may have, one after another, the last for itself alone
ITS_NAME = "structured_outputs.grammar"
NO_WAY = "NoExtensionBias"  # llguidance's word where no token may come, nor the end
# Its words where a lexer is used up: then it bars what it allowed before, too.
LEXER_PROBLEMS = "lexer error", "doesn't satisfy the grammar"


def is_installed() -> bool:
    """Check whether llguidance can be imported."""
    return importlib.util.find_spec("llguidance") is not None


def prepare(tokens: TokenBytes) -> None:
    """Build llguidance's tokenizer of a vocabulary, once."""
    _tokenizer(tokens)


def check_installed() -> None:
    """Raise `GrammarError` if llguidance cannot be imported."""
    if not is_installed():
        raise GrammarError(f"{ITS_NAME} needs llguidance: pip install 'jaxpaged[structured]'")


def check_text(grammar: str) -> None:
    """Raise `GrammarError` for a grammar with half of a pair of surrogates."""
    try:
        grammar.encode()
    except UnicodeEncodeError:
        what = f"{ITS_NAME}={shown(grammar)} must be text that UTF-8 can say"
        raise GrammarError(f"{what}: it has half a surrogate pair") from None


def lark_source(grammar: str) -> str:
    """Return a grammar in Lark's notation as the source of a `Language`. Raises `GrammarError`."""
    check_installed()
    if "%llguidance" in grammar:
        raise GrammarError(f"{ITS_NAME} has %llguidance: its options must be ours")
    return grammar + EVERY_TOKEN


class Language:
    """A recursive grammar over one vocabulary. Any thread may ask.

    source: in llguidance's form of Lark, as `lark_source` returns it. Raises `GrammarError` for one that
        llguidance refuses, and if no text is in it.

    Answers share a lexer, whose states are made when they are first needed, and never go. One that is used up
    is made anew. An answer that uses up a lexer of its own ends with an error.
    """

    def __init__(self, source: str, tokens: TokenBytes) -> None:
        self.source, self._tokens = source, tokens
        self._lock = threading.Lock()
        self._number, self._unread = 0, _matcher(source, tokens)  # of the lexer that new answers share
        try:
            if not self.matcher().allowed().any():
                raise _refused("no text is in it")
        except LostError as problem:
            raise _refused(str(problem)) from None

    def try_out(self) -> None:
        """Follow a few answers for a few tokens. Raises `GrammarError` if one takes more than is allowed."""
        for seed in range(NUM_TRIED):
            rng, matcher = random.Random(seed), self.matcher()
            try:
                for _ in range(TRIED_TOKENS):
                    may = matcher.allowed()
                    may[list(self._tokens.eos_ids)] = False
                    if not may.any():
                        break
                    matcher.advance(int(rng.choice(np.flatnonzero(may))))
            except LostError as problem:
                if matcher.is_stuck:
                    raise _refused(str(problem)) from None

    def matcher(self) -> "Matcher":
        """Return the place of an answer without tokens."""
        with self._lock:
            return Matcher(self, self._unread.deep_copy(), self._number, self._tokens)

    def anew(self, lexer: int, *, is_own: bool) -> tuple[Any, int]:
        """Return a matcher without tokens for an answer that has used up a lexer, and its lexer's number.

        is_own: no other answer is to have the lexer.
        """
        with self._lock:
            if lexer == self._number:
                self._number, self._unread = lexer + 1, _matcher(self.source, self._tokens)
            if not is_own:
                return self._unread.deep_copy(), self._number
        return _matcher(self.source, self._tokens), lexer


class Matcher:
    """The place of an answer in a recursive grammar. For one thread.

    matcher: llguidance's.
    lexer: number of its lexer among those of the language.
    """

    def __init__(self, language: Language, matcher: Any, lexer: int, tokens: TokenBytes) -> None:
        self._language, self._matcher, self._lexer, self._tokens = language, matcher, lexer, tokens
        self._answer: list[int] = []  # what it is behind
        self._num_lexers = 1  # that it has had
        self._last: np.ndarray | None = None  # what may come next, where that is known; uint8, bits

    @property
    def is_stuck(self) -> bool:
        """Whether the parser has given up, although the grammar has not ended."""
        return bool(self._matcher.is_error()) and NO_WAY not in self._matcher.get_error()

    def copy(self) -> "Matcher":
        made = copy.copy(self)
        made._matcher, made._answer = self._matcher.deep_copy(), [*self._answer]
        return made

    def advance(self, token: int) -> bool:
        """Move behind one more token. Returns False if it may not come; then this is not to be used again.

        An end-of-sequence token, where it is allowed, changes nothing. Raises `LostError`.
        """
        if token in self._tokens.eos_ids:
            return bool(self.allowed()[token])
        if not 0 <= token < len(self._tokens.raw) or not self._tokens.raw[token]:
            return False
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return False  # nothing may follow what is whole
        while not self._matcher.consume_token(token):
            if self._last is not None and not self._last[token // 8] >> (token % 8) & 1:
                return False
            self._move(self._matcher.get_error())
            self._last = self._bits()
        self._answer.append(token)
        self._last = None
        return True

    def allowed(self) -> Bool[np.ndarray, "V"]:
        """Return the tokens that are allowed next. Raises `LostError` if none is, not even the end."""
        bits = self._last = self._bits()
        size = len(self._tokens.raw)
        made = np.unpackbits(bits, bitorder="little", count=8 * len(bits))[:size].astype(bool)
        made[list(self._tokens.eos_ids)] = is_complete = bool(self._matcher.is_accepting())
        if not is_complete and not made.any():
            raise LostError(_sentence(NO_WAY))
        return made

    def _bits(self) -> UInt8[np.ndarray, "octets"]:
        """Return which tokens may come next, without the end. Raises `LostError`."""
        bits = self._matcher.compute_bitmask()
        while self._matcher.is_error():
            self._move(self._matcher.get_error())
            bits = self._matcher.compute_bitmask()
        return np.frombuffer(bits, np.uint8)

    def _move(self, problem: str) -> None:
        """Switch to another lexer: the next shared one, then one of this answer alone, so that other answers
        do not decide.

        Raises `LostError` where there is none, or the problem is not the lexer's.
        """
        if not any(words in problem for words in LEXER_PROBLEMS):
            raise LostError(_sentence(problem))
        while self._num_lexers < MOST_LEXERS:
            self._num_lexers += 1
            is_own = self._num_lexers == MOST_LEXERS
            self._matcher, self._lexer = self._language.anew(self._lexer, is_own=is_own)
            if not self._answer or self._matcher.consume_tokens(self._answer):
                return
        raise LostError(f"it needs a lexer of more than {BOUNDS['max_lexer_states']} states")


def _matcher(source: str, tokens: TokenBytes) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    bounds = BOUNDS_OF_JSON if source.startswith(JSON_SOURCE) else BOUNDS
    limits = LLParserLimits(**bounds, verbose_errors=False)
    made = LLMatcher(_tokenizer(tokens), LLMatcher.grammar_from_lark(source), log_level=0, limits=limits)
    if made.is_error():
        raise _refused(made.get_error())
    # A first mask that allows nothing but the end, where the end is not allowed.
    made.compute_bitmask()
    if made.is_error() or (made.is_stopped() and not made.is_accepting()):
        is_stuck = made.is_error() and NO_WAY not in made.get_error()
        raise _refused(made.get_error() if is_stuck else "no text is in it")
    return made


def _sentence(problem: str) -> str:
    """Return the first line of llguidance's words."""
    if NO_WAY in problem:
        return "no token of the vocabulary can continue it"
    line, *_ = problem.split("<backtrace>")[0].split("<non-verbose/>")[0].strip().splitlines() or [""]
    return line.strip()


def _refused(why: str) -> GrammarError:
    """Return the error for a grammar, with the first line of llguidance's words."""
    return GrammarError(f"{ITS_NAME} must be a grammar that llguidance follows: {shown(_sentence(why))}")


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
        """Raise `NotImplementedError`: llguidance asks here for no tokens of a text."""
        raise NotImplementedError(f"the tokens of {text!r} are not known")
