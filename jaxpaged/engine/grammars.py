"""Grammars of requests: compiled while the thread that asks waits, and kept while they are used."""

import collections
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.arena import Grammar
from jaxpaged.engine.by_host import Language
from jaxpaged.grammar.automaton import TokenAutomaton, behind_reasoning
from jaxpaged.grammar.cache import GrammarCache
from jaxpaged.models.config import ModelConfig
from jaxpaged.step.automata import BLOCK_WORDS, NOWHERE, Automaton, encoded, encoded_for_host
from jaxpaged.structured_outputs import StructuredOutputsParams

# Words of grammars that are kept in the host's memory, in arenas: 4 times what the device has room for.
KEPT_ARENAS = 4
MOST_FOLLOWED = 64  # grammars of them that the host follows
MOST_REFUSED = 1024  # constraints that are remembered as too large


def grammars_of(
    config: EngineConfig, model_config: ModelConfig, tokenizer: Any, make_ready: Callable[[], None]
) -> "Grammars | None":
    """Return what compiles and keeps an engine's grammars; None without room for them, or a tokenizer."""
    if tokenizer is None or not config.most_arena_words:
        return None
    vocab_size = model_config.vocab_size
    cache = GrammarCache(tokenizer, vocab_size, model_config.eos_token_ids)
    sizes = vocab_size, config.most_arena_words
    return Grammars(None, *sizes, cache.close, cache.get, cache.under_way, make_ready)


class Grammars:
    """The grammars in the host's memory by their constraints, for any thread.

    compile_: returns the automaton of a constraint, or the language of a recursive one; raises `InputError`.
    num_words: words of the device's arena.
    close: ends what compiles.
    ask: returns the future of what `compile_` does, by constraint and client; in its place.
    under_way: returns the keys of constraints that are compiled now.
    make_ready: makes the engine ready for a request with a grammar, before one is made of it.
    """

    def __init__(
        self,
        compile_: Callable[[StructuredOutputsParams], Any] | None,
        vocab_size: int,
        num_words: int,
        close: Callable[[], None] = lambda: None,
        ask: Callable[[StructuredOutputsParams, Hashable], Future[Any]] | None = None,
        under_way: Callable[[], Sequence[str]] = list,
        make_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._compile, self._vocab_size, self._num_words = compile_, vocab_size, num_words
        self._ask, self.close, self.under_way, self._make_ready = ask, close, under_way, make_ready
        self._kept: collections.OrderedDict[str, Grammar] = collections.OrderedDict()
        # Those of requests under way are found, too, when others have taken their room.
        self._in_use: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()
        self._refused: collections.OrderedDict[str, str] = collections.OrderedDict()  # that have no room
        self._lock = threading.Lock()

    def get(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a constraint, compiled if it has to be.

        Raises `InputError` for one that cannot be compiled, or that the arena could never hold.
        """
        if (known := self._known(params)) is not None:
            return known
        made = self.ask(params)
        try:
            return self.take(params, made.result())
        finally:
            made.cancel()  # where the wait was interrupted

    def ask(self, params: StructuredOutputsParams, client: Hashable = None) -> Future[Any]:
        """Return the future of what a constraint is compiled to, for `take`. Cancelling it gives it up.

        client: who asks: the time of compiling is shared evenly. Raises `InputError` as the future does.
        """
        with self._lock:
            if (why := self._refused.get(_short(params))) is not None:
                raise InputError(why)
        without = dataclasses.replace(params, reasoning_token_id=None)
        if (known := self._known(without)) is not None:
            made: Future[Any] = Future()
            made.set_result(known.automaton if known.language is None else known.language)
            return made
        if self._ask is not None:
            return self._ask(params, client)
        assert self._compile is not None
        made = Future()
        made.set_result(self._compile(params))
        return made

    def take(self, params: StructuredOutputsParams, compiled: Any) -> Grammar:
        """Return the grammar of what a constraint was compiled to, and keep it. Raises `InputError`."""
        key = _key(params)
        try:
            made = self._made(params, compiled)  # without the lock: others need not wait for it
        except InputError as error:
            with self._lock:
                self._refused[_short(params)] = str(error)
                while len(self._refused) > MOST_REFUSED:
                    self._refused.popitem(last=False)
            raise
        self._make_ready()
        with self._lock:
            made = self._in_use[key] = self._kept.setdefault(key, made)
            max_words = KEPT_ARENAS * self._num_words
            while (
                len(self._kept) > 1 and sum(len(grammar.words) for grammar in self._kept.values()) > max_words
            ):
                self._kept.popitem(last=False)
            followed = [key for key, grammar in self._kept.items() if grammar.language is not None]
            for key in followed[:-MOST_FOLLOWED]:
                del self._kept[key]
        return made

    def _known(self, params: StructuredOutputsParams) -> Grammar | None:
        key = _key(params)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
            return self._in_use.get(key)

    def for_search(self, grammar: Grammar, width: int) -> Grammar:
        """Return the grammar of a beam search. Raises `InputError` if its masks could never have room."""
        made = grammar.for_search(width)
        rule = f"one whose masks have room in structured_outputs_mib={self._num_words >> 18}"
        has_room = len(made.words) <= self._num_words - BLOCK_WORDS
        check("beam_width", width, f"{rule}: the host follows the grammar", has_room)
        return made

    def has(self, params: StructuredOutputsParams) -> bool:
        """Check whether a grammar is here, so that nothing has to be compiled."""
        return self._known(params) is not None

    def _made(self, params: StructuredOutputsParams, automaton: Any) -> Grammar:
        if not isinstance(automaton, Automaton):
            return self._by_host(params, automaton)
        if (begins := params.reasoning_token_id) is not None:
            assert params.after_token_id is not None
            assert isinstance(automaton, TokenAutomaton)
            automaton = behind_reasoning(automaton, begins, params.after_token_id)
        words = encoded(automaton, self._vocab_size)
        what = f"structured_outputs.{params.kind} makes an automaton of {len(automaton.next_state)} states"
        if words is None:
            raise InputError(f"{what}, must make one of less than {NOWHERE} states and classes of tokens")
        max_words = self._num_words - BLOCK_WORDS
        if len(words) > max_words:
            raise InputError(
                f"{what} and {4 * len(words)} bytes, must make one of at most {4 * max_words}: simplify it, "
                f"or raise structured_outputs_mib={self._num_words >> 18}"
            )
        return Grammar(automaton, words, begins=begins)

    def _by_host(self, params: StructuredOutputsParams, language: Language) -> Grammar:
        words = encoded_for_host(self._vocab_size)
        if len(words) > self._num_words - BLOCK_WORDS:
            raise InputError(
                f"structured_outputs.{params.kind} needs {4 * len(words)} bytes for its mask: raise "
                f"structured_outputs_mib={self._num_words >> 18}"
            )
        return Grammar(None, words, language, begins=params.reasoning_token_id)


def _key(params: StructuredOutputsParams) -> str:
    """Return a text that is the same for constraints of one grammar. Raises `InputError`."""
    if params.reasoning_token_id is None:
        return params.key()
    return f"{params.key()} {params.reasoning_token_id} {params.after_token_id}"


def _short(params: StructuredOutputsParams) -> str:
    return hashlib.sha256(_key(params).encode()).hexdigest()
