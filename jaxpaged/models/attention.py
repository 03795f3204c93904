"""Attention over a paged cache: what a layer of any model calls, and what it needs to know of its tokens."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.contracts import attentions
from jaxpaged.contracts.attentions import Attention
from jaxpaged.memory import kv_cache
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.config import LayerKind
from pallas_kernels import ops
from pallas_kernels.gpu.decode.attention import SharedPlan
from pallas_kernels.ops import TiledImplementation

Heads = tuple[int, int]  # KV heads, and their width
Look = tuple[LayerKind, int, Heads | None]  # what bounds a layer's attention, its group, and its heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassBatch:
    """The tokens of one forward pass, in tiles: neighbouring tokens of one sequence each.

    Tells where the tokens stand in their sequences and in the cache, which adapters they have, and whose
    hidden states are wanted.
    """

    # Slot of each token, 0: padding; num_tokens = tiles x tile_len. With groups of layers, one per group.
    slot_mapping: Int[Array, "*groups num_tokens"]
    block_tables: Int[Array, "num_tables max_blocks_per_seq"]
    query_starts: Int[Array, " num_tiles"]  # position of each tile's first token
    seq_lens: Int[Array, " num_tiles"]  # tokens in the cache, the tile's own included; 0 for an unused tile
    # Implementation of attention.
    implementation: TiledImplementation | Attention = field(metadata={"static": True})
    # Adapter slot of each tile, from 1; 0 for no adapter. None where the model has no adapter slots.
    adapters: Int[Array, " num_tiles"] | None = None
    # Row of block_tables per tile; None: in their order. With groups of layers, one per group.
    table_rows: Int[Array, "*groups num_tiles"] | None = None
    # Groups of layers, each with rows of block_tables of its own; None: all layers share them.
    grouping: Grouping | None = field(default=None, metadata={"static": True})
    # Kernel plans from `planned`, one for each kind of attention, shared by its layers.
    plans: tuple[SharedPlan | None, ...] | None = None
    # Tokens whose hidden states are wanted; None: all. The others' are undefined.
    wanted: Bool[Array, " num_tokens"] | None = None

    @property
    def is_padding(self) -> Bool[Array, " num_tokens"]:
        """The tokens that are none: their K and V go to the null block."""
        return (self.slot_mapping if self.grouping is None else self.slot_mapping[0]) == 0

    @property
    def tile_len(self) -> int:
        """Tokens in a tile."""
        return self.slot_mapping.shape[-1] // self.query_starts.shape[0]

    def rows_of(self, group: int) -> Int[Array, " num_tiles"] | None:
        """Return the row of block_tables of each tile, for the layers of one group."""
        if self.grouping is None or self.table_rows is None:
            return self.table_rows
        return self.table_rows[group]

    def in_layer(self, is_last: bool | Bool[Array, ""]) -> "PassBatch":
        """Return the batch for one layer. In the last one only wanted tokens are computed behind K and V:
        tiles without any see nothing. In the other layers all tokens are `wanted`.
        """
        if self.wanted is None:
            return self
        wanted = self.wanted | jnp.logical_not(is_last)
        has_some = jnp.any(wanted.reshape(self.seq_lens.shape[0], -1), axis=1)
        return replace(self, wanted=wanted, seq_lens=jnp.where(has_some, self.seq_lens, 0))


def _ours(implementation: TiledImplementation | Attention, tile_len: int) -> TiledImplementation | None:
    """Return which of ours computes tiles of this length; None where a function from outside does."""
    return implementation.ours(tile_len) if isinstance(implementation, Attention) else implementation


def planned(
    batch: PassBatch,
    cache: KVCache,
    num_q_heads: int,
    kinds: Sequence[LayerKind],
    kv_layers: Sequence[int] = (),
    heads: Sequence[Heads] = (),
) -> PassBatch:
    """Return the batch with its attention plans: what each layer would otherwise find out again.

    kinds: of each layer, what bounds its attention (`ModelConfig.attention_kinds`).
    kv_layers, heads: see `attend`.
    """
    ours = _ours(batch.implementation, batch.tile_len)
    if ours is None:
        return batch
    plans = tuple(
        ops.plan_of_tiles(
            _viewed(cache, layer_heads).pool(0),
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            tile_len=batch.tile_len,
            num_q_heads=num_q_heads,
            sliding_window=kind.sliding_window,
            attention_chunk=kind.attention_chunk,
            table_rows=batch.rows_of(group),
            implementation=ours,
        )
        for kind, group, layer_heads in dict.fromkeys(_each(batch, kinds, kv_layers, heads))
    )
    return replace(batch, plans=plans)


def _each(
    batch: PassBatch, kinds: Sequence[LayerKind], kv_layers: Sequence[int], heads: Sequence[Heads]
) -> list[Look]:
    """Return what bounds each layer's attention, the group whose tables it reads, and its heads if they
    differ.
    """
    heads_of_layers: Sequence[Heads | None] = heads or [None] * len(kinds)
    groups = [0] * len(kinds)
    if batch.grouping is not None:
        owners, group_of = kv_layers or range(len(kinds)), batch.grouping.group_of
        groups = [group_of[owner] for owner in owners]
    return list(zip(kinds, groups, heads_of_layers, strict=True))


def _viewed(cache: KVCache, heads: Heads | None) -> KVCache:
    return cache if heads is None else cache.viewed(*heads)


def _written(
    cache: KVCache,
    layer: int | Int[Array, ""],
    place: int | Int[Array, ""],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slots: Int[Array, " num_tokens"],
    heads: Sequence[Heads],
) -> KVCache:
    """Write K and V of a layer whose heads others need not have: without padding, each head once."""
    of_cache = cache.num_kv_heads, cache.head_dim
    for size in dict.fromkeys(heads):
        mine: bool | Bool[Array, ""] = True
        if isinstance(layer, int):
            if heads[layer] != size:
                continue
        else:  # XLA copies the cache if branches write to it: the others' tokens go to the null block
            mine = jnp.asarray([each == size for each in heads])[layer]
        its_k, its_v = (x[:, :: x.shape[1] // size[0], : size[1]] for x in (k, v))
        its_place, its_slots = jnp.where(mine, place, 0), jnp.where(mine, slots, 0)
        cache = kv_cache.write(cache.viewed(*size), its_place, its_k, its_v, its_slots).viewed(*of_cache)
    return cache


def attend(
    cache: KVCache,
    layer: int | Int[Array, ""],
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    batch: PassBatch,
    *,
    scale: float,
    kinds: Sequence[LayerKind] = (LayerKind(),),
    kv_layers: Sequence[int] = (),
    heads: Sequence[Heads] = (),
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " num_q_heads"] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """Write the tokens' K and V of one layer, then let each token look at its sequence up to itself.

    `kinds`: what bounds the attention of each layer, or one for all (`ModelConfig.attention_kinds`). Blocks
    that lie wholly before what a tile's first token sees may be gone, with anything in their places of the
    block table.

    `kv_layers`: of each layer, which of the cache's layers it sees; empty: as many, in their order. A layer
    that sees what another has written before writes nothing: k and v are not read.

    `heads`: of each layer, the KV heads and their width in a cache whose places are the narrowest layer's;
    empty: all as q, k and v have them. What is less than those is padded there.
    """
    each = _each(batch, kinds, kv_layers, heads)
    place, slots, writes = layer, batch.slot_mapping, True
    if batch.grouping is not None:
        slots = slots[layers.value_of([group for _, group, _ in each], layer)]
    if len(set(kv_layers)) < len(kv_layers):
        is_first = [number not in kv_layers[:i] for i, number in enumerate(kv_layers)]
        if isinstance(layer, int):
            place, writes = kv_layers[layer], is_first[layer]
        else:
            place = jnp.asarray(kv_layers, jnp.int32)[layer]
            slots = jnp.where(jnp.asarray(is_first)[layer], slots, 0)
    if batch.grouping is not None:
        place = layers.value_of(batch.grouping.place_of, place)
    if writes and heads:
        cache = _written(cache, layer, place, k, v, slots, heads)
    elif writes:
        cache = kv_cache.write(cache, place, k, v, slots)
    different = list(dict.fromkeys(each))

    def look(
        layer_look: Look, q: Float[Array, "num_tokens num_q_heads head_dim"]
    ) -> Float[Array, "num_tokens num_q_heads head_dim"]:
        kind, group, its_heads = layer_look
        if its_heads is not None:
            less = q.shape[-1] - its_heads[1]
            out = computed(kind, group, layer_look, q[..., : its_heads[1]])
            return jnp.pad(out, ((0, 0), (0, 0), (0, less)))
        return computed(kind, group, layer_look, q)

    def computed(
        kind: LayerKind, group: int, layer_look: Look, q: Float[Array, "num_tokens num_q_heads head_dim"]
    ) -> Float[Array, "num_tokens num_q_heads head_dim"]:
        pool = _viewed(cache, layer_look[2]).pool(place)
        tiles = q.reshape(batch.query_starts.shape[0], -1, *q.shape[1:])
        ours = _ours(batch.implementation, tiles.shape[1])
        if ours is None:
            assert isinstance(batch.implementation, Attention)
            return attentions.call(
                batch.implementation,
                tiles,
                pool,
                batch.block_tables,
                batch.query_starts,
                batch.seq_lens,
                batch.rows_of(group),
                scale=scale,
                sliding_window=kind.sliding_window,
                attention_chunk=kind.attention_chunk,
                layer_kind=kind.own,
                soft_cap=soft_cap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
            ).reshape(q.shape)
        out = ops.tiled_paged_attention(
            tiles,
            pool,
            None,
            batch.block_tables,
            batch.query_starts,
            batch.seq_lens,
            scale=scale,
            sliding_window=kind.sliding_window,
            attention_chunk=kind.attention_chunk,
            layer_kind=kind.own,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            table_rows=batch.rows_of(group),
            plan=None if batch.plans is None else batch.plans[different.index(layer_look)],
            implementation=ours,
        )
        return out.reshape(q.shape)

    if len(different) == 1:
        return look(different[0], q), cache
    if isinstance(layer, int):
        return look(each[layer], q), cache
    branches = [functools.partial(look, layer_look) for layer_look in different]
    return lax.switch(layers.kind_of(different, each, layer), branches, q), cache
