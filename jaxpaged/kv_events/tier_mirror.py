"""Mirror of what tiers below the device have: changes go in from any thread, events come out.

A tier knows a block by the digest of its key. What that stands for in events is noted when a request brings
its tokens: a block that nobody has asked for since the engine began, as in a directory, is not told.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxpaged import routing
from jaxpaged.kv_events.messages import BlockRemoved, BlockStored, Event
from jaxpaged.kv_events.tree import Label

MOST_UNTOLD = 2**14  # digests that are remembered though no tier has their blocks

type Observer = Callable[[bytes, bool], None]  # is told a block's digest, and whether it is there


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Meaning of a digest."""

    key: int
    parent: int | None
    token_ids: tuple[int, ...]
    label: Label
    place: int  # in its chain


class TierMirror:
    """Mirror of some tiers, each told by the name of its medium."""

    def __init__(self, block_size: int, media: Sequence[str]) -> None:
        self._block_size = block_size
        self._known: dict[bytes, Content] = {}
        self._reported: dict[str, set[bytes]] = {medium: set() for medium in media}
        self._lost: list[Event] = []  # to be told
        self._changes: collections.deque[tuple[str, bytes, bool]] = collections.deque()

    def observer(self, medium: str) -> Observer:
        """Return the callback for a tier to report blocks that it gains or loses, from any thread."""
        return lambda digest, is_there: self._changes.append((medium, digest, is_there))

    def note(self, digests: Sequence[bytes], token_ids: np.ndarray, label: Label) -> None:
        """Record the contents of a chain's full blocks. Call it before the tiers have them."""
        size, parent = self._block_size, None
        keys = routing.keys_of_tokens(token_ids[: len(digests) * size], size, label.salt)
        for place, (digest, key) in enumerate(zip(digests, keys, strict=True)):
            number = int.from_bytes(key, "big")
            content = self._known.pop(digest, None)
            if content is None:
                ids = tuple(token_ids[place * size : (place + 1) * size].tolist())
                content = Content(number, parent, ids, label, place)
            self._known[digest] = content  # behind those that were noted before
            parent = number
        if len(self._known) > MOST_UNTOLD + 2 * sum(map(len, self._reported.values())):
            reported = set().union(*self._reported.values(), (digest for _, digest, _ in [*self._changes]))
            untold = [digest for digest in self._known if digest not in reported]
            num_left = max(MOST_UNTOLD // 2, len(digests))  # blocks of the newest may be on their way
            for digest in untold[: max(len(untold) - num_left, 0)]:
                del self._known[digest]

    def events(self) -> list[Event]:
        """Return the events of all that has changed, removals first."""
        states: dict[str, dict[bytes, bool]] = {medium: {} for medium in self._reported}
        while self._changes:
            medium, digest, is_there = self._changes.popleft()
            states[medium][digest] = is_there
        events, self._lost = self._lost, []
        for medium, changed in states.items():
            reported = self._reported[medium]
            gone = [digest for digest, is_there in changed.items() if not is_there and digest in reported]
            new = [digest for digest, is_there in changed.items() if is_there and digest not in reported]
            new = [digest for digest in new if digest in self._known]
            reported.difference_update(gone)
            reported.update(new)
            if gone:
                events.append(self._removed(medium, gone))
            events += self._stored(medium, new)
        return events

    def retold(self) -> list[Event]:
        """Return events of all blocks that are stored now, for a follower that starts anew."""
        self.events()
        return [
            event
            for medium, reported in self._reported.items()
            for event in self._stored(medium, [*reported])
        ]

    def lose_all(self) -> None:
        """Report all blocks as removed, whatever the tiers store."""
        self._lost += [
            self._removed(medium, reported) for medium, reported in self._reported.items() if reported
        ]
        self._known, self._reported = {}, {medium: set() for medium in self._reported}

    def _removed(self, medium: str, digests: Iterable[bytes]) -> BlockRemoved:
        return BlockRemoved([self._known[digest].key for digest in digests], medium, 0)

    def _stored(self, medium: str, digests: Sequence[bytes]) -> list[Event]:
        """Return the events of blocks that are there, each for neighbours of a chain."""
        runs: list[list[Content]] = []
        ends: dict[int, list[Content]] = {}  # runs by their last keys
        for content in sorted((self._known[digest] for digest in digests), key=lambda content: content.place):
            run = ends.pop(content.parent, None) if content.parent is not None else None
            if run is None:
                runs.append(run := [])
            run.append(content)
            ends[content.key] = run
        return [self._event(medium, run) for run in runs]

    def _event(self, medium: str, run: Sequence[Content]) -> BlockStored:
        first, label = run[0], run[0].label
        return BlockStored(
            block_hashes=[content.key for content in run],
            parent_block_hash=first.parent,
            token_ids=[token for content in run for token in content.token_ids],
            block_size=self._block_size,
            lora_id=label.lora_id,
            medium=medium,
            lora_name=label.lora_name,
            extra_keys=[label.extra_keys(content.place == 0) for content in run],
            group_idx=0,
        )
