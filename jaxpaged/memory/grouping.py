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

# Buckets whose sizes differ by less than this factor make groups of the largest one's width, as in vLLM 0.33.
PADDED_BELOW = 1.5


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

    The rule is that of vLLM 0.33 (`kv_cache_planning._get_kv_cache_groups_uniform_page_size`): layers of one
    kind make a bucket. A group has as many layers as the smallest bucket, but as many as the largest if that
    is less than 1.5 times the smallest. A bucket of n layers makes cdiv(n, size) groups; layer j of the
    bucket goes to group j mod that number, so that groups of a bucket are equally wide up to one layer.
    """
    buckets: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        buckets.setdefault(spec, []).append(layer)
    smallest, largest = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = largest if largest < PADDED_BELOW * smallest else smallest
    # The one that sees most leads: its content names that of the others.
    order = sorted(buckets, key=_reach, reverse=True)
    made = [
        (spec, tuple(buckets[spec][first :: cdiv(len(buckets[spec]), size)]))
        for spec in order
        for first in range(cdiv(len(buckets[spec]), size))
    ]
    return Grouping(tuple(spec for spec, _ in made), tuple(layers for _, layers in made))


def widest(specs: Sequence[CacheSpec]) -> CacheSpec:
    """Return the specification that keeps most: what it does not keep is of no use to any layer."""
    return max(specs, key=_reach)


def _reach(spec: CacheSpec) -> float:
    kept = spec.most_kept(1)
    return float("inf") if kept is None else kept
