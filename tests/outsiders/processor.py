"""Logits processors from outside: a bias of one token, and a bar of the token that came last."""

import jax.numpy as jnp

from jaxpaged.contracts import processor


@processor(token=-1, bias=0.0)
def biased(logits, request):
    """Add `bias` to the logit of `token`."""
    is_it = jnp.arange(logits.shape[1]) == request.arguments["token"][:, None]
    return logits + jnp.where(is_it, request.arguments["bias"][:, None], 0)


@processor(never_twice=False, contract=1)
def not_the_last(logits, request):
    """Take away the newest token of prompt and answer."""
    last = jnp.take_along_axis(request.token_ids, request.num_tokens[:, None] - 1, axis=1)
    is_it = jnp.arange(logits.shape[1]) == last
    return jnp.where(is_it & request.arguments["never_twice"][:, None], -jnp.inf, logits)


@processor(nothing=0)
def bars_all(logits, request):
    """Leave no token."""
    return jnp.full_like(logits, -jnp.inf)
