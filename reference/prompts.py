"""Prompts through a cache, one after the other, in plain Python: what `jaxpaged lab` must find."""

import itertools
from collections.abc import Callable, Sequence

from .eviction import Belady, Policy, QueueLru


class Prompts:
    """Prompts of symbols through a cache of `num_blocks - 1` blocks; the last `num_rows` hold theirs.

    A block is found by its symbol and all before it in its prompt. When the last block with some content is
    taken, what followed it cannot be found again, even if that content returns. Of several blocks with one
    content the one cached first is found. `name_of` gives a prompt's beginning a number, for policies that
    remember content.
    """

    def __init__(
        self,
        policy: Policy,
        num_blocks: int,
        num_rows: int = 1,
        name_of: Callable[[Sequence[int]], int] = lambda symbols: 0,
    ) -> None:
        self.policy, self.name_of = policy, name_of
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]  # the one that came first first
        self.holders = [0] * num_blocks
        self.names = itertools.count(1)  # of nodes; 0 is before all prompts
        self.nodes: dict[tuple[int, int], int] = {}  # by the node before it and its symbol
        self.identity: dict[int, tuple[int, int]] = {}  # the other way round
        self.blocks: dict[int, list[int]] = {}  # of each node, the one cached first first
        self.node_of: dict[int, int] = {}  # of each block with content

    def send(
        self,
        symbols: Sequence[int],
        num_lookup: int,
        num_held: int,
        next_use: Sequence[int] = (),
        waiting: Sequence[Sequence[int]] = (),
    ) -> int:
        """Send one prompt through the cache; return how many of its blocks are hit.

        At most the first `num_lookup` of its symbols may be hit. `num_held` blocks are held in all, those
        beyond the symbols without content. `next_use`, of each symbol, is for `Belady`; `waiting`, the
        symbols that may be hit of the prompts that come next, for `QueueLru`.
        """
        self._give_back(self.rows.pop(0))
        held, node = self._find(symbols[:num_lookup])
        self.rows.append(held)
        num_hits = len(held)
        for block in held:
            self.policy.hit(block)
            if not self.holders[block]:
                self.policy.revive(block)
            self.holders[block] += 1
        if isinstance(self.policy, QueueLru):
            wanted: dict[int, int] = {}
            for place, each in enumerate(waiting):
                for block in self._find(each)[0]:
                    wanted.setdefault(block, len(waiting) - place)
            self.policy.wait(wanted)
        for row in self.rows[:-1]:
            if self.holders[1:].count(0) < num_held - num_hits:
                self._give_back(row)
        for _ in range(num_held - num_hits):
            block = self.policy.take()
            self._forget(block)
            self.holders[block] = 1
            held.append(block)
        for depth in range(num_hits, len(symbols)):
            node = self._cache(held[depth], node, symbols[depth])
            self.policy.publish(held[depth], depth, self.name_of(symbols[: depth + 1]))
        if isinstance(self.policy, Belady):
            self.policy.next_use.update(zip(held, next_use, strict=False))
        return num_hits

    def _find(self, symbols: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks of the longest cached beginning, and its last node."""
        node, block_ids = 0, []
        for symbol in symbols:
            after = self.nodes.get((node, symbol))
            if after is None:
                break
            node = after
            block_ids.append(self.blocks[node][0])
        return block_ids, node

    def _give_back(self, row: list[int]) -> None:
        for block in reversed(row):
            self.holders[block] -= 1
        free = [block for block in reversed(row) if not self.holders[block]]
        self.policy.free([(block, block in self.node_of) for block in free])
        row.clear()

    def _cache(self, block: int, before: int, symbol: int) -> int:
        node = self.nodes.get((before, symbol))
        if node is None:
            node = next(self.names)
            self.nodes[before, symbol], self.identity[node] = node, (before, symbol)
        self.blocks.setdefault(node, []).append(block)
        self.node_of[block] = node
        return node

    def _forget(self, block: int) -> None:
        node = self.node_of.pop(block, None)
        if node is not None:
            self.blocks[node].remove(block)
            if not self.blocks[node]:
                del self.blocks[node], self.nodes[self.identity.pop(node)]
