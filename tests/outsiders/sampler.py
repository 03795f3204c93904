"""A sampler from outside: the largest logit after noise, among the `top_k` likeliest."""

import jax
import jax.numpy as jnp

from jaxpaged.contracts import keys, sampler


@sampler(options=("top_k",), contract=1)
def with_noise(logits, options, positions):
    """Draw by Gumbel's trick: the noise of a row depends on its seed and position alone."""
    vocab = logits.shape[1]
    rank = jnp.sum(logits[:, None, :] > logits[:, :, None], axis=2)
    kept = (options.top_k[:, None] == 0) | (rank < options.top_k[:, None])
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,)))(keys(options, positions))
    scaled = logits / jnp.where(options.temperature > 0, options.temperature, 1)[:, None]
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=1).astype(jnp.int32)


@sampler(contract=1)
def always_seven(logits, options, positions):
    """Choose token 7."""
    return jnp.full(positions.shape, 7, jnp.int32)


@sampler(contract=1)
def out_of_range(logits, options, positions):
    """Choose a token that is not in the vocabulary."""
    return jnp.full(positions.shape, logits.shape[1], jnp.int32)
