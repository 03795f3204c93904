"""Routing of requests to replicas, as plain lists of what each was sent."""

from collections.abc import Collection, Hashable, Mapping, Sequence

type Block = Hashable


class Router:
    """Oracle of `routing.Router`. `sent[name]`: prefixes, as tuples of blocks, of prompts sent to a replica,
    least recently used first; `reported[name]`: prefixes that the replica reported.
    """

    def __init__(self, max_blocks: int, max_lead: float) -> None:
        self.max_blocks, self.max_lead = max_blocks, max_lead
        self.sent: dict[str, list[tuple[Block, ...]]] = {}
        self.reported: dict[str, list[tuple[Block, ...]]] = {}
        self.order: list[str] = []  # last sent something longest ago first

    def num_cached(self, name: str, blocks: Sequence[Block]) -> int:
        longest, known = 0, self.sent.get(name, []) + self.reported.get(name, [])
        while longest < len(blocks) and tuple(blocks[: longest + 1]) in known:
            longest += 1
        return longest

    def tell(
        self, name: str, stored: Sequence[tuple[Block, ...]], removed: Sequence[tuple[Block, ...]]
    ) -> None:
        """Record the prefixes that a replica has removed, and then stored. Those are no guesses any more."""
        kept = [prefix for prefix in self.reported.get(name, []) if prefix not in removed]
        self.reported[name] = [*kept, *stored]
        self.sent[name] = [prefix for prefix in self.sent.get(name, []) if prefix not in stored]

    def forget(self, name: str) -> None:
        """Record that a replica has no cached block."""
        self.sent[name], self.reported[name] = [], []

    def best(self, blocks: Sequence[Block], loads: Mapping[str, float]) -> str:
        """Return the replica with one of these `loads` that gets a prompt of these blocks."""
        allowed = [name for name in loads if loads[name] <= min(loads.values()) + self.max_lead]
        longest = max(self.num_cached(name, blocks) for name in allowed)
        allowed = [name for name in allowed if self.num_cached(name, blocks) == longest]
        least = min(loads[name] for name in allowed)
        allowed = [name for name in allowed if loads[name] == least]
        return (
            [name for name in allowed if name not in self.order] or sorted(allowed, key=self.order.index)
        )[0]

    def note(self, name: str, blocks: Sequence[Block]) -> None:
        sent = self.sent.setdefault(name, [])
        for length in range(len(blocks), 0, -1):
            prefix = tuple(blocks[:length])
            if prefix in self.reported.get(name, []):
                continue
            if prefix in sent:
                sent.remove(prefix)
            sent.append(prefix)
        del sent[: max(0, len(sent) - self.max_blocks)]
        self.order = [other for other in self.order if other != name] + [name]

    def keep(self, names: Collection[str]) -> None:
        self.sent = {name: prefixes for name, prefixes in self.sent.items() if name in names}
        self.reported = {name: prefixes for name, prefixes in self.reported.items() if name in names}
        self.order = [name for name in self.order if name in names]
