"""Content of a prefix cache, and what somebody knows of it who follows its events.

Content is a salt's label, a group of layers, and all tokens up to a block's last. A block can be found if its
parent can be, up to a chain's beginning, whose salt some request may still have.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

type Content = tuple[Hashable, int, tuple[int, ...]]  # label, group, all tokens

ROOT = -1
GROUP_TOKENS = -(2**31)


def findable(
    last: Sequence[int],
    generation: Sequence[int],
    parent: Sequence[tuple[int, int]],
    token_ids: Sequence[Sequence[int]],
    labels: Mapping[int, Hashable],
) -> set[Content]:
    """Return all that can be found in a table of contents, slot by slot.

    last: block that holds a slot's content; 0 for an empty slot. parent, token_ids: of each block.
    labels: what the numbers of salts stand for.
    """

    def chain(slot: int) -> Content | None:
        slot_before, number = parent[last[slot]]
        ids = tuple(token_ids[last[slot]])
        if slot_before == ROOT:
            return (labels[number], 0, ids) if number in labels else None
        if last[slot_before] == 0 or generation[slot_before] != number:
            return None
        before = chain(slot_before)
        if before is None:
            return None
        label, _, all_before = before
        if ids[0] < GROUP_TOKENS + 2**16:
            return label, ids[0] - GROUP_TOKENS, all_before
        return label, 0, all_before + ids

    contents = [chain(slot) for slot in range(len(last)) if last[slot]]
    known = [content for content in contents if content is not None]
    assert len(known) == len({*known}), "two nodes have the same content"
    return {*known}


class Follower:
    """Follower of events, each a mapping with its kind under "type"."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, int], Content] = {}  # by group and hash
        self.below: dict[str, set[int]] = {}  # hashes of blocks below the device, by medium

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply one event. What it removes must be there, and what it stores must not."""
        if event["type"] == "AllBlocksCleared":
            self.contents, self.below = {}, {}
            return
        if event["medium"] != "GPU":
            known, block_hashes = self.below.setdefault(event["medium"], set()), {*event["block_hashes"]}
            is_stored = event["type"] == "BlockStored"
            assert known.isdisjoint(block_hashes) if is_stored else known >= block_hashes
            self.below[event["medium"]] = known | block_hashes if is_stored else known - block_hashes
            return
        group = event["group_idx"]
        if event["type"] == "BlockRemoved":
            for each in event["block_hashes"]:
                del self.contents[group, each]
            return
        size, parent = event["block_size"], event["parent_block_hash"]
        label: Hashable = event["extra_keys"][0]
        before: tuple[int, ...] = ()
        if parent is not None:
            label, _, before = self.contents[0, parent]
        for i, each in enumerate(event["block_hashes"]):
            assert (group, each) not in self.contents
            before += tuple(event["token_ids"][i * size : (i + 1) * size])
            self.contents[group, each] = label, group, before

    @property
    def known(self) -> set[Content]:
        """All contents that can be found, by the events so far. A label is the extra keys of a chain's first
        block.
        """
        assert len({*self.contents.values()}) == len(self.contents)
        return {*self.contents.values()}
