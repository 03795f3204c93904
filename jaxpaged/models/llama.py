"""Llama: grouped-query attention, RoPE, SwiGLU. Serves Llama 2 and 3, Mistral 7B, SmolLM2, TinyLlama, ..."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.checks import InputError
from jaxpaged.memory import kv_cache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import AttentionBatch, attend
from jaxpaged.models.config import ModelConfig
from pallas_kernels import native
from pallas_kernels.layouts import TOKEN_MAJOR, Layout

Weights = Mapping[
    str, np.ndarray | Array
]  # by Hugging Face name; a projection is [out_features, in_features]


class Llama(nnx.Module):
    """Built from weights under their Hugging Face names, which `check_weights` has passed; `dtype` is that of
    weights and activations.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: jnp.dtype) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.embedding = nnx.Param(jnp.asarray(weights["model.embed_tokens.weight"], dtype))
        self.layers = DecoderLayers(config, weights, dtype)
        self.norm = layers.RMSNorm([jnp.asarray(weights["model.norm.weight"], dtype)], config.rms_norm_eps)
        # A tied table serves as it lies, unless products want it packed.
        self.lm_head = (
            None
            if config.tie_word_embeddings and not native.serves(dtype)
            else layers.Linear([jnp.asarray(weights[unembedding_name(config)], dtype)])
        )

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def create_cache(self, num_blocks: int, block_size: int, layout: Layout = TOKEN_MAJOR) -> KVCache:
        """Zeroed K and V of its layers, heads and dtype."""
        c = self.config
        return kv_cache.create(
            c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, self.dtype, layout
        )

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Hidden states after the last norm, and the cache with these tokens written."""
        # Zeros stay zeros in every layer, and products on a CPU skip rows of zeros.
        x = jnp.where(batch.is_padding[:, None], 0, self.embedding[...][token_ids])
        frequencies = layers.rope_frequencies(
            self.config.head_dim, self.config.rope_theta, self.config.rope_scaling
        )
        cos, sin = layers.rope_angles(positions, frequencies)
        type Carry = tuple[Float[Array, "num_tokens hidden"], KVCache]

        def apply(layer: layers.Layer, carry: Carry) -> Carry:
            return self.layers(*carry, layer, cos, sin, batch)

        carry = x, cache
        if layers.loops_over_layers(self.dtype):
            carry = lax.fori_loop(0, self.config.num_layers, apply, carry)
        else:
            carry = functools.reduce(
                lambda carry, layer: apply(layer, carry), range(self.config.num_layers), carry
            )
        x, cache = carry
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens vocab"]:
        """Scores of the next token, in float32."""
        if self.lm_head is None:
            return layers.unembed(hidden, self.embedding[...])
        return self.lm_head(hidden)


class DecoderLayers(nnx.Module):
    """Of any layer: attention, then a gated MLP, each on its normed input and added to the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: jnp.dtype) -> None:
        self.config = config

        def each(*names: str) -> list[Float[Array, "..."]]:
            """Every layer's weights of these names as one: side by side."""
            return [
                jnp.concatenate([weights[f"model.layers.{layer}.{name}"] for name in names], dtype=dtype)
                for layer in range(config.num_layers)
            ]

        def linear(*names: str) -> layers.Linear:
            """Projections of one input as one."""
            has_bias = f"model.layers.0.{names[0]}.bias" in weights
            biases = each(*(f"{name}.bias" for name in names)) if has_bias else None
            return layers.Linear(each(*(f"{name}.weight" for name in names)), biases)

        def norm(name: str) -> layers.RMSNorm:
            return layers.RMSNorm(each(f"{name}.weight"), config.rms_norm_eps)

        self.input_norm = norm("input_layernorm")
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.o = linear("self_attn.o_proj")
        self.post_attention_norm = norm("post_attention_layernorm")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        layer: layers.Layer,
        cos: Float[Array, "num_tokens 1 half_dim"],
        sin: Float[Array, "num_tokens 1 half_dim"],
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        c, dtype = self.config, x.dtype
        num_heads = c.num_q_heads + 2 * c.num_kv_heads
        qkv = self.qkv(self.input_norm(x, layer), layer).reshape(x.shape[0], num_heads, c.head_dim)
        qk, v = jnp.split(qkv, [c.num_q_heads + c.num_kv_heads], axis=1)
        q, k = jnp.split(layers.apply_rope(qk, cos, sin).astype(dtype), [c.num_q_heads], axis=1)
        attended, cache = attend(
            cache,
            layer,
            q,
            k,
            v.astype(dtype),
            batch,
            scale=c.head_dim**-0.5,
            sliding_window=c.sliding_window,
        )
        x = x + self.o(attended.reshape(x.shape[0], -1), layer).astype(dtype)

        gate, up = jnp.split(self.gate_up(self.post_attention_norm(x, layer), layer), 2, axis=-1)
        x = x + self.down((jax.nn.silu(gate) * up).astype(dtype), layer).astype(dtype)
        return x, cache


