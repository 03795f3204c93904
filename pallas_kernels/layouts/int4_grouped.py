"""The layout `int4_grouped`: two numbers a byte, K with scales for channels, V with scales for tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.layouts.base import Arrays, Layout, Location, PackedView, Sizes

GROUP = (
    16  # tokens; divides a prompt's tile, so that what a token sees of its group is the same in any company
)
SMALLEST = 1e-30  # a scale: that of equal numbers


@dataclasses.dataclass(frozen=True)
class Int4Grouped(Layout):
    """Two numbers a byte, each code * scale + zero: K by channels of 16 tokens, V by tokens.

    Codes go from 0 to 15, scales and zeros are in bfloat16. A channel's numbers of K are much alike, and so
    have a scale in common. The newest tokens of K, until 16 are there, stay as they are: a block has room for
    one such group, so that large blocks take least a token. A byte has the codes of channels d and d +
    head_dim / 2, the first in its low bits. Scales and zeros of a head's V lie side by side, for a program
    that computes one head fetches a tile's at once.
    """

    cache_dtype = "int4"
    tolerance = 2.0**-3

    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        def spec(*shape: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_blocks, *shape), dtype)

        codes = spec(block_size, num_kv_heads, head_dim // 2, dtype=jnp.dtype("uint8"))
        of_channel = spec(block_size // GROUP, num_kv_heads, head_dim, dtype=jnp.dtype("bfloat16"))
        of_token = spec(num_kv_heads, block_size, dtype=jnp.dtype("bfloat16"))
        return {
            "k": codes,
            "k_scale": of_channel,
            "k_zero": of_channel,
            "k_new": spec(
                GROUP, num_kv_heads, head_dim, dtype=dtype
            ),  # of the group `new_group`, -1 for none
            "new_group": spec(dtype=jnp.dtype("int32")),
            "v": codes,
            "v_scale": of_token,
            "v_zero": of_token,
        }

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        new = dict(arrays)
        codes, scale, zero = _quantised(v.astype(jnp.float32), axis=-1)
        flat = new["v"].reshape(-1, *new["v"].shape[2:])
        new["v"] = flat.at[slots].set(codes).reshape(new["v"].shape)
        block, offset = jnp.divmod(slots, sizes.block_size)
        for name, x in (("v_scale", scale), ("v_zero", zero)):
            new[name] = new[name].at[block, :, offset].set(x[..., 0])

        k = k.astype(new["k_new"].dtype)
        nowhere = sizes.num_blocks
        group, place = jnp.divmod(offset, GROUP)
        token, member = jnp.arange(len(slots)), jnp.arange(GROUP)
        # A token whose group ends in this call is not kept in full.
        last = token + GROUP - 1 - place
        is_whole = slots.at[last].get(mode="fill", fill_value=-1) == slots + GROUP - 1 - place
        # The other tokens of a group come before its last one, or are in the block from earlier calls.
        ends = place == GROUP - 1
        before = token[:, None] - (GROUP - 1) + member
        is_here = (before >= 0) & (slots[before] == slots[:, None] - (GROUP - 1) + member)
        # Read the array before writing to it: otherwise XLA would copy it.
        earlier, new["k_new"] = lax.optimization_barrier((new["k_new"][block], new["k_new"]))
        members = jnp.where(is_here[..., None, None], k[before], earlier)
        codes, scale, zero = _quantised(members.astype(jnp.float32), axis=1)
        at = jnp.where(ends, block, nowhere)
        places = (at[:, None], group[:, None] * GROUP + member)
        new["k"] = new["k"].at[places].set(codes, mode="drop")
        new["k_scale"] = new["k_scale"].at[at, group].set(scale[:, 0], mode="drop")
        new["k_zero"] = new["k_zero"].at[at, group].set(zero[:, 0], mode="drop")
        kept = jnp.where(is_whole, nowhere, block)
        new["k_new"] = new["k_new"].at[kept, place].set(k, mode="drop")
        none = new["new_group"].at[at].set(-1, mode="drop")
        new["new_group"] = none.at[kept].set(group, mode="drop")
        return new

    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        a = {name: array.at[block_ids].get(mode="promise_in_bounds") for name, array in arrays.items()}
        scale, zero = (jnp.swapaxes(a[name], -1, -2)[..., None] for name in ("v_scale", "v_zero"))
        v = _numbers(a["v"]) * scale + zero
        shape = block_ids.shape, (sizes.block_size // GROUP, GROUP, sizes.num_kv_heads, sizes.head_dim)
        codes = _numbers(a["k"]).reshape(*shape[0], *shape[1])
        k = codes * a["k_scale"][..., None, :, :] + a["k_zero"][..., None, :, :]
        is_new = jnp.arange(shape[1][0]) == a["new_group"][..., None]
        kept = jnp.expand_dims(a["k_new"], -4).astype(jnp.float32)
        k = jnp.where(is_new[..., None, None, None], kept, k)
        return k.reshape(v.shape).astype(dtype), v.astype(dtype)

    def packed_view(self) -> PackedView:
        names = (name for name in PackedView._fields if name != "group")
        view = PackedView(GROUP, **{name: Location(name, ("block", "token", "head")) for name in names})
        scale, zero = (Location(name, ("block", "head", "token")) for name in ("v_scale", "v_zero"))
        return view._replace(new_group=Location("new_group", ("block",)), v_scale=scale, v_zero=zero)

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        if block_size % GROUP:
            return f"block_size must be a multiple of {GROUP}"
        return "head_dim must be even" if head_dim % 2 else None


def _quantised(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return packed codes, scales and zeros of float32 numbers [..., head_dim].

    axis: numbers along it share a scale and a zero.
    """
    low, high = (f(x, axis=axis, keepdims=True) for f in (jnp.min, jnp.max))
    scale = jnp.maximum((high - low) * np.float32(1 / 15), SMALLEST).astype(jnp.bfloat16)
    zero = low.astype(jnp.bfloat16)
    codes = jnp.clip(jnp.rint((x - zero) / scale.astype(jnp.float32)), 0, 15).astype(jnp.uint8)
    first, second = jnp.split(codes, 2, axis=-1)
    return first | second << 4, scale, zero


def _numbers(codes: jax.Array) -> jax.Array:
    """Unpack codes [..., head_dim / 2] into numbers [..., head_dim]."""
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.float32)
