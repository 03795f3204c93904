"""From logits to tokens, every option batched: one row may be greedy while its neighbour samples."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, UInt32


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

    A batch without a sampling row costs an argmax; one in which no row filters, only the draws.
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

    Ties at the last place kept are broken by token id, the lower one first. Nothing is sorted.
    """
    keys = _ordered(scaled)
    everything = jnp.ones(scaled.shape, bool)

    def among_top_k() -> Bool[Array, "rows vocab"]:
        top_k = jnp.where(options.top_k == 0, scaled.shape[1], options.top_k)
        return _ranked_before(keys, jnp.ones(scaled.shape, jnp.int32), top_k)

    def within_top_p() -> Bool[Array, "rows vocab"]:
        # Sums are rounded, and may reach 1 before the end: but 1 keeps all.
        return _ranked_before(keys, probability, options.top_p) | (options.top_p >= 1)[:, None]

    keep = lax.cond(jnp.any(options.top_k > 0), among_top_k, lambda: everything)
    probability = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=1)
    keep &= lax.cond(jnp.any(options.top_p < 1), within_top_p, lambda: everything)
    keep &= probability >= options.min_p[:, None] * jnp.max(probability, axis=1, keepdims=True)
    return jnp.where(keep, scaled, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Float32 as int32 of the same order: the bits of negative numbers, but for the sign, turned over; both
    zeros are 0.
    """
    bits = jnp.where(x == 0, 0, lax.bitcast_convert_type(x, jnp.int32))
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _ranked_before(
    keys: Int[Array, "rows vocab"], weights: Num[Array, "rows vocab"], bounds: Num[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """Of each row ranked by falling key, equal keys by place: those before whom the weights sum to less than
    the bound. Equal keys must have equal weights.

    The key of the last one is found bit by bit, with a sum over the row for each.
    """

    def reach(least: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        return jnp.sum(jnp.where(keys >= least[:, None], weights, 0), axis=1) >= bounds

    def add_bit(i: Int[Array, ""], last: Int[Array, " rows"]) -> Int[Array, " rows"]:
        higher = last + (jnp.int32(1) << (31 - i))  # the first time past the sign: from the smallest to 0
        return jnp.where(reach(higher), higher, last)

    smallest = jnp.full(keys.shape[:1], jnp.iinfo(jnp.int32).min)
    last = lax.fori_loop(0, 32, add_bit, smallest)[:, None]
    is_last = keys == last

    def first_equals() -> Bool[Array, "rows vocab"]:
        above = jnp.sum(jnp.where(keys > last, weights, 0), axis=1, keepdims=True)
        each = jnp.max(jnp.where(is_last, weights, 0), axis=1, keepdims=True)
        num_before = jnp.cumsum(is_last, axis=1, dtype=jnp.int32) - 1
        return is_last & (above + num_before * each < bounds[:, None])

    has_equals = jnp.any(jnp.sum(is_last, axis=1, dtype=jnp.int32) > 1)
    return (keys > last) | lax.cond(has_equals, first_equals, lambda: is_last)
