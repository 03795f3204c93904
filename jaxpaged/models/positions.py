"""Numbers that follow from tokens' positions: angles of RoPE, and factors of queries."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.models import layers
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.ropes import Rope, Temperature


class PositionTables(NamedTuple):
    """Cosines and sines of all tokens' angles, and the factors of their queries; None for what no layer has.

    Where layers differ, the different tables lie along a first axis.
    """

    cos: Float[Array, "..."] | None  # [num_tokens, 1, half_dim]
    sin: Float[Array, "..."] | None
    factors: Float[Array, "..."] | None  # [num_tokens, 1, 1]


def position_tables(
    config: ModelConfig, positions: Int[Array, " num_tokens"], max_len: int
) -> PositionTables:
    """Return the tables of all layers' kinds. `max_len`: how long a sequence may get."""
    cos = sin = factors = None
    ropes = _different([kind.rope for kind in config.layers])
    half = max((rope.dim for rope in ropes if rope is not None), default=0) // 2

    def angles(rope: Rope | None) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        if rope is None:  # turns by nothing
            return jnp.ones((len(positions), 1, half)), jnp.zeros((len(positions), 1, half))
        frequencies, factor = layers.rope_frequencies(rope, max_len)
        if len(frequencies) < half:  # of narrower heads: what is beyond them turns by nothing
            frequencies = jnp.pad(frequencies, (0, half - len(frequencies)))
        return layers.rope_angles(positions, frequencies, factor)

    if half:
        each = [angles(rope) for rope in ropes]
        cos, sin = (_together(tables) for tables in zip(*each, strict=True))
    temperatures = _different([kind.temperature for kind in config.layers])
    if temperatures != [None]:
        factors = _together([_factors(temperature, positions) for temperature in temperatures])
    return PositionTables(cos, sin, factors)


def of_layer(config: ModelConfig, tables: PositionTables, layer: layers.Layer) -> PositionTables:
    """Return one layer's tables."""
    cos, sin = (_chosen(table, [kind.rope for kind in config.layers], layer) for table in tables[:2])
    return PositionTables(
        cos, sin, _chosen(tables.factors, [kind.temperature for kind in config.layers], layer)
    )


def turned(
    config: ModelConfig,
    x: Float[Array, "num_tokens num_heads head_dim"],
    tables: PositionTables,
    layer: layers.Layer,
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Return queries or keys turned by one layer's angles, as wide as its heads are."""
    if tables.cos is None or tables.sin is None:
        return x
    dims = [0 if kind.rope is None else kind.rope.dim for kind in config.layers]
    different = sorted(set(dims) - {0})
    rotated = x
    for dim in [dims[layer] or different[0]] if isinstance(layer, int) else different:
        by_dim = layers.apply_rope(x, tables.cos[..., : dim // 2], tables.sin[..., : dim // 2])
        rotated = (
            by_dim
            if dim == different[0] or isinstance(layer, int)
            else jnp.where(jnp.asarray(dims)[layer] == dim, by_dim, rotated)
        )
    return rotated


def has_rope(kinds: Sequence[LayerKind], layer: layers.Layer) -> bool | Array:
    """Return whether a layer turns queries and keys."""
    flags = [kind.rope is not None for kind in kinds]
    if isinstance(layer, int):
        return flags[layer]
    return True if all(flags) else jnp.asarray(flags)[layer]


def _factors(
    temperature: Temperature | None, positions: Int[Array, " num_tokens"]
) -> Float[Array, "num_tokens 1 1"]:
    """Return what queries are multiplied by: `1 + scale * log(1 + floor((position + offset) / every))`."""
    if temperature is None:
        return jnp.ones((len(positions), 1, 1))
    number = ((positions + temperature.offset) // temperature.every).astype(jnp.float32)
    return (1 + temperature.scale * jnp.log1p(number))[:, None, None]


def _different[T](each: Sequence[T]) -> list[T]:
    return list(dict.fromkeys(each))


def _together(tables: Sequence[Float[Array, "..."]]) -> Float[Array, "..."]:
    return tables[0] if len(tables) == 1 else jnp.stack(tables)


def _chosen(
    table: Float[Array, "..."] | None, each: Sequence[object], layer: layers.Layer
) -> Float[Array, "..."] | None:
    """Return the table of a layer; `each` has the kind of every layer."""
    kinds = _different(each)
    return table if table is None or len(kinds) == 1 else table[layers.kind_of(kinds, each, layer)]
