"""Router of requests to replicas: the one with most of its prompt cached, then the least loaded.

What a replica has cached is what it tells (`jaxpaged.kv_events`), and what was sent to it since. If it tells
nothing, that is remembered: it has what was sent to it last, as much as it has room for. Knows neither clocks
nor networks; imports nothing heavy.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import checked_int, checked_number

Key = bytes
TEXT_BLOCK = 64  # bytes: some 16 tokens


def keys_of_tokens(token_ids: Sequence[int] | np.ndarray, block_size: int, salt: str = "") -> list[Key]:
    """Return a key for each full block of `block_size` tokens.

    Equal keys mean equal tokens, equal ones before them, and equal salts, but for chance.
    """
    checked_int("block_size", block_size, "an int >= 1", 1)
    return _keys(np.asarray(token_ids, np.int64).tobytes(), 8 * block_size, salt)


def keys_of_text(text: str, salt: str = "") -> list[Key]:
    """Return the keys of a text, in blocks of `TEXT_BLOCK` bytes of UTF-8."""
    return _keys(text.encode("utf-8", "surrogatepass"), TEXT_BLOCK, salt)


def salt_of(cache_salt: str | None, lora_name: str | None) -> str:
    """Return the salt of keys for a request's salt and its adapter."""
    return "" if cache_salt is None and lora_name is None else json.dumps([cache_salt, lora_name])


def begun(salt: str) -> Any:
    """Return the hash state before a first block; its `digest()` is no key."""
    hashed = hashlib.blake2b(digest_size=8)
    # The salt's own hash, for all are of one length: no salt and content look like another's.
    hashed.update(hashlib.blake2b(salt.encode("utf-8", "surrogatepass")).digest())
    return hashed


def grown(before: Any, token_ids: Sequence[int] | np.ndarray) -> Any:
    """Return the hash behind a block of these tokens; its `digest()` is the block's key."""
    hashed = before.copy()
    hashed.update(np.asarray(token_ids, np.int64).tobytes())
    return hashed


def _keys(content: bytes, size: int, salt: str) -> list[Key]:
    hashed = begun(salt)
    keys = []
    for start in range(0, len(content) - size + 1, size):
        hashed.update(content[start : start + size])
        keys.append(hashed.digest())
    return keys


class Router[Name: Hashable]:
    """Router that knows of each replica the keys that it reported, and at most `max_blocks` keys of requests
    last sent to it.

    A replica whose load is more than `max_lead` above the least gets nothing while others have less. Raises
    `InputError` for values out of range.
    """

    def __init__(self, max_blocks: int, max_lead: float = 8) -> None:
        self.max_blocks = checked_int("max_blocks", max_blocks, "an int >= 1", 1)
        self.max_lead = checked_number("max_lead", max_lead, "a number >= 0", 0)
        self._cached: dict[Name, OrderedDict[Key, None]] = {}  # the one used longest ago first
        self._reported: dict[Name, dict[str, set[Key]]] = {}  # by medium
        self._turn: dict[Name, int] = {}  # when each was last sent something
        self._num_sent = 0

    def rank(self, keys: Sequence[Key], loads: Mapping[Name, float]) -> list[Name]:
        """Return the replicas of `loads` by preference, the best first.

        First those not too far ahead of the least loaded: by their longest cached prefix, then the lower
        load. Then the others, by load, then prefix. Of equal ones that which was sent something longest ago.
        """
        if not loads:
            return []
        max_load = min(loads.values()) + self.max_lead

        def order(name: Name) -> tuple[float, ...]:
            load, missing = loads[name], -self.num_cached(name, keys)
            turn = self._turn.get(name, -1)
            return (0, missing, load, turn) if load <= max_load else (1, load, missing, turn)

        return sorted(loads, key=order)

    def num_cached(self, name: Name, keys: Iterable[Key]) -> int:
        """Return how many of the first keys the replica has cached, as far as is known."""
        cached, reported, num = self._cached.get(name, ()), self._reported.get(name, {}).values(), 0
        for key in keys:
            if key not in cached and not any(key in keys_of_medium for keys_of_medium in reported):
                break
            num += 1
        return num

    def tell(
        self, name: Name, stored: Iterable[Key] = (), removed: Iterable[Key] = (), medium: str = "GPU"
    ) -> None:
        """Record the blocks that a replica reports of one medium of its cache: first the removed ones, then
        the stored ones.

        What was sent to it counts as cached until it tells that it has stored it. What it has in any medium
        counts as cached: it is fetched from there in less time than computing takes.
        """
        reported = self._reported.setdefault(name, {}).setdefault(medium, set())
        sent = self._cached.setdefault(name, OrderedDict())
        reported.difference_update(removed)
        for key in stored:
            reported.add(key)
            sent.pop(key, None)

    def forget(self, name: Name) -> None:
        """Record that a replica has nothing cached any more."""
        self._reported[name], self._cached[name] = {}, OrderedDict()

    def note(self, name: Name, keys: Sequence[Key]) -> None:
        """Record that a request with these keys was sent to the replica."""
        cached, reported = self._cached.setdefault(name, OrderedDict()), self._reported.get(name, {}).values()
        for key in reversed(keys):  # so that of a prompt its end is forgotten first
            if any(key in keys_of_medium for keys_of_medium in reported):
                continue
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self.max_blocks:
            cached.popitem(last=False)
        self._turn[name] = self._num_sent
        self._num_sent += 1

    def keep(self, names: Collection[Name]) -> None:
        """Forget all replicas but these."""
        for known in (self._cached, self._reported, self._turn):
            for name in [name for name in known if name not in names]:
                del known[name]

    def __iter__(self) -> Iterator[Name]:
        """Iterate over the replicas that got a request or reported blocks."""
        return iter(self._cached)
