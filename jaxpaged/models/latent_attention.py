"""Latent attention of a decoder's layers, absorbed: one form of arithmetic for prompts and steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import PassBatch, attend
from jaxpaged.models.change import Change
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.latents import Latent
from jaxpaged.models.positions import PositionTables, of_layer, turned
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights
from pallas_kernels import native
from pallas_kernels.gpu import dense_product
from pallas_kernels.xla import products as xla


class LatentAttention(nnx.Module):
    """Queries that read latents, and products of each head in front of that and behind it."""

    def __init__(self, weights: Weights, latent: Latent) -> None:
        config, self.shards = weights.config.attention_part, weights.shards
        assert config is not None
        self.config, self.latent = config, latent
        has_rank = latent.q_rank is not None
        self.q_a = linear(weights, "latent.q_a") if has_rank else None
        self.q_norm = _norm(weights, "latent.q_norm", latent) if has_rank else None
        self.q, self.kv_a = linear(weights, "latent.q"), linear(weights, "latent.kv_a")
        self.kv_norm = _norm(weights, "latent.kv_norm", latent)
        self.k_up = HeadProducts(weights, "latent.k_up", config.num_q_heads, latent.rank)
        self.v_up = HeadProducts(weights, "latent.v_up", config.num_q_heads, latent.v_dim)
        self.o = linear(weights, "o")

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        layer: layers.Layer,
        tables: PositionTables,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        c, d, dtype = self.config, self.latent, x.dtype
        given = x
        if self.q_a is not None and self.q_norm is not None:
            given = self.q_norm(self.q_a(x, layer).astype(dtype), layer)
            given = given if d.q_scale == 1.0 else given * jnp.asarray(d.q_scale, dtype)
        q = self.q(given, layer).reshape(x.shape[0], c.num_q_heads, d.head_dim)
        q, q_rot = jnp.split(q, [d.k_dim], axis=2)
        latent, k_rot = jnp.split(self.kv_a(x, layer), [d.rank], axis=1)
        latent = self.kv_norm(latent.astype(dtype), layer)
        latent = latent if d.kv_scale == 1.0 else latent * jnp.asarray(d.kv_scale, dtype)
        tables_of_layer = of_layer(c, tables, layer)
        q_rot, k_rot = (turned(c, each, tables_of_layer, layer) for each in (q_rot, k_rot[:, None]))
        q = self.k_up(q.astype(dtype), layer)
        q = jnp.concatenate([q, q_rot], axis=2)
        if tables_of_layer.factors is not None:
            q = q * tables_of_layer.factors
        k = jnp.concatenate([latent[:, None], k_rot.astype(dtype)], axis=2)
        attended, cache = attend(
            cache,
            layer,
            q.astype(dtype),
            k,
            k,
            batch,
            scale=c.scale,
            kinds=c.attention_kinds,
            kv_layers=c.kv_layers,
        )
        out = self.v_up(attended[..., : d.rank], layer).astype(dtype)
        return total(self.shards, self.o.pieces(out.reshape(x.shape[0], -1), layer)), cache


class HeadProducts(nnx.Module):
    """A product of each head: each layer's `x[:, head] @ weight[head].T`, in float32.

    On CPUs and in GPU kernels a row's bits do not depend on the others.
    """

    def __init__(self, weights: Weights, role: str, num_heads: int, out_features: int) -> None:
        each = weights.each(f"{role}.weight")
        assert each is not None
        self.num_heads, self.out_features = num_heads, out_features
        self.implementation = weights.form.stacked
        packed = (
            weight.mapped(self._packed) if isinstance(weight, Change) else self._packed(weight)
            for weight in each
        )
        self.kernel = layers.Stack(packed, len(each), together=weights.form.loops)

    def _packed(self, weight: Any) -> Any:
        """Return the weights of all heads, each packed for the implementation, one behind the other."""
        heads = weight.reshape(self.num_heads, -1, weight.shape[1])
        join = np.stack if isinstance(weight, np.ndarray) else jnp.stack
        return join([layers.PACKED[self.implementation](head) for head in heads])

    def __call__(
        self, x: Float[Array, "num_tokens num_heads in_features"], layer: layers.Layer
    ) -> Float[Array, "num_tokens num_heads out_features"]:
        by_head = jnp.swapaxes(x, 0, 1)
        kernel, number = self.kernel.holding(layer)
        if self.implementation == "native":
            out = native.product(by_head, kernel, self.out_features, 0 if number is None else number)
        elif self.implementation == "mosaic_gpu":
            flat = kernel.reshape(-1, *kernel.shape[-(kernel.ndim - 1 - (number is not None)) :])
            first = 0 if number is None else number * self.num_heads

            def of_head(rows_and_head: tuple[Array, Array]) -> Array:
                rows, head = rows_and_head
                return dense_product.packed_product(rows, flat, self.out_features, first + head)

            out = lax.map(of_head, (by_head, jnp.arange(self.num_heads, dtype=jnp.int32)))
        else:
            kernel_of_layer = (
                kernel if number is None else lax.dynamic_index_in_dim(kernel, number, keepdims=False)
            )
            out = xla.product(by_head, kernel_of_layer, contract=0)
        return jnp.swapaxes(out, 0, 1)


def _norm(weights: Weights, role: str, latent: Latent) -> layers.RMSNorm:
    scales = stack(weights, f"{role}.weight")
    assert scales is not None
    return layers.RMSNorm(scales, latent.norm_eps)
