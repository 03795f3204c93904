"""Self-attention of a decoder's layers: projections, norms and RoPE around a look at the cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged import row_sums
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import PassBatch, attend
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.norms import Norm, norm
from jaxpaged.models.positions import PositionTables, has_rope, of_layer, turned
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights


class Attention(nnx.Module):
    """Queries, keys and values of one product, what is done to them, and the output's product."""

    def __init__(self, weights: Weights) -> None:
        config, self.shards = weights.config.attention_part, weights.shards
        assert config is not None
        self.config = config  # of layers with attention alone: a layer's number counts these
        self.qkv, self.o = linear(weights, "qkv"), linear(weights, "o")
        self.q = linear(weights, "q") if self.config.num_kv_layers < self.config.num_layers else None
        self.q_norm, self.k_norm = norm(weights, "q_norm"), norm(weights, "k_norm")
        self.sinks = stack(weights, "sinks")
        self.gate = linear(weights, "attention_gate") if self.config.output_gate is not None else None

    def __call__(
        self,
        x: Float[Array, "num_tokens given"],
        cache: KVCache,
        layer: layers.Layer,
        tables: PositionTables,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        c, dtype = self.config, x.dtype
        q, k, v = self._projected(x, layer, tables, batch.adapters)
        slopes = None if c.alibi_slopes is None else jnp.asarray(c.alibi_slopes, jnp.float32)
        if slopes is not None and self.shards is not None:
            slopes = self.shards.mine(slopes)
        attended, cache = attend(
            cache,
            layer,
            q.astype(dtype),
            k.astype(dtype),
            v.astype(dtype),
            batch,
            scale=c.scale,
            kinds=c.attention_kinds,
            kv_layers=c.kv_layers,
            heads=c.heads_in(cache.num_kv_heads, cache.head_dim),
            soft_cap=c.attention_soft_cap,
            alibi_slopes=slopes,
            sinks=None if self.sinks is None else self.sinks[layer].astype(jnp.float32),
        )
        attended = attended.reshape(x.shape[0], -1)
        if self.gate is not None:
            attended = self._gated(attended, self.gate(x, layer)).astype(dtype)
        return total(self.shards, self.o.pieces(attended, layer, batch.adapters)), cache

    def _projected(
        self,
        x: Float[Array, "num_tokens given"],
        layer: layers.Layer,
        tables: PositionTables,
        adapters: Int[Array, " num_tiles"] | None,
    ) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        """Return queries, keys and values of all heads, [num_tokens, heads, head_dim], in float32."""
        c = self.config
        qkv = self.qkv(x, layer, adapters) if self.q is None else self._product(self.q, x, layer)
        if c.qkv_clip is not None:
            qkv = jnp.clip(qkv, -c.qkv_clip, c.qkv_clip)
        qkv = qkv.reshape(x.shape[0], c.num_q_heads + 2 * c.num_kv_heads, c.head_dim)
        qk, v = jnp.split(qkv, [c.num_q_heads + c.num_kv_heads], axis=1)
        if not c.norm_after_rope:
            qk = self._normed(qk, layer)
        tables_of_layer = of_layer(c, tables, layer)
        qk = turned(c, qk, tables_of_layer, layer)
        if c.norm_after_rope:
            qk = self._normed(qk, layer)
        if c.v_norm:
            v = self._plain(v, layer)
        if c.value_scale != 1.0:
            v = v * c.value_scale
        q, k = jnp.split(qk, [c.num_q_heads], axis=1)
        return q if tables_of_layer.factors is None else q * tables_of_layer.factors, k, v

    def _product(
        self, q_alone: layers.Linear, x: Float[Array, "num_tokens given"], layer: layers.Layer
    ) -> Float[Array, "num_tokens width"]:
        """Return the product of a model in which some layers have queries alone: with zeros for K and V."""
        c = self.config
        others = ((0, 0), (0, 2 * c.num_kv_heads * c.head_dim))
        shares = [kind.shares_kv is not None for kind in c.layers]
        numbers = [
            shares[:i].count(is_shared) for i, is_shared in enumerate(shares)
        ]  # among those that are as it is
        if isinstance(layer, int):
            if shares[layer]:
                return jnp.pad(q_alone(x, numbers[layer]), others)
            return self.qkv(x, numbers[layer])
        number = jnp.asarray(numbers, jnp.int32)[layer]
        return lax.cond(
            jnp.asarray(shares)[layer],
            lambda x: jnp.pad(q_alone(x, number), others),
            lambda x: self.qkv(x, number),
            x,
        )

    def _gated(
        self, attended: Float[Array, "num_tokens width"], gate: Float[Array, "num_tokens gates"]
    ) -> Float[Array, "num_tokens width"]:
        """Return what attention gives, times its gate: of each coordinate, or of each head."""
        factors = (jax.nn.softplus if self.config.gate_activation == "softplus" else jax.nn.sigmoid)(gate)
        heads = attended.reshape(attended.shape[0], factors.shape[1], -1).astype(jnp.float32)
        return (heads * factors[..., None]).reshape(attended.shape)

    def _plain(
        self, x: Float[Array, "num_tokens heads head_dim"], layer: layers.Layer
    ) -> Float[Array, "num_tokens heads head_dim"]:
        """Return each head normed without weights."""
        mean_square = self._mean(layer)(x * x)
        return x * lax.rsqrt(mean_square + self.config.norm_eps)

    def _mean(self, layer: layers.Layer) -> Callable[[Array], Array]:
        """Return the mean over a head's coordinates, over those alone that the layer has of a padded one."""
        c = self.config
        times = [c.head_dim // (kind.head_dim or c.head_dim) for kind in c.layers]
        if set(times) == {1}:
            return row_sums.mean
        return lambda x: row_sums.mean(x) * layers.value_of(times, layer)

    def _normed(
        self, qk: Float[Array, "num_tokens heads head_dim"], layer: layers.Layer
    ) -> Float[Array, "num_tokens heads head_dim"]:
        """Return queries and keys, normed where the model norms them."""
        if self.config.qk_norm == "plain":
            return jnp.where(has_rope(self.config.layers, layer), self._plain(qk, layer), qk)
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = jnp.split(qk, [self.config.num_q_heads], axis=1)
        of_k = layer  # its own, or any where K is another layer's
        if self.q is not None:
            places = self.config.kv_layers
            of_k = places[layer] if isinstance(layer, int) else jnp.asarray(places, jnp.int32)[layer]
        return jnp.concatenate([self._norm(self.q_norm, q, layer), self._norm(self.k_norm, k, of_k)], axis=1)

    def _norm(
        self, norm: Norm, x: Float[Array, "num_tokens heads head_dim"], layer: layers.Layer
    ) -> Float[Array, "num_tokens heads head_dim"]:
        if self.config.qk_norm != "all":
            return norm(x, layer) if isinstance(norm, layers.LayerNorm) else norm(x, layer, self._mean(layer))
        whole = x.reshape(x.shape[0], -1)
        if self.shards is None or isinstance(norm, layers.LayerNorm):
            return norm(whole, layer).reshape(x.shape)
        mean = functools.partial(self.shards.mean, num_heads=x.shape[1])
        return norm(whole, layer, mean).reshape(x.shape)
