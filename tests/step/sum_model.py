"""A model whose next token is the sum of all it reads from the cache, and its oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch, attend
from jaxpaged.models.config import LayerKind
from jaxpaged.sampling import score
from reference import engine_state as reference
from reference import sampler

VOCAB = 13


# Behind a sum of tokens, modulo VOCAB, each token's logit: that of the sum itself is the largest.
DRAFTED = [total + (total % 4 == 0) for total in range(VOCAB - 1)] + [VOCAB - 1]  # of each sum
LOGITS = np.array([[-((v - total) * 5 % VOCAB) / 4 for v in range(VOCAB)] for total in range(VOCAB)])


class SumModel(nnx.Module):
    """Model whose likeliest next token is the sum of all visible tokens, read from the cache, modulo
    VOCAB. Of several groups of layers each is a layer, and their sums are added.
    """

    hidden_size = VOCAB
    dtype = jnp.dtype("float32")

    def __init__(self, specs: tuple[CacheSpec, ...], draft: Any = None) -> None:
        self.specs, self.draft = specs, draft

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, cache: KVCache, batch: PassBatch
    ) -> tuple[jax.Array, KVCache]:
        value = jnp.broadcast_to(token_ids[:, None, None], (token_ids.shape[0], 1, 2)).astype(jnp.float32)
        zero = jnp.zeros_like(value)
        kinds = [kind_of(spec) for spec in self.specs]
        total = jnp.zeros_like(positions)
        for layer, spec in enumerate(self.specs):
            mean, cache = attend(cache, layer, zero, zero, value, batch, scale=1.0, kinds=kinds)
            num_seen = positions + 1 - spec.first_read(positions)
            num_seen += jnp.minimum(spec.first_tokens, spec.first_read(positions))
            total += jnp.round(mean[:, 0, 0] * num_seen).astype(jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB), cache

    def tapped(self, *args: Any) -> tuple[jax.Array, list[jax.Array], KVCache]:
        hidden, cache = self(*args[:4])
        return hidden, [], cache

    def rows_of(self, token_ids: jax.Array) -> jax.Array:
        return jax.nn.one_hot(token_ids, VOCAB)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ jnp.asarray(LOGITS, jnp.float32)


class SumDraft(SumModel):
    """Model that drafts: it is right but for some sums."""

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        return len(self.specs), 1, 2

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ jnp.asarray(LOGITS[DRAFTED], jnp.float32)


class SumHead:
    """Head that drafts: it adds the next token to the sum before it. It is right but for some sums."""

    behind, reads_last, cache_sizes = (), True, (1, 1, 2)

    def features(self, hidden: jax.Array, taps: list[jax.Array]) -> jax.Array:
        return hidden

    def embed(self, token_ids: jax.Array, of_model: Any) -> jax.Array:
        return of_model(token_ids)

    def __call__(
        self, embedded: jax.Array, given: jax.Array, positions: jax.Array, cache: KVCache, batch: PassBatch
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        total = jnp.argmax(given, axis=1) + jnp.argmax(embedded, axis=1)
        hidden = jax.nn.one_hot(total % VOCAB, VOCAB)
        return hidden, hidden, cache

    def logits(self, hidden: jax.Array, of_model: Any) -> jax.Array:
        return hidden @ jnp.asarray(LOGITS[DRAFTED], jnp.float32)


def kind_of(spec: CacheSpec) -> LayerKind:
    """Return what bounds the attention of a layer that reads as `spec` says."""
    if spec.first_tokens:
        return LayerKind(own=spec)
    return LayerKind(
        sliding_window=getattr(spec, "window", None), attention_chunk=getattr(spec, "chunk", None)
    )


def total_of(reaches: tuple[reference.Reach, ...], tokens: list[int]) -> int:
    """Return the sum of the visible tokens over all groups, modulo VOCAB."""
    read = (tokens[place] for reach in reaches for place in reach.reads(len(tokens) - 1, len(tokens)))
    return sum(read) % VOCAB


def next_token(
    reaches: tuple[reference.Reach, ...],
    tokens: list[int],
    *,
    prompt_len: int = 0,
    rules: dict[str, Any] | None = None,
    drafts: bool = False,
) -> int:
    """Return the oracle's next token, or that of `SumDraft`; `rules` are what `reference.sampler.edited`
    takes.
    """
    total = total_of(reaches, tokens)
    total = DRAFTED[total] if drafts else total
    logits = sampler.edited(LOGITS[total], tokens[:prompt_len], tokens[prompt_len:], **rules or {})
    return sampler.first_likeliest(logits)


def logprobs_of(reaches: tuple[reference.Reach, ...], tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities behind these tokens as the compiled step makes them, to the bit."""
    return _logprobs()[total_of(reaches, tokens)]


@functools.cache
def _logprobs() -> np.ndarray:
    logits = jnp.asarray(LOGITS, jnp.float32)
    every = jnp.broadcast_to(jnp.arange(VOCAB), (VOCAB, VOCAB))
    rows = [jax.jit(score)(logits, token, jnp.full(VOCAB, -1)).logprob for token in every.T]
    return np.stack([np.asarray(row) for row in rows], axis=1)
