"""Cache of compiled constraints for one vocabulary: automata on disk, and else made by processes in turns."""

import collections
import hashlib
import importlib.metadata
import json
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from jaxpaged import disk_cache
from jaxpaged.checks import shown
from jaxpaged.grammar import files, recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.compiler import CLOSED, Compiler
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.recursive import Language
from jaxpaged.grammar.vocabulary import TokenBytes, token_bytes
from jaxpaged.grammar.worker import Worker
from jaxpaged.text.vocabulary import Vocabulary

SUFFIX = ".grammar"
MAX_FILES, MAX_BYTES = 256, 512 * 2**20  # of all files together
MOST_REFUSALS = 1024  # that are remembered
REFUSED_SECONDS = 600.0  # for so long: another time a process may be faster


class Constraint(Protocol):
    """A constraint, as `StructuredOutputsParams` is one."""

    def key(self) -> str:
        """Return its fields as JSON text, the same for the same constraint."""


class GrammarCache:
    """Automata of constraints, and languages of recursive ones. Any thread may ask.

    Those that are not on disk are compiled by turns: a small one does not wait for a large one, nor one
    client for another's. Automata are kept on disk alone: who asked keeps them in memory.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        self._store = _Store(tokenizer, vocab_size, tuple(eos_ids), limits or Limits())
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._finalizer = weakref.finalize(self, _end, self.__dict__)

    def get(self, constraint: Constraint, client: Hashable = None) -> Future[TokenAutomaton | Language]:
        """Return a future of the automaton or the language of a constraint.

        client: who asks. Cancelling the future gives the constraint up, if nobody else waits for it.

        The future raises `GrammarError` for one that cannot be met, is too large or is not supported. Raises
        `GrammarError` when the cache is closed, and for a constraint that was refused before.
        """
        key = constraint.key()
        self._store.check(key)
        with self._lock:
            if not self._finalizer.alive:
                raise GrammarError(CLOSED)
            if self._compiler is None:
                store = self._store
                self._compiler = Compiler(store.worker, store.find, store.keep, store.refuse)
            compiler = self._compiler
        return compiler.ask(key, client)

    def under_way(self) -> list[str]:
        """Return the keys of the constraints that somebody waits for."""
        return [] if self._compiler is None else self._compiler.under_way()

    def close(self) -> None:
        """End the thread and the processes. Nothing can be asked any more."""
        self._finalizer()


class _Store:
    """Files of a cache and the constraints that it has refused; the compiler's thread uses it, too."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...], limits: Limits) -> None:
        self._made_from, self._limits = (tokenizer, vocab_size, eos_ids), limits
        self._made_tokens: TokenBytes | None = None
        self._lock = threading.Lock()
        self._refusals: collections.OrderedDict[bytes, tuple[float, str, str]] = collections.OrderedDict()

    @property
    def _tokens(self) -> TokenBytes:
        if self._made_tokens is None:
            tokenizer, vocab_size, eos_ids = self._made_from
            self._made_tokens = token_bytes(Vocabulary(tokenizer), vocab_size, eos_ids)
        return self._made_tokens

    def worker(self) -> Worker:
        """Return a new worker, which compiles constraints."""
        return Worker(self._tokens, self._limits)

    def find(self, key: str) -> TokenAutomaton | None:
        """Return the automaton of a constraint that is on disk."""
        made_from = self._key_of(key)
        if (path := disk_cache.path_of(made_from, SUFFIX)) is None:
            return None
        try:
            if not disk_cache.is_own(path.parent) or not disk_cache.is_own(path):
                return None
            if path.stat().st_size > 2 * self._limits.max_table_bytes:
                logging.warning("%s is not used: it is larger than any grammar of ours", path)
                return None
            content = path.read_bytes()
        except OSError:
            return None
        automaton = files.from_file(
            content, disk_cache.key_of(made_from), len(self._tokens.raw), self._limits
        )
        if automaton is None:
            logging.warning("%s is not used: it is torn, or not the grammar that it is named for", path)
            return None
        path.touch()
        return _told(automaton, key)

    def keep(self, key: str, made: TokenAutomaton | str) -> TokenAutomaton | Language:
        """Return the compiled form of a constraint; an automaton is also written to disk."""
        if isinstance(made, str):
            return Language(made, self._tokens)
        made_from = self._key_of(key)
        if (path := disk_cache.path_of(made_from, SUFFIX)) is not None:
            self._write(path, files.to_file(made, disk_cache.key_of(made_from)))
        return _told(made, key)

    def refuse(self, key: str, error: GrammarError) -> None:
        """Remember why a constraint was refused."""
        with self._lock:
            self._refusals[_short(key)] = time.monotonic() + REFUSED_SECONDS, str(error), error.path
            while len(self._refusals) > MOST_REFUSALS:
                self._refusals.popitem(last=False)

    def check(self, key: str) -> None:
        """Raise `GrammarError` for a constraint that was refused before."""
        with self._lock:
            until, *known = self._refusals.get(_short(key), (0.0,))
        if time.monotonic() < until:
            raise GrammarError(*known)

    def _key_of(self, key: str) -> tuple[object, ...]:
        made_from: tuple[object, ...] = ("grammar", files.VERSION, key, self._tokens.digest, self._limits)
        if recursive.is_installed():  # on which JSON of any depth depends
            made_from = (*made_from, "llguidance", importlib.metadata.version("llguidance"))
        return made_from

    def _write(self, path: Path, content: bytes) -> None:
        try:
            disk_cache.write_file(path, content)
            disk_cache.prune(path, MAX_FILES, disk_cache.key_at_start, MAX_BYTES)
        except OSError as problem:
            logging.warning("a grammar could not be kept in %s: %s", path, problem)


def _short(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _told(automaton: TokenAutomaton, key: str) -> TokenAutomaton:
    """Return an automaton, and log if its nesting was cut without a `max_depth` from the user."""
    if automaton.levels and "max_depth" not in json.loads(key):
        logging.warning(
            "structured outputs: %s is followed to %d levels of values inside values, not to any depth: "
            "llguidance is not installed, or has not all of its keywords. max_depth says so on purpose",
            *(shown(key), automaton.levels),
        )
    return automaton


def _end(attributes: dict[str, Any]) -> None:
    if (compiler := attributes.get("_compiler")) is not None:
        compiler.close()
