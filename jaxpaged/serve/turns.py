"""Turns of sessions: the tokens of answered messages, by which the next turn is compared with the last.

The next turn of a session has all messages of the turn before, and more. So the turn before is found by a
digest of the first messages, or by the id of its message, which a client may name. Where a chat template, or
the client, writes the history anew, the tokens differ from some place on: that is where caches end.

With `reuse_answers` prompts may find the blocks of answers. A model may write a text in other tokens than the
tokenizer does. So where the text of the turn before stands unchanged at a prompt's beginning, the prompt gets
the tokens that were written.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged.serve.metric_families import single

MAX_TURNS = 4096
MAX_TOKENS = 2**24  # of all turns together: 64 MiB
SHOWN_TOKENS, SHOWN_CHARS = 16, 80  # of a prompt's text where it differs


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Digests of a request.

    scope: within which turns are found: who asks, and the salt of the caches.
    chain: after each message the digest of all before it, with the model and the tools; of a turn that is
        remembered the last one only.
    """

    scope: str
    model: str
    tools: bytes
    system: bytes
    chain: tuple[bytes, ...]
    num_messages: int

    @property
    def brief(self) -> "Fingerprint":
        """The fingerprint with the last digest only."""
        return dataclasses.replace(self, chain=self.chain[-1:])

    @classmethod
    def of(
        cls,
        scope: str,
        model: str,
        tools: Sequence[Mapping[str, Any]] | None,
        messages: Sequence[Mapping[str, Any]],
    ) -> "Fingerprint":
        """Return the fingerprint of a conversation in the form of chat completions."""
        of_tools = _digest(tools)
        hashed, chain = hashlib.blake2b(f"{scope}\n{model}\n".encode() + of_tools, digest_size=16), []
        for message in messages:
            hashed.update(_digest(message))
            chain.append(hashed.digest())
        system = [message for message in messages[:1] if message.get("role") == "system"]
        return cls(scope, model, of_tools, _digest(system), tuple(chain), len(messages))


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message that was answered: its prompt's tokens with its answer's.

    num_findable: how many of the tokens, from the first on, the caches may have for later prompts: those of
        the prompt, and with `reuse_answers` those of the answer but the last, which was never computed.
    text_size, text_digest: of the text that `token_ids[:num_text_tokens]` are; None where their text is not
        known exactly.
    """

    message_id: str
    fingerprint: Fingerprint  # brief
    token_ids: np.ndarray  # [num_tokens] int32
    num_findable: int
    text_size: int | None = None
    text_digest: bytes = b""
    num_text_tokens: int = 0

    def is_begin_of(self, text: str) -> bool:
        """Tell whether a text begins with the text of this turn."""
        if self.text_size is None or self.text_size > len(text):
            return False
        return text_digest(text[: self.text_size]) == self.text_digest


class Turns:
    """The newest turns of all sessions. Of too many, whoever has most tokens loses the oldest."""

    def __init__(self, max_turns: int = MAX_TURNS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._turns: dict[str, collections.OrderedDict[str, Turn]] = {}
        self._by_digest: dict[bytes, Turn] = {}
        self._num_tokens: collections.Counter[str] = collections.Counter()
        self._num_turns = 0
        self.num_compared = self.num_rewritten = self.num_missed_tokens = 0

    def __len__(self) -> int:
        """Return how many turns are known."""
        return self._num_turns

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns that are known."""
        return self._num_tokens.total()

    def before(self, fingerprint: Fingerprint, message_id: str | None = None) -> Turn | None:
        """Return the turn of the message of this id, or else the longest that the request goes on from."""
        if message_id is not None:
            turns = self._turns.get(fingerprint.scope)
            return None if turns is None else turns.get(message_id)
        for digest in fingerprint.chain[-2::-1]:
            if (turn := self._by_digest.get(digest)) is not None:
                return turn
        return None

    def add(self, turn: Turn, before: Turn | None = None) -> None:
        """Remember a turn; the turn before it in its session is the next to be forgotten."""
        scope = turn.fingerprint.scope
        turns = self._turns.setdefault(scope, collections.OrderedDict())
        if turn.message_id in turns:
            self._forget(turns[turn.message_id])
            turns = self._turns.setdefault(scope, collections.OrderedDict())
        turns[turn.message_id] = turn
        self._by_digest[turn.fingerprint.chain[-1]] = turn
        self._num_tokens[scope] += len(turn.token_ids)
        self._num_turns += 1
        if before is not None and turns.get(before.message_id) is before:
            turns.move_to_end(before.message_id, last=False)
        while self._num_turns > self._max_turns or self.num_tokens > self._max_tokens:
            [(largest, _)] = self._num_tokens.most_common(1)
            self._forget(next(iter(self._turns[largest].values())))

    def _forget(self, turn: Turn) -> None:
        scope, digest = turn.fingerprint.scope, turn.fingerprint.chain[-1]
        del self._turns[scope][turn.message_id]
        if self._by_digest.get(digest) is turn:
            del self._by_digest[digest]
        self._num_tokens[scope] -= len(turn.token_ids)
        self._num_turns -= 1
        if not self._turns[scope]:
            del self._turns[scope], self._num_tokens[scope]

    def compare(
        self, turn: Turn, fingerprint: Fingerprint, token_ids: np.ndarray, block_size: int
    ) -> "Difference | None":
        """Return where a prompt leaves the findable tokens of the turn before it; None if it has all."""
        self.num_compared += 1
        place = num_alike(turn.token_ids, token_ids)
        if place >= turn.num_findable:
            return None
        missed = (turn.num_findable // block_size - place // block_size) * block_size
        self.num_rewritten += 1
        self.num_missed_tokens += missed
        return Difference(turn.message_id, _changed(turn.fingerprint, fingerprint), place, missed)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The place where a prompt leaves the tokens of the turn before it.

    changed: what differs in the requests: "model", "tools", "system", "messages", or "template" where the
        requests agree, and the chat template alone writes the history anew.
    token: index of the first token that differs.
    num_missed_tokens: tokens that the caches would have had otherwise.
    """

    message_id: str
    changed: str
    token: int
    num_missed_tokens: int


def _changed(before: Fingerprint, now: Fingerprint) -> str:
    for name in ("model", "tools", "system"):
        if getattr(before, name) != getattr(now, name):
            return name
    size = before.num_messages
    return "template" if now.chain[size - 1 : size] == before.chain else "messages"


async def rejoined(
    turn: Turn, text: str, token_ids: Sequence[int], tokenize: Callable[[str], Awaitable[list[int]]]
) -> list[int] | None:
    """Return the tokens of a prompt with those of the turn before it as they were written.

    text, token_ids: the prompt, and its tokens as the tokenizer cuts them. Returns None where the prompt does
    not begin with the turn's text, has its tokens already, or where no token ends behind that text.
    """
    if not turn.is_begin_of(text):
        return None
    assert turn.text_size is not None
    written = turn.token_ids[: turn.num_text_tokens].tolist()
    if token_ids[: len(written)] == written:
        return None
    cut = await tokenize(text[: turn.text_size])
    return [*written, *token_ids[len(cut) :]] if token_ids[: len(cut)] == cut else None


def num_alike(first: np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Return how many tokens at the beginning of both are equal."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != np.asarray(second[:size], np.int32))
    return int(differs[0]) if len(differs) else size


def text_digest(text: str) -> bytes:
    """Return a digest of a text, 16 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digest(value: Any) -> bytes:
    return text_digest(json.dumps(value))


class TurnCollector(Collector):
    """Metrics of the turns of sessions."""

    def __init__(self, turns: Turns, labels: tuple[str, str]) -> None:
        self._turns, self._labels = turns, labels

    def collect(self) -> Iterator[Metric]:
        turns = self._turns
        for name, help_, value in (
            ("session_turns", "Requests compared with the turn before.", turns.num_compared),
            ("session_turns_rewritten", "Requests whose history has other tokens.", turns.num_rewritten),
            (
                "session_missed_tokens",
                "Tokens that caches would have had otherwise.",
                turns.num_missed_tokens,
            ),
        ):
            yield single(CounterMetricFamily, f"jaxpaged:{name}", help_, value, self._labels)
