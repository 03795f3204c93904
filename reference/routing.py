"""Routing of requests to replicas, as plain lists of what each was sent."""

from collections.abc import Collection, Hashable, Mapping, Sequence

type Block = Hashable


class Router:
    """`sent[name]`: prefixes that a replica is taken to have, each a tuple of blocks, oldest use first."""

    def __init__(self, max_blocks: int, max_lead: float) -> None:
        self.max_blocks, self.max_lead = max_blocks, max_lead
        self.sent: dict[str, list[tuple[Block, ...]]] = {}
        self.order: list[str] = []  # last sent something longest ago first

    def num_cached(self, name: str, blocks: Sequence[Block]) -> int:
        longest = 0
        while longest < len(blocks) and tuple(blocks[: longest + 1]) in self.sent.get(name, []):
            longest += 1
        return longest

    def best(self, blocks: Sequence[Block], loads: Mapping[str, float]) -> str:
        """Choose the replica, of those with these `loads`, that gets a prompt of these blocks."""
        allowed = [name for name in loads if loads[name] <= min(loads.values()) + self.max_lead]
        longest = max(self.num_cached(name, blocks) for name in allowed)
        allowed = [name for name in allowed if self.num_cached(name, blocks) == longest]
        least = min(loads[name] for name in allowed)
        allowed = [name for name in allowed if loads[name] == least]
        return (
            [name for name in allowed if name not in self.order] or sorted(allowed, key=self.order.index)
        )[0]

    def note(self, name: str, blocks: Sequence[Block]) -> None:
        its = self.sent.setdefault(name, [])
        for length in range(len(blocks), 0, -1):
            prefix = tuple(blocks[:length])
            if prefix in its:
                its.remove(prefix)
            its.append(prefix)
        del its[: max(0, len(its) - self.max_blocks)]
        self.order = [other for other in self.order if other != name] + [name]

    def keep(self, names: Collection[str]) -> None:
        self.sent = {name: its for name, its in self.sent.items() if name in names}
        self.order = [name for name in self.order if name in names]
