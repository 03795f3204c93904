"""Groups of layers: which layers share a block table, and where each layer's K and V lie in a block.

All groups take blocks from one pool. A block has room for as many layers as the widest group has, and belongs
to one group at a time: layer j of any group is layer j of the cache's arrays. So nothing is divided
beforehand, and a model of one kind of layer is the case of one group.

Groups whose blocks have very different sizes are of different size classes, which the pool keeps apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import check
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
    weights: tuple[int, ...] = ()  # places that each layer takes in a block; empty: one each
    classes: tuple[int, ...] = ()  # size class of each group's blocks; empty: all are of one

    def __post_init__(self) -> None:
        """Check the classes. Raises `InputError`."""
        rule = f"empty, or {self.num_groups} numbers, among them all from 0 to the highest"
        numbers = {*self.classes}
        is_each = len(self.classes) == self.num_groups and numbers == {*range(len(numbers))}
        check("classes", self.classes, rule, not self.classes or is_each)

    @property
    def num_classes(self) -> int:
        """Size classes of the groups' blocks."""
        return 1 + max(self.classes, default=0)

    def groups_of_class(self, size_class: int) -> tuple[int, ...]:
        """Return the numbers of the groups whose blocks are of this class."""
        classes = self.classes or (0,) * self.num_groups
        return tuple(group for group, class_of_group in enumerate(classes) if class_of_group == size_class)

    @property
    def num_groups(self) -> int:
        return len(self.specs)

    @property
    def width(self) -> int:
        """Places for layers in a block: a multiple of those that the widest layer takes."""
        if not self.weights:
            return max(map(len, self.groups))
        return _rounded_up(max(sum(self.weights[i] for i in group) for group in self.groups), self.weights)

    def with_states(self, spec: CacheSpec) -> "Grouping":
        """Return the grouping with one more group, of layers that keep states in place of K and V.

        Their blocks are a size class of their own, and these layers have no places among those of K and V:
        see `KVCache.states`.
        """
        classes = *(0,) * self.num_groups, 1
        return replace(self, specs=(*self.specs, spec), groups=(*self.groups, ()), classes=classes)

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.groups))

    def first_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return how many blocks at the beginning stay in a row's line of each group; empty if none does."""
        counts = tuple(spec.first_blocks(block_size) for spec in self.specs)
        return counts if any(counts) else ()

    @property
    def of_step(self) -> "Grouping":
        """Return what a step must know: not the layers of a single group, so models of any depth share it."""
        return one_group(self.specs[0]) if self.num_groups == 1 and not self.weights else self

    @property
    def group_of(self) -> tuple[int, ...]:
        """Group of each layer."""
        return self._by_layer([(layer, g) for g, layers in enumerate(self.groups) for layer in layers])

    @property
    def place_of(self) -> tuple[int, ...]:
        """Place of each layer in its group's blocks, counted in places of its size; wide ones go first."""
        if not self.weights:
            return self._by_layer([(layer, j) for layers in self.groups for j, layer in enumerate(layers)])
        pairs = []
        for layers in self.groups:
            first = 0
            for layer in sorted(layers, key=lambda layer: -self.weights[layer]):
                pairs.append((layer, first // self.weights[layer]))
                first += self.weights[layer]
        return self._by_layer(pairs)

    def _by_layer(self, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        return tuple(value for _, value in sorted(pairs))

    def words(self) -> dict[str, Any]:
        """Return the grouping as JSON has it. Raises `InputError` for a specification from outside."""
        specs = [cache_specs.words(spec) for spec in self.specs]
        words = {"specs": specs, "groups": self.groups}
        more = {"weights": self.weights, "classes": self.classes}
        return words | {name: value for name, value in more.items() if value}

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> "Grouping":
        """Return what `words` wrote."""
        specs = tuple(cache_specs.of_words(spec) for spec in words["specs"])
        groups = tuple(tuple(layers) for layers in words["groups"])
        return cls(specs, groups, tuple(words.get("weights", ())), tuple(words.get("classes", ())))


def one_group(spec: CacheSpec = FULL, num_layers: int = 0, weights: Sequence[int] = ()) -> Grouping:
    """Return the grouping of layers that share one table; their number may be left open."""
    return Grouping((spec,), (tuple(range(num_layers)),), tuple(weights))


def grouping_of(specs: Sequence[CacheSpec], weights: Sequence[int] = ()) -> Grouping:
    """Group layers by their specifications, given for each layer in the model's order.

    Layers of one kind make a bucket; the bucket that reads most leads. All groups are `size` layers wide or
    narrower, and a narrower one wastes the rest of its blocks. `size` divides the leading bucket, whose
    blocks are the most, and wastes as few layers of the others as at most `MOST_GROUPS` groups allow; of
    equally good sizes the largest makes the fewest groups. Layer j of a bucket goes to group j modulo the
    bucket's number of groups, so that these are equally wide up to one layer.

    weights: how many times as much K and V each layer has as the narrowest, if they differ; each divides the
    next larger one. A block then has room for `size` layers of the leading bucket, rounded up to a multiple
    of the widest, and each group for as many layers as fit. Places that are left are what is wasted.

    vLLM 0.33 (`kv_cache_planning._get_kv_cache_groups_uniform_page_size`) takes the smallest bucket for the
    size, or the largest if it is less than 1.5 times the smallest, and then pads the leading bucket, too.
    """
    each = tuple(weights) or (1,) * len(specs)
    buckets: dict[tuple[CacheSpec, int], list[int]] = {}
    for layer, key in enumerate(zip(specs, each, strict=True)):
        buckets.setdefault(key, []).append(layer)
    order = sorted(buckets, key=lambda key: (_reach(key[0]), key[1]), reverse=True)
    leading = len(buckets[order[0]])
    sizes = [size for size in range(1, leading + 1) if leading % size == 0]

    def room(size: int) -> int:
        """Return the places of a block."""
        return _rounded_up(size * order[0][1], each)

    def numbers(size: int) -> list[int]:
        """Return the number of groups of each bucket."""
        return [cdiv(len(buckets[key]), room(size) // key[1]) for key in order]

    def waste(size: int) -> int:
        """Return how many places all groups leave."""
        return sum(numbers(size)) * room(size) - sum(each)

    few = [size for size in sizes if sum(numbers(size)) <= MOST_GROUPS]
    size = min(few or sizes[-1:], key=lambda size: (waste(size), -size))
    made = [
        (key[0], tuple(buckets[key][first::number]))
        for key, number in zip(order, numbers(size), strict=True)
        for first in range(number)
    ]
    return Grouping(tuple(spec for spec, _ in made), tuple(layers for _, layers in made), tuple(weights))


def _rounded_up(places: int, weights: Sequence[int]) -> int:
    """Return the next multiple of the widest layer's places."""
    return cdiv(places, max(weights)) * max(weights)


def _reach(spec: CacheSpec) -> float:
    kept = spec.most_kept(1)
    return float("inf") if kept is None else kept
