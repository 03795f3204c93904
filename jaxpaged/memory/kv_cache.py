"""K and V of all layers in arrays, in any layout: how they are made, written and copied, and one layer as a
pool.
"""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jaxpaged.memory.block_pool import NULL_BLOCK
from pallas_kernels.layouts import TOKEN_MAJOR, BlockSlice, Layout, Pool, Sizes
from pallas_kernels.ops import caches

STATE = "state "  # before the names of arrays of states, where a cache's arrays are moved
DRAFT = "draft "  # before the names of the arrays of a model that drafts; see `joined`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """A layout's arrays, each with one more axis, for the layers. Block 0 is the null block.

    A block's layers lie side by side, [num_blocks, num_layers, ...]: it moves in one copy an array, and a
    loop over layers carries arrays that are updated in place. A layout may ask for [num_layers, num_blocks,
    ...] instead. To a kernel it is a pool of `num_blocks * num_layers` blocks, of which a layer's are a part.
    """

    blocks: dict[str, Num[Array, "..."]]
    shared: dict[str, Num[Array, "num_layers ..."]]  # arrays that belong to no block: `Layout.shared`
    layout: Layout = field(metadata={"static": True})
    num_layers: int = field(metadata={"static": True})
    block_size: int = field(metadata={"static": True})
    num_kv_heads: int = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})  # data type of the computation
    # Values that layers leave of each token of a pass, by name, 0 where a layer leaves none: beside K and V,
    # where a step asks for them. They are no part of the cache between passes.
    values: dict[str, Num[Array, "num_tokens num_layers ..."]] = field(default_factory=dict)
    # Full blocks that have K and V of a model that drafts, too; None: there is none.
    followed: Bool[Array, " num_blocks"] | None = None
    # What layers with states keep in blocks of their own, each [num_state_blocks, num_state_layers, ...].
    states: dict[str, Num[Array, "..."]] = field(default_factory=dict)
    # Block whose state lies at place 1: those of blocks before lie at the null block's place 0. At 0, all
    # blocks have a place of their own number.
    first_state_block: int = field(default=0, metadata={"static": True})

    def __hash__(self) -> int:
        """Return the hash of a cache whose arrays are shapes: a static argument of programs made for it."""
        arrays = *self.blocks.items(), *self.shared.items(), *self.states.items()
        return hash((*arrays, self.layout))

    @property
    def axis(self) -> int:
        """The axis that counts blocks."""
        return 1 if self.layout.layers_apart else 0

    @property
    def num_blocks(self) -> int:
        return next(iter(self.blocks.values())).shape[self.axis]

    def pool(self, layer: int | Int[Array, ""]) -> Pool:
        """Return one layer's blocks as a pool, with their own ids and slots, and what the layer shares."""
        blocks = {name: x.reshape(-1, *x.shape[2:]) for name, x in self.blocks.items()}
        shared = {name: x[layer] for name, x in self.shared.items()}
        sizes = Sizes(self.num_blocks * self.num_layers, self.block_size, self.num_kv_heads, self.head_dim)
        first, stride = (self.num_blocks, 1) if self.layout.layers_apart else (1, self.num_layers)
        of_layer = BlockSlice(jnp.asarray(layer * first, jnp.int32), stride, self.num_blocks)
        return Pool(blocks | shared, self.layout, sizes, of_layer)

    @property
    def movable(self) -> dict[str, Num[Array, "..."]]:
        """Arrays that move with a block, by name: its K and V, and its states. `axis_of` counts blocks."""
        return self.blocks | {f"{STATE}{name}": x for name, x in self.states.items()}

    @property
    def num_classes(self) -> int:
        """Size classes of the blocks: states that lie in blocks of their own make a second one."""
        return 2 if self.first_state_block else 1

    def movable_of(self, size_class: int) -> dict[str, Num[Array, "..."]]:
        """Return the arrays of `movable` in which blocks of a size class lie."""
        return {name: x for name, x in self.movable.items() if self.class_of(name) == size_class}

    def class_of(self, name: str) -> int:
        """Return the size class of the blocks that lie in an array of `movable`."""
        return 1 if self.first_state_block and name.startswith(STATE) else 0

    def places_of(self, name: str, block_ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return where blocks of its size class lie in an array of `movable`, along the axis of blocks."""
        return self._state_index(block_ids) if name.startswith(STATE) else block_ids

    def block_bytes(self, size_class: int = 0) -> int:
        """Return the bytes of a block of a size class."""
        arrays = self.movable_of(size_class).items()
        return sum(x.nbytes // x.shape[self.axis_of(name)] for name, x in arrays)

    def axis_of(self, name: str) -> int:
        """Return the axis of an array of `movable` that counts blocks."""
        return 0 if name.startswith(STATE) else self.axis

    def with_movable(self, arrays: dict[str, Num[Array, "..."]]) -> "KVCache":
        """Return the cache with these arrays, named as `movable` names them."""
        states = {name: arrays[f"{STATE}{name}"] for name in self.states}
        return replace(self, blocks={name: arrays[name] for name in self.blocks}, states=states)

    def state_places(self, block_ids: Int[Array, "*n"], number: int) -> Int[Array, "*n"]:
        """Return where the state layer of this number has its part of these blocks, in `states_of`."""
        num_layers = next(iter(self.states.values())).shape[1]
        return self._state_index(block_ids) * num_layers + number

    def _state_index(self, block_ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        if not self.first_state_block:
            return block_ids
        return jnp.maximum(block_ids - self.first_state_block + 1, NULL_BLOCK)

    def states_of(self) -> dict[str, Num[Array, "num_places ..."]]:
        """Return the arrays of all state layers, a layer's part of a block at its `state_places`."""
        return {name: x.reshape(-1, *x.shape[2:]) for name, x in self.states.items()}

    def with_states(self, arrays: dict[str, Num[Array, "num_places ..."]]) -> "KVCache":
        """Return the cache with these arrays, shaped as `states_of` returns them."""
        states = {name: arrays[name].reshape(x.shape) for name, x in self.states.items()}
        return replace(self, states=states)

    def with_value(
        self, name: str, layer: int | Int[Array, ""], values: Num[Array, "num_tokens ..."]
    ) -> "KVCache":
        """Return the cache with what a layer leaves of the tokens of a pass."""
        before = self.values[name]
        return replace(
            self, values=self.values | {name: before.at[:, layer].set(values.astype(before.dtype))}
        )

    def viewed(self, num_kv_heads: int, head_dim: int) -> "KVCache":
        """Return the cache as one of layers with other heads: as many as lie in the bytes of a block.

        It must be `is_divisible` by them, and its layers by how many of them such a layer takes.
        """
        if (num_kv_heads, head_dim) == (self.num_kv_heads, self.head_dim):
            return self
        size = self.num_layers * self.num_kv_heads * self.head_dim
        num_layers = size // (num_kv_heads * head_dim)
        specs = self.layout.arrays(self.num_blocks, self.block_size, num_kv_heads, head_dim, self.dtype)
        blocks = {
            name: x.reshape(self.num_blocks, num_layers, *specs[name].shape[1:])
            for name, x in self.blocks.items()
        }
        return replace(
            self, blocks=blocks, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim
        )


def joined(cache: KVCache, draft: KVCache) -> KVCache:
    """Return the cache with the arrays of a second model beside its own, in the same blocks.

    What moves blocks moves both models'. To a layer it is no pool before it is `parted`. Both caches have as
    many blocks, of one size and layout. `followed` stays with the model's own.
    """
    followed = cache.followed
    return replace(
        cache,
        followed=jnp.zeros(cache.num_blocks, bool) if followed is None else followed,
        blocks=cache.blocks | {f"{DRAFT}{name}": x for name, x in draft.blocks.items()},
        shared=cache.shared | {f"{DRAFT}{name}": x for name, x in draft.shared.items()},
    )


def parted(cache: KVCache, num_layers: int, num_kv_heads: int, head_dim: int) -> tuple[KVCache, KVCache]:
    """Split what `joined` made into the model's cache and the second one's, which has these sizes."""

    def own[T](arrays: dict[str, T]) -> dict[str, T]:
        return {name: x for name, x in arrays.items() if not name.startswith(DRAFT)}

    def its[T](arrays: dict[str, T]) -> dict[str, T]:
        return {name.removeprefix(DRAFT): x for name, x in arrays.items() if name.startswith(DRAFT)}

    draft = replace(
        cache,
        blocks=its(cache.blocks),
        shared=its(cache.shared),
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        followed=None,
        values={},
    )
    return replace(cache, blocks=own(cache.blocks), shared=own(cache.shared)), draft


def note_followed(cache: KVCache, block_ids: Int[Array, "*n"], is_followed: bool) -> KVCache:
    """Note of these blocks whether they have K and V of a model that drafts; of NULL_BLOCK nothing.

    Without such a model the cache stays as it is.
    """
    if cache.followed is None:
        return cache
    target = jnp.where(block_ids == NULL_BLOCK, cache.num_blocks, block_ids)
    return replace(cache, followed=cache.followed.at[target].set(is_followed, mode="drop"))


def is_divisible(
    layout: Layout, block_size: int, dtype: jnp.dtype, narrow: tuple[int, int], wide: tuple[int, int]
) -> bool:
    """Return whether a layer's block is as large as some of a narrower layer's; KV heads and their width.

    Scales of a head or a token, and what layers share, prevent that.
    """
    if layout.layers_apart or layout.shared(1):
        return False
    one, several = (layout.arrays(1, block_size, *heads, dtype) for heads in (narrow, wide))
    times = wide[0] * wide[1] // (narrow[0] * narrow[1])
    return all(math.prod(several[name].shape) == times * math.prod(one[name].shape) for name in one)


def create(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    layout: Layout = TOKEN_MAJOR,
) -> KVCache:
    """Make a cache of zeros (never uninitialised memory: what is masked must still be a number)."""
    dtype = jnp.dtype(dtype)
    leading = (num_layers, num_blocks) if layout.layers_apart else (num_blocks, num_layers)
    specs = layout.arrays(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    shared = layout.shared(num_kv_heads)
    return KVCache(
        blocks={name: jnp.zeros((*leading, *s.shape[1:]), s.dtype) for name, s in specs.items()},
        shared={name: jnp.zeros((num_layers, *s.shape), s.dtype) for name, s in shared.items()},
        layout=layout,
        num_layers=num_layers,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )


def with_states(
    cache: KVCache,
    arrays: dict[str, tuple[tuple[int, ...], jnp.dtype]],
    num_layers: int,
    num_state_blocks: int | None = None,
) -> KVCache:
    """Return a cache with states of zeros for so many layers.

    arrays: shape and dtype of what a layer keeps in a block, by name.
    num_state_blocks: blocks with states, the null block's place included; None: all blocks of the cache
        have one. Otherwise they are those that follow the cache's own, which have K and V.
    """
    count = cache.num_blocks if num_state_blocks is None else num_state_blocks
    states = {name: jnp.zeros((count, num_layers, *shape), dtype) for name, (shape, dtype) in arrays.items()}
    first = 0 if num_state_blocks is None else cache.num_blocks
    return replace(cache, states=states, first_state_block=first)


def write(
    cache: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int[Array, " num_tokens"],
) -> KVCache:
    """Put K and V of one layer into the tokens' slots; in slot 0, the null block's, nobody looks."""
    if cache.shared:  # padding must not count in statistics over tokens
        is_padding = (slot_mapping < cache.block_size)[:, None, None]
        k, v = jnp.where(is_padding, 0, k), jnp.where(is_padding, 0, v)
    new = caches.write(cache.pool(layer), k, v, slot_mapping).arrays
    return replace(
        cache,
        blocks={name: new[name].reshape(old.shape) for name, old in cache.blocks.items()},
        shared={name: old.at[layer].set(new[name]) for name, old in cache.shared.items()},
    )


def copy_blocks(
    source: KVCache,
    target: KVCache,
    sources: Int[Array, " num_pairs"],
    destinations: Int[Array, " num_pairs"],
) -> KVCache:
    """Copy block `sources[i]` of one cache to `destinations[i]` of the other; where it is NULL_BLOCK, none.

    What is not to be copied costs nothing.
    """
    pairs = jnp.where(sources == NULL_BLOCK, -1, jnp.stack([sources, destinations])).T
    blocks = {
        name: caches.swap_blocks(source.blocks[name], x, pairs, source.axis)
        for name, x in target.blocks.items()
    }
    states = {
        name: caches.swap_blocks(source.states[name], x, _state_pairs(source, target, pairs))
        for name, x in target.states.items()
    }
    return note_followed(replace(target, blocks=blocks, states=states), destinations, False)


def _state_pairs(
    source: KVCache, target: KVCache, pairs: Int[Array, "num_pairs 2"]
) -> Int[Array, "num_pairs 2"]:
    """Return pairs of blocks as places of their states; none where a block has no state."""
    places = jnp.stack([source._state_index(pairs[:, 0]), target._state_index(pairs[:, 1])], axis=1)
    is_pair = jnp.all((pairs > NULL_BLOCK) & (places > NULL_BLOCK), axis=1)
    return jnp.where(is_pair[:, None], places, -1)


def copy_within(
    cache: KVCache, sources: Int[Array, " num_pairs"], destinations: Int[Array, " num_pairs"]
) -> KVCache:
    """Copy block `sources[i]` to `destinations[i]`, in place, one after the other; where it is NULL_BLOCK,
    none. No block may be both. What is not to be copied costs nothing.
    """
    axis = cache.axis
    type Arrays = dict[str, Num[Array, "..."]]
    type Carry = tuple[Arrays, Arrays, Bool[Array, " num_pairs"]]

    def copy_one(carry: Carry) -> Carry:
        blocks, states, left = carry
        i = jnp.argmax(left)

        def copied(x: Num[Array, "..."], source: Array, destination: Array, axis: int) -> Array:
            block = lax.dynamic_index_in_dim(x, source, axis, keepdims=False)
            return lax.dynamic_update_index_in_dim(x, block, destination, axis)

        blocks = {name: copied(x, sources[i], destinations[i], axis) for name, x in blocks.items()}
        if states:  # a copy of the null block's place on itself, where blocks have no states
            source, destination = cache._state_index(sources[i]), cache._state_index(destinations[i])
            states = {name: copied(x, source, destination, 0) for name, x in states.items()}
        return blocks, states, left.at[i].set(False)

    start = (cache.blocks, cache.states, sources != NULL_BLOCK)
    blocks, states, _ = lax.while_loop(lambda carry: jnp.any(carry[2]), copy_one, start)
    return replace(cache, blocks=blocks, states=states)
