"""Mirror of what can be found in a prefix cache, on the host: changes go in, events come out.

The device names a block's content by a slot and a generation, and its parent likewise. A name never stands
for anything else. Changes may come in any order: what comes before its parent waits for it. What has lost its
parent, or begins with a salt that no request has any more, cannot be found, so it is told as removed.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpaged import routing
from jaxpaged.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event

ROOT = -1  # in the place of a slot: the name of a chain's beginning, whose other number is the salt's
GROUP_TOKENS = -(2**31)  # a block of group g > 0 has this plus g for its tokens; its parent says the rest
MOST_SALTS = 2**16  # that are remembered: those used last

type Name = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Label:
    """Meaning of a number of the device's: a salt and an adapter."""

    cache_salt: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None

    @property
    def salt(self) -> str:
        """Text that keys of a router depend on, beside tokens."""
        return routing.salt_of(self.cache_salt, self.lora_name)

    def extra_keys(self, is_first: bool) -> tuple[str, ...] | None:
        """Return the parts of a block's key besides its tokens."""
        extras = (self.lora_name, self.cache_salt if is_first else None)
        return tuple(each for each in extras if each is not None) or None


@dataclasses.dataclass(frozen=True)
class GroupKind:
    """Words of vLLM's for a group of layers."""

    kind: str | None = None
    window: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """Content that some block of the device has."""

    name: Name
    parent: Name
    token_ids: bytes  # int32
    group: int
    hashed: Any = None  # all tokens so far, by `routing`; None: it cannot be found
    label: Label | None = None
    before: "Node | None" = None  # the node of the block before

    @property
    def key(self) -> int:
        return int.from_bytes(self.hashed.digest(), "big")


class Tree:
    """Mirror of one device's prefix cache."""

    def __init__(self, block_size: int, kinds: Sequence[GroupKind] = (GroupKind(),)) -> None:
        self.block_size, self.kinds = block_size, kinds
        self._labels: dict[int, Label] = {
            0: Label()
        }  # by the number of the salt, the one used longest ago first
        self._numbers: dict[Label, int] = {Label(): 0}
        self.forget()

    def forget(self) -> list[Event]:
        """Forget all nodes. Return the event that says so."""
        self._by_slot: dict[int, Node] = {}
        self._children: dict[Name, dict[Name, Node]] = {}
        return [AllBlocksCleared()]

    def name_salt(self, number: int, label: Label) -> list[Event]:
        """Record the label that a salt's number on the device means. Return the events.

        What the label's former number stood for cannot be found any more.
        """
        if self._labels.get(number) == label:
            if number:
                self._labels[number] = self._labels.pop(number)
            return []
        removed = self._unnamed(self._numbers.get(label)) + self._unnamed(number)
        self._labels[number], self._numbers[label] = label, number
        if len(self._labels) > MOST_SALTS:
            removed += self._unnamed(next(each for each in self._labels if each))
        return [*_removed(removed), *self._stored(self._begins_with(number))]

    def _unnamed(self, number: int | None) -> list[Node]:
        """Forget the label of a number. Return the nodes that could be found under it."""
        if number is None or number not in self._labels:
            return []
        del self._numbers[self._labels.pop(number)]
        return self._hidden(self._begins_with(number))

    def _begins_with(self, number: int) -> list[Node]:
        """Return the first nodes of all chains with a salt."""
        return [*self._children.get((ROOT, number), {}).values()]

    def apply(
        self,
        slots: np.ndarray,
        generations: np.ndarray,
        is_there: np.ndarray,
        parents: np.ndarray,
        token_ids: np.ndarray,
    ) -> list[Event]:
        """Apply the changed contents of slots; each slot is given once. Return the events, removals first."""
        gone, new = [], []
        rows = zip(slots.tolist(), generations.tolist(), is_there.tolist(), parents.tolist(), strict=True)
        for i, (slot, generation, there, parent) in enumerate(rows):
            old = self._by_slot.get(slot)
            if old is not None and there and old.name == (slot, generation):
                continue
            if old is not None:
                gone.append(old)
            if there:
                first = int(token_ids[i, 0])
                is_group = first < GROUP_TOKENS + len(self.kinds)
                group = first - GROUP_TOKENS if is_group else 0
                ids = token_ids[i].astype(np.int32).tobytes()
                new.append(Node((slot, generation), (parent[0], parent[1]), ids, group))
        removed = self._hidden(gone)
        for node in gone:
            del self._by_slot[node.name[0]]
            siblings = self._children[node.parent]
            del siblings[node.name]
            if not siblings:
                del self._children[node.parent]
        for node in new:
            self._by_slot[node.name[0]] = node
            self._children.setdefault(node.parent, {})[node.name] = node
        return [*_removed(removed), *self._stored(new)]

    def _hidden(self, nodes: Iterable[Node]) -> list[Node]:
        """Make nodes and all their descendants unfindable. Return the nodes that were findable, a chain's end
        first.
        """
        hidden: list[Node] = []
        for top in nodes:
            todo = [top]
            while todo:
                node = todo.pop()
                if node.hashed is not None:
                    hidden.append(dataclasses.replace(node))
                    node.hashed = None
                    todo += self._children.get(node.name, {}).values()
        return hidden[::-1]

    def _stored(self, nodes: Iterable[Node]) -> list[Event]:
        """Make nodes findable whose parents are, with all their descendants. Return the events."""
        shown: list[list[Node]] = [[] for _ in self.kinds]
        for top in nodes:
            todo = [top]
            while todo:
                node = todo.pop()
                if node.hashed is None and self._show(node):
                    shown[node.group].append(node)
                    todo += self._children.get(node.name, {}).values()
        return [self._event(run) for nodes in shown for run in _runs(nodes)]

    def _show(self, node: Node) -> bool:
        """Make a node findable if its parent is; return whether it is."""
        if node.parent[0] == ROOT:
            label = self._labels.get(node.parent[1])
            before = None if label is None else routing.begun(label.salt)
        else:
            parent = self._by_slot.get(node.parent[0])
            parent = parent if parent is not None and parent.name == node.parent else None
            before = None if parent is None else parent.hashed
            label = None if parent is None else parent.label
            if parent is not None:
                node.before = parent.before if node.group else parent
        if before is None:
            return False
        ids = np.frombuffer(node.token_ids, np.int32)
        node.hashed, node.label = before if node.group else routing.grown(before, ids), label
        return True

    def _event(self, run: Sequence[Node]) -> BlockStored:
        first, kind = run[0], self.kinds[run[0].group]
        label = first.label
        assert label is not None
        contents = [self._by_slot[node.parent[0]] if node.group else node for node in run]
        return BlockStored(
            block_hashes=[node.key for node in run],
            parent_block_hash=None if first.before is None else first.before.key,
            token_ids=np.concatenate([np.frombuffer(each.token_ids, np.int32) for each in contents]).tolist(),
            block_size=self.block_size,
            lora_id=label.lora_id,
            lora_name=label.lora_name,
            extra_keys=[label.extra_keys(node.before is None) for node in run],
            group_idx=first.group,
            kv_cache_spec_kind=kind.kind,
            kv_cache_spec_sliding_window=kind.window,
        )


def _runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return nodes of one group in runs of neighbours, each behind the one before."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and node.before is not None and node.before.hashed is runs[-1][-1].hashed:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _removed(nodes: Sequence[Node]) -> list[Event]:
    groups = sorted({node.group for node in nodes})
    return [BlockRemoved([n.key for n in nodes if n.group == group], group_idx=group) for group in groups]
