"""A decoder in Flax NNX, as its description says: each part is made once, and computed in one place."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.memory import kv_cache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.altup import HALF, AltUp, Laurel, LayerInput, LayerInputs, Streams
from jaxpaged.models.attention import PassBatch, planned
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.experts import ExpertsMLP
from jaxpaged.models.feed_forward import MLP, stack, times
from jaxpaged.models.latent_attention import LatentAttention
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.mixers.registry import mixer_of
from jaxpaged.models.names import Names, layers_with
from jaxpaged.models.norms import Norm, last_norm, norm
from jaxpaged.models.positions import PositionTables, position_tables
from jaxpaged.models.quantised.codes import Quantisation, QuantisedWeight
from jaxpaged.models.self_attention import Attention
from jaxpaged.models.taps import Taps
from jaxpaged.models.weights import AbstractWeights, Weights
from pallas_kernels.layouts import TOKEN_MAJOR, Layout

# Name of the experts that a pass leaves of its tokens, where a step asks for them.
ROUTED_EXPERTS = "routed_experts"


class Decoder(nnx.Module):
    """A decoder made of `weights`, whose dtype is that of the activations, too."""

    def __init__(self, weights: Weights) -> None:
        self.config, self.dtype, self.shards = weights.config, weights.dtype, weights.shards
        self.form = weights.form
        c = self.config
        table = weights.get("embedding.weight")
        assert table is not None
        self.embedding = nnx.Param(layers.on_device(table))
        del table
        positions = weights.get("positions.weight")
        self.positions = None if positions is None else nnx.Param(layers.on_device(positions))
        self.embedding_norm = last_norm(weights, "embedding_norm") if c.embedding_norm else None
        self.streams = Streams(weights) if c.altup is not None else None
        self.layer_inputs = LayerInputs(weights) if c.layer_inputs is not None else None
        self.layers = DecoderLayers(weights)
        self.norm = last_norm(weights, "norm")
        self.draft: Any = None  # a model or a head that drafts for this one, with K and V of its own
        self.lm_head = self._lm_head(weights)

    def _lm_head(self, weights: Weights) -> layers.Linear | None:
        """Make the head's product; None where a tied table serves as it is stored."""
        if not self.config.tie_word_embeddings:
            table = weights.get("lm_head.weight")
        elif layers.is_quantised(self.embedding.get_value()):
            return None
        elif self.form.own == "native":
            table = self.embedding[...]
        else:
            return None
        assert table is not None
        # A packed weight becomes a stack of one array, without another copy.
        bias = weights.get("lm_head.bias")
        assert not isinstance(bias, QuantisedWeight)
        biases = None if bias is None else [bias]
        return layers.Linear([table], biases, form=self.form, together=self.form.own == "native")

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Layers of a cache of the model's own, KV heads and their width."""
        return self.config.cache_sizes

    def create_cache(
        self,
        num_blocks: int,
        block_size: int,
        layout: Layout = TOKEN_MAJOR,
        num_layers: int | None = None,
        heads: tuple[int, int] | None = None,
        num_state_blocks: int | None = None,
    ) -> KVCache:
        """Make a cache of zeros for the model's heads and dtype.

        num_layers: places for layers in a block; None: one for each, and all share one block table.
        heads: KV heads, and their width, of a place; None: the widest. See `ModelConfig.heads_by_size`.
        num_state_blocks: see `kv_cache.with_states`.
        """
        c = self.config
        depth = c.num_kv_layers if num_layers is None else num_layers
        heads = heads or (c.num_kv_heads, c.head_dim)
        if c.latent is not None:
            alone = layout.keys_alone()
            assert alone is not None
            layout = alone
        cache = kv_cache.create(depth, num_blocks, block_size, *heads, self.dtype, layout)
        if c.mixer is None:
            return cache
        arrays = c.mixer.arrays(block_size, jnp.dtype(self.dtype))
        return kv_cache.with_states(cache, arrays, len(c.state_layers), num_state_blocks)

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Return the wanted tokens' hidden states after the last norm, and the cache with all tokens."""
        hidden, _, cache = self.tapped(token_ids, positions, cache, batch, ())
        return hidden, cache

    def tapped(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
        behind: tuple[int, ...],
    ) -> tuple[Float[Array, "num_tokens hidden"], list[Float[Array, "num_tokens hidden"]], KVCache]:
        """Return what a call does, and between the two the hidden states behind so many layers: all tokens'
        but those behind the last layer, of which unwanted ones are undefined.
        """
        # Without biases zero rows stay zero in every layer, and CPU products skip rows of zeros.
        x = jnp.where(batch.is_padding[:, None], 0, self.embed(token_ids, positions))
        inputs = None if self.layer_inputs is None else self.layer_inputs(token_ids, x)
        if self.streams is not None:
            x = self.streams.started(x)
        max_len = batch.block_tables.shape[1] * cache.block_size
        c = self.config.attention_part
        tables = position_tables(c or self.config, positions, max_len)
        if c is not None:
            heads = c.heads_in(cache.num_kv_heads, cache.head_dim)
            batch = planned(batch, cache, c.num_q_heads, c.attention_kinds, c.kv_layers, heads)
        if self.form.own != "native":  # here rows of zeros cost as much as others
            batch = dataclasses.replace(batch, wanted=None)
        taps = Taps.of(behind, x)
        if batch.adapters is None:
            x, taps, cache = self._through_layers(x, cache, tables, batch, inputs, taps)
        else:  # adapters cost nothing while no token has one
            # Two conditions in turn: XLA copies the cache if both branches of one condition write to it.
            without = dataclasses.replace(batch, adapters=None)
            has_adapters = jnp.any(batch.adapters > 0)
            for runs, pass_batch in ((has_adapters, batch), (~has_adapters, without)):
                x, taps, cache = lax.cond(
                    runs,
                    lambda x, taps, cache, pass_batch=pass_batch: self._through_layers(
                        x, cache, tables, pass_batch, inputs, taps
                    ),
                    lambda x, taps, cache: (x, taps, cache),
                    *(x, taps, cache),
                )
        if self.streams is not None:
            x = self.streams.joined(x)
        return self.norm(x), [] if taps is None else list(taps.found[: len(behind)]), cache

    def _through_layers(
        self,
        x: Float[Array, "num_tokens *streams hidden"],
        cache: KVCache,
        tables: PositionTables,
        batch: PassBatch,
        inputs: Float[Array, "num_tokens num_layers width"] | None,
        taps: Taps | None,
    ) -> tuple[Float[Array, "num_tokens *streams hidden"], Taps | None, KVCache]:
        count = self.config.num_layers
        if not self.form.loops:
            for layer in range(count):
                taps = taps and taps.noted(x, layer, count)
                x, cache = self.layers(x, cache, layer, tables, batch, inputs)
            return x, taps and taps.noted(x, count, count), cache

        type Carry = tuple[Int[Array, ""], Float[Array, "num_tokens *streams hidden"], Taps | None, KVCache]

        def apply(_: Int[Array, ""], carry: Carry) -> Carry:
            layer, x, taps, cache = carry
            taps = taps and taps.noted(x, layer, count)
            x, cache = self.layers(x, cache, layer, tables, batch, inputs)
            return layer + 1, x, taps, cache

        # The layer's number goes along, and XLA cannot see where it begins: on a GPU, what is read at a place
        # that follows from the loop's own counter is read where the host says, and so in no CUDA graph.
        first = lax.optimization_barrier(jnp.int32(0))
        _, x, taps, cache = lax.fori_loop(0, count, apply, (first, x, taps, cache))
        return x, taps and taps.noted(x, count, count), cache

    def rows_of(self, token_ids: Int[Array, " num_tokens"]) -> Float[Array, "num_tokens hidden"]:
        """Return the tokens' rows of the embedding's table, as they lie there."""
        return layers.look_up(self.embedding.get_value(), token_ids)

    def embed(
        self, token_ids: Int[Array, " num_tokens"], positions: Int[Array, " num_tokens"]
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the tokens' embeddings, with those of positions where the model has a table of them."""
        c, x = self.config, self.rows_of(token_ids)
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions[...][positions + c.position_offset]
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def logits(self, hidden: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens vocab"]:
        """Return the scores of the next token, in float32."""
        c = self.config
        if self.lm_head is None:
            logits = layers.unembed(hidden, self.embedding.get_value())
        else:
            logits = self.lm_head(hidden)
        if self.shards is not None:
            logits = self.shards.joined(logits, c.vocab_size)
        if c.logit_divisor != 1.0:
            logits = logits / c.logit_divisor
        if c.logit_soft_cap is not None:
            logits = layers.soft_capped(logits, c.logit_soft_cap)
        return logits


class DecoderLayers(nnx.Module):
    """All layers, each with the parts that its kind has, normed and added to the residual.

    What mixes tokens comes first: attention, a mixer with a state, or both side by side. A feed-forward part
    comes behind it. A weight is there for the layers that have its part alone (`names.layers_with`), and a
    part counts the layers that have it.
    """

    def __init__(self, weights: Weights) -> None:
        self.config = weights.config
        self.attention_norm = norm(weights, "attention_norm")
        attends = self.config.attention_part is not None
        latent = self.config.latent
        made: Callable[[Weights], Any] = Attention
        if latent is not None:
            made = functools.partial(LatentAttention, latent=latent)
        self.attention: Any = made(weights) if attends else None
        self.mixer: Any = mixer_of(weights)
        self.attention_out_norm = norm(weights, "attention_out_norm")
        self.mlp_norm = norm(weights, "mlp_norm")
        experts, feeds = self.config.experts, bool(self.config.feeding_layers)
        if experts is None:
            self.mlp: Any = MLP(weights) if feeds else None
        else:
            self.mlp = ExpertsMLP(weights, experts)
        self.dense = MLP(weights) if experts is not None and experts.dense_layers else None
        self.mlp_out_norm = norm(weights, "mlp_out_norm")
        has_altup = self.config.altup is not None
        self.altup = AltUp(weights) if has_altup else None
        self.laurel = Laurel(weights) if has_altup else None
        self.input = LayerInput(weights) if self.config.layer_inputs is not None else None
        self.scale = stack(weights, "layer_scale")

    def __call__(
        self,
        x: Float[Array, "num_tokens *streams hidden"],
        cache: KVCache,
        layer: layers.Layer,
        tables: PositionTables,
        batch: PassBatch,
        inputs: Float[Array, "num_tokens num_layers width"] | None = None,
    ) -> tuple[Float[Array, "num_tokens *streams hidden"], KVCache]:
        if self.altup is None:
            x, cache = self._computed(x, cache, layer, tables, batch)
            if self.input is not None and inputs is not None:
                x = x + self.input(x, inputs, layer)
            return x if self.scale is None else x * self.scale[layer].astype(x.dtype), cache
        assert self.input is not None
        assert inputs is not None
        predictions = self.altup.predicted(x, layer)
        computed, cache = self._computed(predictions[:, 0], cache, layer, tables, batch)
        x = self.altup.corrected(predictions, computed, layer)
        added = self.input(self.altup.scaled(x[:, 0], layer), inputs, layer)
        return x.at[:, 1:].add(added[:, None]), cache

    def _computed(
        self,
        x: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        layer: layers.Layer,
        tables: PositionTables,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Return the layer's output: that of its parts, and of the shortcut of a model that has one."""
        whole, batch = batch, batch.in_layer(layer == self.config.num_layers - 1)
        kind, factors = self._kind(layer), self.config.factors
        normed, after = x, x
        if kind.attends or kind.has_state:
            normed = self._normed(x, "attention_norm", layer)
            mixed, cache = self._mixed(normed, cache, layer, tables, batch, whole)
            factor = factors.mixer_residual if kind.has_state else factors.attention_residual
            beside = times(normed if self.config.normed_residual else x, factor)
            after = self._added(beside, mixed, "attention_out_norm", layer)
        if self.laurel is not None:
            after = (after + self.laurel(normed, layer)) * jnp.asarray(HALF, x.dtype)
        if not kind.feeds:
            return after, cache

        given = x if self.config.parallel else after
        given = normed if self.config.shared_norm else self._normed(given, "mlp_norm", layer)
        if batch.wanted is not None:
            given = jnp.where(batch.wanted[:, None], given, 0)
        tells = ROUTED_EXPERTS in cache.values
        out, experts = self._fed_forward(given, after, layer, batch, tells=tells)
        if tells and experts is not None:
            cache = cache.with_value(ROUTED_EXPERTS, layer, experts)
        beside = times(given if self.config.normed_residual else after, factors.mlp_residual)
        return self._added(beside, times(out, factors.down), "mlp_out_norm", layer), cache

    def _normed(
        self, x: Float[Array, "num_tokens hidden"], role: str, layer: layers.Layer
    ) -> Float[Array, "num_tokens hidden"]:
        """Return x by the layer's norm of a role; x itself where the layer has none."""
        norm: Norm | None = getattr(self, role)
        those = layers_with(self.config, role)
        if norm is None or (isinstance(layer, int) and layer not in those):
            return x
        return norm(x, self._number(layer, those))

    def _kind(self, layer: layers.Layer) -> LayerKind:
        """Return the kind of a layer; of a loop's layers, which have the same parts, the first one's."""
        return self.config.layers[layer if isinstance(layer, int) else 0]

    def _number(self, layer: layers.Layer, those: Sequence[int]) -> layers.Layer:
        """Return a layer's number among those that have a part."""
        if len(those) == self.config.num_layers:
            return layer
        assert isinstance(layer, int)
        return those.index(layer)

    def _mixed(
        self,
        x: Float[Array, "num_tokens hidden"],
        cache: KVCache,
        layer: layers.Layer,
        tables: PositionTables,
        batch: PassBatch,
        whole: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Return the output of the layer's attention or mixer, or the sum of both. `whole`: the batch with
        all tokens, for states have those that nobody wants, too.
        """
        c, kind = self.config, self._kind(layer)
        mixed: Float[Array, "num_tokens hidden"] | None = None
        if kind.has_state:
            number = self._number(layer, c.state_layers)
            assert isinstance(number, int)
            mixed, cache = self.mixer(x, cache, number, whole)
            if not kind.attends:
                return mixed, cache
        number = self._number(layer, c.attention_layers)
        attended, cache = self.attention(times(x, c.factors.attention_in), cache, number, tables, batch)
        attended = times(attended, c.factors.attention_out)
        # A sum of rounded numbers: XLA may not add an unrounded product.
        return attended if mixed is None else attended + lax.optimization_barrier(mixed), cache

    def _fed_forward(
        self,
        x: Float[Array, "num_tokens hidden"],
        residual: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
        batch: PassBatch,
        *,
        tells: bool,
    ) -> tuple[Float[Array, "num_tokens hidden"], Int[Array, "num_tokens num_chosen"] | None]:
        """Return the feed-forward part's output, and each token's experts: some layers may have a dense one.

        residual: before its norm, which experts beside a dense part read.
        tells: whether the experts are wanted. A dense part in a loop over layers then gives zeros.
        """
        mlp, dense = self.mlp, self.dense
        if not isinstance(mlp, ExpertsMLP):
            number = self._number(layer, self.config.feeding_layers)
            return mlp(x, number, batch.is_padding, batch.adapters), None
        if mlp.beside is not None:
            if batch.wanted is not None:
                residual = jnp.where(batch.wanted[:, None], residual, 0)
            return mlp(x, layer, batch.is_padding, residual)
        if dense is None:
            return mlp(x, self._number(layer, self.config.feeding_layers), batch.is_padding)
        with_dense, with_experts = (layers_with(self.config, role) for role in ("down", "experts"))
        if isinstance(layer, int):
            if layer in with_dense:
                return dense(x, with_dense.index(layer), batch.is_padding), None
            return mlp(x, with_experts.index(layer), batch.is_padding)
        is_dense = [i in with_dense for i in range(self.config.num_layers)]
        # Of each layer its number among those that are as it is.
        numbers = [
            (with_dense if has_dense else with_experts).index(i) for i, has_dense in enumerate(is_dense)
        ]
        number = jnp.asarray(numbers, jnp.int32)[layer]
        type Found = tuple[Float[Array, "num_tokens hidden"], Int[Array, "num_tokens num_chosen"] | None]

        def by_dense(x: Float[Array, "num_tokens hidden"]) -> Found:
            nothing = jnp.zeros((x.shape[0], mlp.config.num_chosen), jnp.int32)
            return dense(x, number, batch.is_padding), nothing if tells else None

        def by_experts(x: Float[Array, "num_tokens hidden"]) -> Found:
            out, chosen = mlp(x, number, batch.is_padding)
            return out, chosen if tells else None

        return lax.cond(jnp.asarray(is_dense)[layer], by_dense, by_experts, x)

    def _added(
        self,
        x: Float[Array, "num_tokens hidden"],
        out: Float[Array, "num_tokens hidden"],
        out_norm: str,
        layer: layers.Layer,
    ) -> Float[Array, "num_tokens hidden"]:
        """Add the float32 output of attention or feed-forward, normed in this role, to the residual."""
        out = self._normed(out.astype(x.dtype), out_norm, layer)
        scale = self.config.residual_scale
        return x + out if scale == 1.0 else x + out * jnp.asarray(scale, x.dtype)


def abstract(
    config: ModelConfig,
    load_as: LoadAs,
    names: Names | None = None,
    quantisation: Quantisation | None = None,
) -> Decoder:
    """Describe a model by shapes for arrays; the arguments are those of `AbstractWeights`."""
    model: Decoder = nnx.eval_shape(lambda: Decoder(AbstractWeights(config, load_as, names, quantisation)))
    return model
