"""Means and sums of rows' numbers. A row's bits do not depend on how many rows are computed together.

XLA for CPUs hands a plain sum, or a plain maximum and what is around it, to the library YNNPACK if it reads
`LIBRARY_SIZE` float32 numbers or more. It compiles smaller ones itself, and adds in another order. So the
plain forms give a row other bits in a pass of many tokens than in a decoding step. The reducers here are more
than a plain addition or maximum, and no library takes them. Other platforms compute the plain forms.

Exponentials of numbers that do not fill a vector may still differ in a rare last bit: where 16 does not
divide how many there are.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

LIBRARY_SIZE = 4096  # numbers
INFINITY = np.float32(np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)

type Rows = Float[Array, "*rows features"]
type Numbers = Float[Array, "*rows 1"]


def mean(x: Rows) -> Numbers:
    """Return the means of float32 rows."""
    return total(x) / x.shape[-1]


@jax.custom_jvp
def total(x: Rows) -> Numbers:
    """Return the sums of float32 rows."""
    return lax.platform_dependent(x, cpu=_total, default=_plain_total)


@total.defjvp
def _total_jvp(primals: tuple[Rows], tangents: tuple[Rows]) -> tuple[Numbers, Numbers]:
    return total(*primals), _plain_total(*tangents)


@jax.custom_jvp
def logsumexp(x: Rows) -> Numbers:
    """Return the logarithms of the sums of float32 rows' exponentials."""
    if x.shape[-1] >= LIBRARY_SIZE:  # the library computes it for any number of rows
        return _plain_logsumexp(x)
    return lax.platform_dependent(x, cpu=_logsumexp, default=_plain_logsumexp)


@logsumexp.defjvp
def _logsumexp_jvp(primals: tuple[Rows], tangents: tuple[Rows]) -> tuple[Numbers, Numbers]:
    sums = logsumexp(*primals)
    return sums, _plain_total(jnp.exp(primals[0] - sums) * tangents[0])


def softmax(x: Rows) -> Rows:
    """Return the shares of float32 rows' exponentials."""
    powers = jnp.exp(x - lax.stop_gradient(_largest_of(x)))
    return powers / total(powers)


def _plain_total(x: Rows) -> Numbers:
    return jnp.sum(x, axis=-1, keepdims=True)


def _plain_logsumexp(x: Rows) -> Numbers:
    return jax.nn.logsumexp(x, axis=-1, keepdims=True)


def _largest_of(x: Rows) -> Numbers:
    return lax.platform_dependent(x, cpu=_largest, default=lambda x: jnp.max(x, axis=-1, keepdims=True))


def _logsumexp(x: Rows) -> Numbers:
    largest = _largest(x)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    return largest + jnp.log(_total(jnp.exp(x - largest)))


def _total(x: Rows) -> Numbers:
    return _reduced(x, np.float32(0), lax.add)


def _largest(x: Rows) -> Numbers:
    return _reduced(x, -INFINITY, lax.max)


def _reduced(x: Rows, start: np.float32, combine: Callable[[Array, Array], Array]) -> Numbers:
    """Reduce rows: halves with each other three times, which vectors do, then the numbers left in turn."""
    for _ in range(3):
        if x.shape[-1] % 2 or x.shape[-1] <= 16:
            break
        x = combine(*jnp.split(x, 2, axis=-1))

    def opaque(total: Array, number: Array) -> Array:
        return combine(lax.clamp(-INFINITY, total, INFINITY), number)

    return lax.reduce(x, start, opaque, (x.ndim - 1,))[..., None]


def rounded(product: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return a finite product as it is, kept apart from a sum behind it.

    As one instruction the two would have other bits, and it depends on the program whether they are one: on
    the sizes of its arrays, for one.
    """
    return lax.clamp(-LARGEST, product, LARGEST)


def tree_sum(summands: Sequence[Float[Array, "*n"]]) -> Float[Array, "*n"]:
    """Return the sum of the first half and of the second, made likewise; of an odd number from left to right.

    So the sums of 2, 4, ... equal runs of the summands, added up in the same way, give the same bits.
    """
    half, is_odd = divmod(len(summands), 2)
    if is_odd:
        return functools.reduce(operator.add, summands)
    return tree_sum(summands[:half]) + tree_sum(summands[half:])
