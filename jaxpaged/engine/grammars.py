"""Grammars of requests: compiled while the thread that asks waits, and kept while they are used."""

import collections
import threading
from collections.abc import Callable
from typing import Any

from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.arena import Grammar
from jaxpaged.engine.by_host import Language
from jaxpaged.grammar.cache import GrammarCache
from jaxpaged.models.config import ModelConfig
from jaxpaged.step.automata import BLOCK_WORDS, NOWHERE, Automaton, encoded, encoded_for_host
from jaxpaged.structured_outputs import StructuredOutputsParams

# Words of grammars that are kept in the host's memory, in arenas: 4 times what the device has room for.
KEPT_ARENAS = 4
MOST_FOLLOWED = 64  # grammars of them that the host follows


def grammars_of(config: EngineConfig, model_config: ModelConfig, tokenizer: Any) -> "Grammars | None":
    """Return what compiles and keeps an engine's grammars; None without room for them, or a tokenizer."""
    if tokenizer is None or not config.arena_words:
        return None
    vocab_size = model_config.vocab_size
    cache = GrammarCache(tokenizer, vocab_size, model_config.eos_token_ids)
    return Grammars(lambda params: cache.get(params).result(), vocab_size, config.arena_words, cache.close)


class Grammars:
    """The grammars in the host's memory by their constraints, for any thread.

    compile_: returns the automaton of a constraint, or the language of a recursive one; raises `InputError`.
    num_words: words of the device's arena.
    close: ends what compiles.
    """

    def __init__(
        self,
        compile_: Callable[[StructuredOutputsParams], Any],
        vocab_size: int,
        num_words: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._compile, self._vocab_size, self._num_words = compile_, vocab_size, num_words
        self.close = close
        self._kept: collections.OrderedDict[str, Grammar] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a constraint, compiled if it has to be.

        Raises `InputError` for one that cannot be compiled, or that the arena could never hold.
        """
        key = params.key()
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        made = self._made(params)  # without the lock: others need not wait for it
        with self._lock:
            made = self._kept.setdefault(key, made)
            most = KEPT_ARENAS * self._num_words
            while len(self._kept) > 1 and sum(len(its.words) for its in self._kept.values()) > most:
                self._kept.popitem(last=False)
            followed = [key for key, its in self._kept.items() if its.language is not None]
            for key in followed[:-MOST_FOLLOWED]:
                del self._kept[key]
        return made

    def for_search(self, grammar: Grammar, width: int) -> Grammar:
        """Return the grammar of a beam search. Raises `InputError` if its masks could never have room."""
        made = grammar.for_search(width)
        rule = f"one whose masks have room in structured_outputs_mib={self._num_words >> 18}"
        has_room = len(made.words) <= self._num_words - BLOCK_WORDS
        check("beam_width", width, f"{rule}: the host follows the grammar", has_room)
        return made

    def has(self, params: StructuredOutputsParams) -> bool:
        """Check whether a grammar is here, so that nothing has to be compiled."""
        with self._lock:
            return params.key() in self._kept

    def _made(self, params: StructuredOutputsParams) -> Grammar:
        automaton = self._compile(params)
        if not isinstance(automaton, Automaton):
            return self._by_host(params, automaton)
        words = encoded(automaton, self._vocab_size)
        what = f"structured_outputs.{params.kind} makes an automaton of {len(automaton.next_state)} states"
        if words is None:
            raise InputError(f"{what}, must make one of less than {NOWHERE} states and classes of tokens")
        most = self._num_words - BLOCK_WORDS
        if len(words) > most:
            raise InputError(
                f"{what} and {4 * len(words)} bytes, must make one of at most {4 * most}: simplify it, or "
                f"raise structured_outputs_mib={self._num_words >> 18}"
            )
        return Grammar(automaton, words)

    def _by_host(self, params: StructuredOutputsParams, language: Language) -> Grammar:
        words = encoded_for_host(self._vocab_size)
        if len(words) > self._num_words - BLOCK_WORDS:
            raise InputError(
                f"structured_outputs.{params.kind} needs {4 * len(words)} bytes for its mask: raise "
                f"structured_outputs_mib={self._num_words >> 18}"
            )
        return Grammar(None, words, language)
