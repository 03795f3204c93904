"""From logits to tokens, every option batched: one row may be greedy while its neighbour samples."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Each row's options as arrays; see `config.SamplingParams`."""

    temperature: Float[Array, " rows"]  # 0 is greedy
    top_k: Int[Array, " rows"]  # 0 keeps all
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]
    wants_logprobs: Bool[Array, " rows"]

    def take(self, rows: Int[Array, " n"], mask: Bool[Array, " n"]) -> "SamplingState":
        """The options of some rows; those not masked are greedy, which costs nothing."""
        taken = jax.tree.map(lambda option: option[rows], self)
        return replace(
            taken,
            temperature=jnp.where(mask, taken.temperature, 0),
            wants_logprobs=taken.wants_logprobs & mask,
        )


def sample(
    logits: Float[Array, "rows vocab"], options: SamplingState, positions: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """One token a row. The draw of a row depends on its seed and on `positions`, the new token's place, only.

    A batch without a sampling row costs an argmax; one in which no row filters is not sorted.
    """
    greedy = likeliest(logits)
    samples = options.temperature > 0

    def draw() -> Int[Array, " rows"]:
        # What counts is how far a logit is below the largest: of that, a small temperature makes nothing
        # worse than minus infinity.
        below = logits - jnp.max(logits, axis=1, keepdims=True)
        scaled = below / jnp.where(samples, options.temperature, 1)[:, None]
        filters = samples & ((options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0))
        kept = lax.cond(jnp.any(filters), lambda: _filter(scaled, options), lambda: scaled)
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
            options.seed, positions
        )
        drawn = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        return jnp.where(samples, drawn, greedy)

    return lax.cond(jnp.any(samples), draw, lambda: greedy)


def logprobs_of(logits: Float[Array, "rows vocab"], token_ids: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """The natural logarithm of each token's chance in `softmax(logits)`: before temperature and filters."""
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def likeliest(logits: Float[Array, "rows vocab"]) -> Int[Array, " rows"]:
    """The first token with the largest logit: an argmax as two plain reductions, which XLA's CPU code runs
    ten times as fast."""
    vocab = logits.shape[-1]
    is_largest = logits == jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(is_largest, jnp.arange(vocab, dtype=jnp.int32), vocab), axis=-1)
    return jnp.minimum(first, vocab - 1)  # of a row of NaN, where nothing equals the largest


def _filter(scaled: Float[Array, "rows vocab"], options: SamplingState) -> Float[Array, "rows vocab"]:
    """Minus infinity for what top_k, then top_p, then min_p exclude; the likeliest token always stays.

    Ties at the last place kept are broken by token id, the lower one first.
    """
    vocab = scaled.shape[-1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocab)
    top_k = jnp.where(options.top_k == 0, vocab, options.top_k)[:, None]
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Sums are rounded, and may reach 1 before the end: but 1 keeps all.
    keep = (before < options.top_p[:, None]) | (options.top_p[:, None] >= 1)
    keep &= probability >= options.min_p[:, None] * probability[:, :1]
    ranked = jnp.where(keep | (rank == 0), ranked, -jnp.inf)
    rows = jnp.arange(scaled.shape[0])[:, None]
    return jnp.zeros_like(scaled).at[rows, order].set(ranked)
