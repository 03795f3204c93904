"""Writing of an adapter into a decoder's slot, inside of a compiled step; what reads files is elsewhere."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Int

from jaxpaged.models.decoder import Decoder
from jaxpaged.models.feed_forward import MLP
from jaxpaged.models.layers import Linear
from pallas_kernels.ops.low_rank import LowRank


def put(model: Decoder, arrays: Mapping[str, tuple[Any, Any]], slot: int | Int[Array, ""]) -> None:
    """Write an adapter into an adapter slot, counted from 0."""
    for role, product in products(model).items():
        if role in arrays:
            parts: LowRank = product.adapters.get_value()
            a, b = arrays[role]
            product.adapters.set_value(
                LowRank(parts.a.at[:, slot].set(a), parts.b.at[:, slot].set(b), parts.widths)
            )


def products(model: Decoder) -> dict[str, Linear]:
    """Return the products that an adapter may add to, by their role."""
    attention, mlp = model.layers.attention, model.layers.mlp
    products = {"qkv": attention.qkv, "o": attention.o}
    if isinstance(mlp, MLP):
        products |= {"gate_up" if model.config.gated else "up": mlp.up, "down": mlp.down}
    return products
