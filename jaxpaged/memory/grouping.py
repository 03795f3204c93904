"""Groups of layers: which layers share a block table, and where each layer's K and V lie in a block.

All groups take blocks from one pool. A block has room for as many layers as the widest group has, and belongs
to one group at a time: layer j of any group is layer j of the cache's arrays. So nothing is divided
beforehand, and a model of one kind of layer is the case of one group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import cache_specs
from jaxpaged.memory.cache_specs import FULL, CacheSpec

# Each group costs a line of tables a row, and its share of every step.
MOST_GROUPS = 8


@dataclass(frozen=True)
class Grouping:
    """Groups of a model's layers. The first group sees at least as much of a sequence as any other.

    groups: the layers of each group, by their numbers in the model.
    """

    specs: tuple[CacheSpec, ...]  # of each group
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_groups(self) -> int:
        return len(self.specs)

    @property
    def width(self) -> int:
        """Layers that a block has room for."""
        return max(map(len, self.groups))

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.groups))

    def first_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return how many blocks at the beginning stay in a row's line of each group; empty if none does."""
        counts = tuple(cdiv(spec.first_tokens, block_size) for spec in self.specs)
        return counts if any(counts) else ()

    @property
    def of_step(self) -> "Grouping":
        """Return what a step must know: not the layers of a single group, so models of any depth share it."""
        return one_group(self.specs[0]) if self.num_groups == 1 else self

    @property
    def group_of(self) -> tuple[int, ...]:
        """Group of each layer."""
        return self._by_layer([(layer, g) for g, layers in enumerate(self.groups) for layer in layers])

    @property
    def place_of(self) -> tuple[int, ...]:
        """Place of each layer in its group's blocks."""
        return self._by_layer([(layer, j) for layers in self.groups for j, layer in enumerate(layers)])

    def _by_layer(self, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(value for _, value in sorted(pairs))

    def words(self) -> dict[str, Any]:
        """Return the grouping as JSON has it. Raises `InputError` for a specification from outside."""
        return {"specs": [cache_specs.words(spec) for spec in self.specs], "groups": self.groups}

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "Grouping":
        """Return what `words` wrote."""
        specs = tuple(cache_specs.of_words(spec) for spec in words["specs"])
        return cls(specs, tuple(tuple(layers) for layers in words["groups"]))


def one_group(spec: CacheSpec = FULL, num_layers: int = 0) -> Grouping:
    """Return the grouping of layers that share one table; their number may be left open."""
    return Grouping((spec,), (tuple(range(num_layers)),))


def grouping_of(specs: Sequence[CacheSpec]) -> Grouping:
    """Group layers by their specifications, given for each layer in the model's order.

    Layers of one kind make a bucket; the bucket that reads most leads. All groups are `size` layers wide or
    narrower, and a narrower one wastes the rest of its blocks. `size` divides the leading bucket, whose
    blocks are the most, and wastes as few layers of the others as at most `MOST_GROUPS` groups allow; of
    equally good sizes the largest makes the fewest groups. Layer j of a bucket goes to group j modulo the
    bucket's number of groups, so that these are equally wide up to one layer.

    vLLM 0.33 (`kv_cache_planning._get_kv_cache_groups_uniform_page_size`) takes the smallest bucket for the
    size, or the largest if it is less than 1.5 times the smallest, and then pads the leading bucket, too.
    """
    buckets: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        buckets.setdefault(spec, []).append(layer)
    order = sorted(buckets, key=_reach, reverse=True)
    counts = [len(buckets[spec]) for spec in order]
    sizes = [size for size in range(1, counts[0] + 1) if counts[0] % size == 0]
    few = [size for size in sizes if sum(cdiv(n, size) for n in counts) <= MOST_GROUPS]
    size = min(few or sizes[-1:], key=lambda size: (sum(-n % size for n in counts), -size))
    made = [
        (spec, tuple(buckets[spec][first :: cdiv(n, size)]))
        for spec, n in zip(order, counts, strict=True)
        for first in range(cdiv(n, size))
    ]
    return Grouping(tuple(spec for spec, _ in made), tuple(layers for _, layers in made))


def _reach(spec: CacheSpec) -> float:
    kept = spec.most_kept(1)
    return float("inf") if kept is None else kept