def unembedding_name(config: ModelConfig) -> str:
    """Whose table gives the logits."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight this model has, as Hugging Face names them."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, shape, has_bias in (
            ("self_attn.q_proj", (q, hidden), config.attention_bias),
            ("self_attn.k_proj", (kv, hidden), config.attention_bias),
            ("self_attn.v_proj", (kv, hidden), config.attention_bias),
            ("self_attn.o_proj", (hidden, q), config.attention_bias),
            ("mlp.gate_proj", (mlp, hidden), config.mlp_bias),
            ("mlp.up_proj", (mlp, hidden), config.mlp_bias),
            ("mlp.down_proj", (hidden, mlp), config.mlp_bias),
        ):
            yield f"{prefix}.{name}.weight", shape
            if has_bias:
                yield f"{prefix}.{name}.bias", shape[:1]
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def abstract(config: ModelConfig, dtype: jnp.dtype) -> Llama:
    """The model with shapes for arrays."""

    def build() -> Llama:
        weights: dict[str, Any] = {name: jnp.zeros(shape, dtype) for name, shape in weight_shapes(config)}
        return Llama(config, weights, dtype)

    model: Llama = nnx.eval_shape(build)
    return model


def check_weights(config: ModelConfig, weights: Weights) -> None:
    """Refuse weights that are not the config's: one missing, too many, of another shape or type, or not
    finite.
    """
    shapes = dict(weight_shapes(config))
    for name, shape in shapes.items():
        if name not in weights:
            raise InputError(f"the weights lack {name!r}, which the model config asks for")
        weight = weights[name]
        if tuple(weight.shape) != shape:
            raise InputError(f"weight {name!r} has shape {tuple(weight.shape)}, must be {shape}")
        if weight.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
            raise InputError(
                f"weight {name!r} has type {weight.dtype.name}, must be float32, bfloat16 or float16: "
                "quantised weights are not supported yet"
            )
        if not _is_finite(np.asarray(weight)):
            raise InputError(f"weight {name!r} has NaN or infinity in it, must be finite")
    for name in weights:
        # Tables that old files have beside the weights, and a head that is tied, which some files repeat.
        is_spare = name.endswith("rotary_emb.inv_freq") or (
            config.tie_word_embeddings and name == "lm_head.weight"
        )
        if name not in shapes and not is_spare:
            raise InputError(
                f"weight {name!r} is none that the model config asks for: the model is another one"
            )


def _is_finite(weight: np.ndarray) -> bool:
    """Without a copy of the weight's size: it may be a large one."""
    flat = weight.reshape(-1)
    if (
        weight.dtype.name == "bfloat16"
    ):  # NumPy has no arithmetic of its own for it: look for exponents of ones
        bits = flat.view(np.uint16)
        return not any(np.any((bits[i : i + _CHUNK] & 0x7F80) == 0x7F80) for i in range(0, bits.size, _CHUNK))
    return all(bool(np.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, flat.size, _CHUNK))


_CHUNK = 1 << 18  # numbers looked at together: what fits a processor's cache


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights that keep activations near 1 in size: for tests and for benchmarks of shapes."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        return noise * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)

    return {name: draw(name, shape) for name, shape in weight_shapes(config)}
