"""A head that drafts, in Flax NNX: see `DraftHead`."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.memory import features, kv_cache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import PassBatch, planned
from jaxpaged.models.decoder import DecoderLayers
from jaxpaged.models.feed_forward import MLP
from jaxpaged.models.norms import last_norm
from jaxpaged.models.positions import PositionTables, position_tables
from jaxpaged.models.weights import Weights
from pallas_kernels.layouts import TOKEN_MAJOR, Layout


class Head(nnx.Module):
    """A head that drafts, made of `weights`.

    targets: the token of the model's vocabulary that each of the head's choices is; None: they are the same.
    """

    def __init__(self, weights: Weights, targets: np.ndarray | None = None) -> None:
        c, form = weights.config, weights.form
        assert c.draft_head is not None
        self.config, self.kind, self.dtype = c, c.draft_head, weights.dtype
        together = form.own == "native"  # a packed weight becomes a stack of one array

        def product(role: str) -> layers.Linear | None:
            weight = weights.get(f"{role}.weight")
            return None if weight is None else layers.Linear([weight], form=form, together=together)

        table = weights.get("embedding.weight")
        self.embedding = None if table is None else nnx.Param(layers.on_device(table))
        self.fuse = product("fuse")
        self.fuse_norm = last_norm(weights, "fuse_norm") if self.kind.fuse_norm else None
        self.embedded_norm = last_norm(weights, "embedded_norm") if self.kind.kind == "mtp" else None
        self.hidden_norm = last_norm(weights, "hidden_norm")
        self.layers = DecoderLayers(weights)
        self.norm = last_norm(weights, "norm")
        self.lm_head = product("lm_head")
        self.targets = None if targets is None else nnx.Param(jnp.asarray(targets, jnp.int32))

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def behind(self) -> tuple[int, ...]:
        """Numbers of the served model's layers behind which features are read; none: behind its last norm."""
        return self.kind.behind

    @property
    def reads_last(self) -> bool:
        """Whether features come out of the served model's last layer: then it computes all tokens there."""
        return self.kind.reads_last

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Layers of the head's cache, KV heads and their width."""
        return self.config.cache_sizes

    def create_cache(self, num_blocks: int, block_size: int, layout: Layout = TOKEN_MAJOR) -> KVCache:
        """Make a cache of zeros for the head's K and V, and for the features that it reads."""
        sizes = self.config.num_kv_heads, self.config.head_dim
        made = kv_cache.create(1, num_blocks, block_size, *sizes, self.dtype, layout)
        return features.beside(made, self.hidden_size)

    def features(
        self, hidden: Float[Array, "num_tokens given"], taps: Sequence[Float[Array, "num_tokens given"]]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the features of tokens: of hidden states behind the last norm, or behind `behind` layers."""
        if self.kind.kind == "mtp":
            return hidden
        together = jnp.concatenate(taps, axis=-1)
        if self.fuse_norm is not None:
            together = self.fuse_norm(together)
        assert self.fuse is not None
        return self.fuse(together).astype(self.dtype)

    def embed(
        self,
        token_ids: Int[Array, " num_tokens"],
        of_model: Callable[[Int[Array, " num_tokens"]], Float[Array, "num_tokens hidden"]],
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the tokens' embeddings, by the head's table or the model's."""
        if self.embedding is None:
            return of_model(token_ids)
        return layers.look_up(self.embedding.get_value(), token_ids)

    def __call__(
        self,
        embedded: Float[Array, "num_tokens hidden"],
        given: Float[Array, "num_tokens hidden"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"], KVCache]:
        """Return the hidden states behind the last norm, the head's own features, and the cache.

        embedded: of the token behind each position. given: the features there.
        """
        c, head = self.config, self.kind
        embedded, given = (jnp.where(batch.is_padding[:, None], 0, x) for x in (embedded, given))
        tables = position_tables(c, positions, batch.block_tables.shape[1] * cache.block_size)
        batch = planned(batch, cache, c.num_q_heads, c.attention_kinds, c.kv_layers, ())
        if self.embedded_norm is None:
            normed = self.hidden_norm(given)
            residual = normed if head.norm_before_residual else given
            x, cache = self._beside(embedded, normed, residual, cache, batch, tables)
        else:
            embedded = jnp.where(positions[:, None] == 0, 0, embedded)  # as vLLM has it
            both = [self.embedded_norm(embedded), self.hidden_norm(given)]
            assert self.fuse is not None
            x = self.fuse(jnp.concatenate(both, axis=-1)).astype(self.dtype)
            x, cache = self.layers(x, cache, 0, tables, batch)
        hidden = self.norm(x)
        return hidden, hidden if head.hands_normed else x, cache

    def _beside(
        self,
        embedded: Float[Array, "num_tokens hidden"],
        normed: Float[Array, "num_tokens hidden"],
        residual: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        batch: PassBatch,
        tables: PositionTables,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Return the output of a layer whose attention reads embeddings and features side by side."""
        layer_parts = self.layers
        assert layer_parts.attention_norm is not None
        assert layer_parts.mlp_norm is not None
        assert isinstance(layer_parts.mlp, MLP)
        both = jnp.concatenate([layer_parts.attention_norm(embedded, 0), normed], axis=-1)
        attended, cache = layer_parts.attention(both, cache, 0, tables, batch)
        x = residual + attended.astype(residual.dtype)
        out = layer_parts.mlp(layer_parts.mlp_norm(x, 0), 0, batch.is_padding)
        return x + out.astype(x.dtype), cache

    def logits(
        self,
        hidden: Float[Array, "num_tokens hidden"],
        of_model: Callable[[Float[Array, "num_tokens hidden"]], Float[Array, "num_tokens vocab"]],
    ) -> Float[Array, "num_tokens vocab"]:
        """Return the scores of the model's tokens, in float32; -inf for those that it does not choose."""
        if self.lm_head is None:
            return of_model(hidden)
        logits = self.lm_head(hidden)
        if self.targets is None:
            return logits
        nothing = jnp.full((hidden.shape[0], self.config.vocab_size), -jnp.inf, logits.dtype)
        return nothing.at[:, self.targets[...]].set(logits)
