"""Which cached block goes first: what each eviction policy does, one block at a time, in plain Python.

A policy sees five things: blocks that are taken (their content is forgotten), content that is made
findable, blocks that are found again (hits), the free ones among these that leave (revived), and blocks that
nobody holds any more, in the order in which they are given back: the last block of a prompt first. It says
which free block is taken next.

`Prompts` sends prompts through a cache under a policy, one after the other: what `jaxpaged lab` must find.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Blocks 1 to `num_blocks - 1`, all of them free at first and without content."""

    def take(self) -> int: ...
    def publish(self, block: int, depth: int, content: int) -> None: ...
    def hit(self, block: int) -> None: ...
    def revive(self, block: int) -> None: ...
    def free(self, block: int, has_content: bool) -> None: ...


class Lru:
    """The longest unused goes first, whether it has content or not: vLLM V1's."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))

    def take(self) -> int:
        return self.queue.pop(0)

    def publish(self, block: int, depth: int, content: int) -> None:
        pass

    def hit(self, block: int) -> None:
        pass

    def revive(self, block: int) -> None:
        self.queue.remove(block)

    def free(self, block: int, has_content: bool) -> None:
        self.queue.append(block)


class Prompts:
    """Prompts of symbols through a cache of `num_blocks - 1` blocks.

    A block is found by its symbol and all before it in its prompt. When the last block with some content is
    taken, what followed it cannot be found again, even if that content returns.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.names = itertools.count(1)  # of nodes; 0 is before all prompts
        self.nodes: dict[tuple[int, int], int] = {}  # by the node before it and its symbol
        self.identity: dict[int, tuple[int, int]] = {}  # the other way round
        self.blocks: dict[int, list[int]] = {}  # of each node, the one cached first first
        self.node_of: dict[int, int] = {}  # of each block with content

    def send(self, symbols: Sequence[int], num_lookup: int, num_held: int) -> int:
        """One prompt: how many of its blocks are hit. At most the first `num_lookup` of its symbols may be,
        and `num_held` blocks are held in all, those beyond the symbols without content.
        """
        held, node = [], 0
        for symbol in symbols[:num_lookup]:
            found = self.nodes.get((node, symbol))
            if found is None:
                break
            node = found
            held.append(self.blocks[node][0])
        num_hits = len(held)
        for block in held:
            self.policy.hit(block)
            self.policy.revive(block)
        for _ in range(num_held - num_hits):
            block = self.policy.take()
            self._forget(block)
            held.append(block)
        for depth in range(num_hits, len(symbols)):
            node = self._cache(held[depth], node, symbols[depth])
            self.policy.publish(held[depth], depth, symbols[depth])
        for block in reversed(held):
            self.policy.free(block, block in self.node_of)
        return num_hits

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
