"""Tiers of blocks below a device: what each store keeps, and what a prompt finds in them.

A block's key is all that its K and V depend on: what all blocks of an engine have in common, a salt, an
adapter, and the tokens of its chain up to its own last one. Equal keys mean equal K and V, bit by bit.

The first store is host memory. What a prompt finds is brought there from the stores below, and from there to
the device. What leaves the device is put into all stores.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .engine_state import Reach
from .transfer import Cache, Content

# What engines have in common, salt, adapter, and all tokens up to the block's last.
type Key = tuple[Hashable, str | None, Hashable, tuple[int, ...]]


def keys(
    common: Hashable, salt: str | None, adapter: Hashable, tokens: Sequence[int], size: int
) -> list[Key]:
    """Return the keys of the full blocks of a prompt, `size` tokens each."""
    full = len(tokens) // size * size
    return [(common, salt, adapter, tuple(tokens[:end])) for end in range(size, full + 1, size)]


@dataclass
class Store:
    """Store of a bounded number of bytes that drops the least recently used blocks.

    It keeps some blocks until a time. Until then they count as used by then.
    """

    capacity: int
    entries: list[tuple[Key, int, Hashable]] = field(default_factory=list)  # used longest ago first
    kept: dict[Key, float] = field(default_factory=dict)  # until when
    now: float = 0.0

    def contains(self, key: Key) -> bool:
        """Return whether a block is stored; this counts as a use of it."""
        return self.get(key) is not None

    def get(self, key: Key) -> Hashable | None:
        """Return a block, which counts as a use of it; None if it is not stored."""
        for i, entry in enumerate(self.entries):
            if entry[0] == key:
                self.entries.append(self.entries.pop(i))
                return entry[2]
        return None

    def put(self, key: Key, num_bytes: int, value: Hashable) -> None:
        """Keep a block in place of an older one of its key. What is too large is not kept."""
        self.entries = [entry for entry in self.entries if entry[0] != key]
        if num_bytes <= self.capacity:
            self.entries.append((key, num_bytes, value))
        self.kept = {each: until for each, until in self.kept.items() if self._size(each) is not None}
        if sum(self._size(each) or 0 for each in self.kept) > self.capacity // 2:
            self.kept.pop(key, None)  # it has become larger
        while sum(entry[1] for entry in self.entries) > self.capacity:
            free = [entry for entry in self.entries if entry[0] not in self.kept]
            self.entries.remove(free[0])

    def keep(self, chain: Sequence[Key], seconds: float) -> None:
        """Keep the blocks of a chain for so long from now, from the first on, as far as they are here.

        All that is kept has at most half of the capacity. A block is kept until the latest time that was
        asked for; for 0 seconds it is kept no more.
        """
        if seconds == 0:
            for key in reversed(chain):  # so that its end goes before its beginning
                if self.kept.pop(key, None) is not None:
                    self.get(key)
            return
        those: list[Key] = []
        for key in chain:
            size = self._size(key)
            others = sum(self._size(other) or 0 for other in {*self.kept, *those} - {key})
            if size is None or others + size > self.capacity // 2:
                break
            those.append(key)
        for key in reversed(those):
            if self.now + seconds >= self.kept.get(key, 0.0):
                self.kept.pop(key, None)
                self.kept[key] = self.now + seconds

    def wait(self, seconds: float) -> None:
        """Advance the time. What is kept no longer was used at the end of its time."""
        self.now += seconds
        for key, until in sorted(self.kept.items(), key=lambda item: item[1]):
            if until <= self.now:
                del self.kept[key]
                self.get(key)

    def _size(self, key: Key) -> int | None:
        return next((size for other, size, _ in self.entries if other == key), None)

    def clear(self) -> None:
        """Forget everything."""
        self.entries, self.kept = [], {}


def num_cached(stores: Sequence[Store], wanted: Sequence[Key]) -> int:
    """Return how many of these blocks, from the first on, any store has.

    All of them are used, the last one first, so that a chain's end goes before its beginning.
    """
    is_there = [sum(store.contains(key) for store in stores) > 0 for key in reversed(wanted)][::-1]
    return is_there.index(False) if False in is_there else len(is_there)


def promote(stores: Sequence[Store], wanted: Sequence[Key], first: int) -> set[Key]:
    """Bring blocks from the one at `first` on that the first store lacks from the second; return those."""
    host, below = stores
    lacking = [key for key in reversed(wanted) if not host.contains(key)]
    for key in lacking:
        value = below.get(key) if key in wanted[first:] else None
        if value is not None:
            host.put(key, 1, value)
    return {*lacking} & {*wanted[first:]}


def served(present: Sequence[Sequence[bool]], reaches: Sequence[Reach], first: int, block_size: int) -> int:
    """Return how many blocks of a chain all groups of layers can go on from.

    present: of each block, which groups' K and V are there. Of the first `first` blocks the device has all
        that is read from there on.
    """
    for num_blocks in range(len(present), first, -1):
        if all(
            present[i][group]
            for group, reach in enumerate(reaches)
            for i in range(first, num_blocks)
            if group == 0 or i not in reach.skipped(num_blocks * block_size, block_size)
        ):
            return num_blocks
    return first


def pays(fetch_seconds: float | None, compute_seconds: float | None) -> bool:
    """Tell whether to fetch: if it takes no longer than computing, or if one was never measured."""
    return fetch_seconds is None or compute_seconds is None or fetch_seconds <= compute_seconds


class TieredCache(Cache):
    """A device's cache over stores, for requests that come one after the other and answer with one token.

    The K and V of a block are its key. Each store's blocks have one byte.
    """

    def __init__(self, num_blocks: int, block_size: int, stores: Sequence[Store]) -> None:
        super().__init__(num_blocks, block_size)
        self.stores = stores

    def serve(self, tokens: Sequence[int], salt: str | None, number: int) -> tuple[int, int, int]:
        """Compute a prompt. Return the blocks that the device had, that came from the first store, and from
        others.

        number: the salt's, for the device.
        """
        size = self.block_size
        all_keys = keys(None, salt, None, tokens, size)
        contents = [key[3][-size:] for key in all_keys]
        wanted = all_keys[: (len(tokens) - 1) // size]
        here = len(self._lookup(contents[: len(wanted)], number)[0])
        num_found = num_cached(self.stores, wanted)
        has_below = len(self.stores) > 1
        promoted = promote(self.stores, wanted[:num_found], here) if has_below else set()
        values = [self.stores[0].get(key) for key in reversed(wanted)][::-1]
        end = here
        while end < len(wanted) and values[end] is not None:
            end += 1
        if end > here:
            chain = [Content(contents[i], (all_keys[i],)) for i in range(end)]
            assert values[here:end] == all_keys[here:end]
            if self.adopt(chain, number) is None:
                end = here
        self._run(contents, all_keys, len(tokens), number, len(wanted))
        self._store(all_keys)
        brought = len(promoted & {*wanted[here:end]})
        return here, end - here - brought, brought

    def _run(
        self, contents: list[tuple[int, ...]], keys: list[Key], length: int, salt: int, max_blocks: int
    ) -> None:
        """Let a request find at most `max_blocks` blocks, compute the rest, and finish."""
        names, [hits] = self._lookup(contents[:max_blocks], salt)
        held = [block for block in hits if block is not None]
        assert [self.kv[block.block_id] for block in held] == keys[: len(held)]
        self.pool.touch(held)
        held += self.pool.get_new_blocks(-(-length // self.block_size) - len(held))
        full = [*held[: len(contents)]]
        for block, key in zip(full, keys, strict=True):
            self.kv[block.block_id] = key
        self._publish(contents, salt, names, [[*full]])
        self.finish([[*held]])

    def _store(self, its_keys: list[Key]) -> None:
        """Put what the stores lack of a prompt into all of them, the last block first."""
        here = [[store.contains(key) for store in self.stores] for key in reversed(its_keys)]
        for key, each in zip(reversed(its_keys), here, strict=True):
            if not all(each):
                for store in self.stores:
                    store.put(key, 1, key)
