"""Filters of sampling: the tokens that min_p, top_k and top_p leave of each row."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jaxpaged import row_sums
from jaxpaged.sampling_state import SamplingState

# Sums over a vocabulary add its halves to each other. So many divide it without a remainder.
WHOLE = 128


def filtered(
    logits: Float[Array, "rows vocab"], largest: Float[Array, " rows"], options: SamplingState
) -> Float[Array, "rows vocab"]:
    """Return logits whose `softmax` is the distribution that sampling rows draw from: divided by the
    temperature, and without the excluded tokens.

    Logits are taken relative to the row's largest, so that a small temperature gives minus infinity at worst.
    """
    samples = options.temperature > 0
    scaled = (logits - largest[:, None]) / jnp.where(samples, options.temperature, 1)[:, None]
    filters = samples & ((options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0))
    return lax.cond(jnp.any(filters), lambda: filter_rows(scaled, options), lambda: scaled)


def filter_rows(scaled: Float[Array, "rows vocab"], options: SamplingState) -> Float[Array, "rows vocab"]:
    """Replace by minus infinity what min_p, then top_k, then top_p exclude. The likeliest token, 0 in
    `scaled`, stays.

    Ties at the last place kept are broken by token id, the lower one first. Nothing is sorted.
    """
    vocab = scaled.shape[1]
    scaled = jnp.pad(scaled, ((0, 0), (0, -vocab % WHOLE)), constant_values=-jnp.inf)  # they rank last
    keys = ordered(scaled)
    everything = jnp.ones(scaled.shape, bool)

    def among_top_k() -> Bool[Array, "rows vocab"]:
        top_k = jnp.where(options.top_k == 0, vocab, options.top_k)
        return _ranked_before(keys, jnp.ones(scaled.shape, jnp.int32), top_k)

    def within_top_p(keep: Bool[Array, "rows vocab"]) -> Bool[Array, "rows vocab"]:
        probability = row_sums.softmax(jnp.where(keep, scaled, -jnp.inf))
        # Sums are rounded, and may reach 1 before the end: but 1 keeps all.
        return keep & (_ranked_before(keys, probability, options.top_p) | (options.top_p >= 1)[:, None])

    keep = jnp.exp(scaled) >= options.min_p[:, None]
    keep &= lax.cond(jnp.any(options.top_k > 0), among_top_k, lambda: everything)
    keep = lax.cond(jnp.any(options.top_p < 1), within_top_p, lambda keep: keep, keep)
    return jnp.where(keep, scaled, -jnp.inf)[:, :vocab]


def ordered(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Map float32 to int32 of the same order: negative numbers have all bits but the sign inverted; both
    zeros are 0.
    """
    bits = jnp.where(x == 0, 0, lax.bitcast_convert_type(x, jnp.int32))
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _ranked_before(
    keys: Int[Array, "rows vocab"], weights: Num[Array, "rows vocab"], bounds: Num[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """Return, for each row ranked by falling key (equal keys by index), the entries before which the
    weights sum to less than the row's bound. Equal keys must have equal weights.

    The key of the last such entry is found bit by bit, with a sum over the row for each bit.
    """

    def summed(chosen: Bool[Array, "rows vocab"]) -> Num[Array, "rows 1"]:
        terms = jnp.where(chosen, weights, 0)
        is_exact = jnp.issubdtype(terms.dtype, jnp.integer)  # in any order
        return jnp.sum(terms, axis=1, keepdims=True) if is_exact else row_sums.total(terms)

    def reach(least: Int[Array, " rows"]) -> Bool[Array, " rows"]:
        return summed(keys >= least[:, None])[:, 0] >= bounds

    def add_bit(i: Int[Array, ""], last: Int[Array, " rows"]) -> Int[Array, " rows"]:
        higher = last + (jnp.int32(1) << (31 - i))  # the first time past the sign: from the smallest to 0
        return jnp.where(reach(higher), higher, last)

    smallest = jnp.full(keys.shape[:1], jnp.iinfo(jnp.int32).min)
    last = lax.fori_loop(0, 32, add_bit, smallest)[:, None]
    is_last = keys == last

    def first_equals() -> Bool[Array, "rows vocab"]:
        above = summed(keys > last)
        each = jnp.max(jnp.where(is_last, weights, 0), axis=1, keepdims=True)
        num_before = jnp.cumsum(is_last, axis=1, dtype=jnp.int32) - 1
        return is_last & (above + num_before * each < bounds[:, None])

    has_equals = jnp.any(jnp.sum(is_last, axis=1, dtype=jnp.int32) > 1)
    return (keys > last) | lax.cond(has_equals, first_equals, lambda: is_last)
