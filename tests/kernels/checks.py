"""Helpers that run a case through an operation and compare it with the oracle. They need no test packages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.research.verify.cases.decode import DecodeCase, make_inputs
from jaxpaged.research.verify.cases.frame import AttentionCase, oracle
from pallas_kernels import ops
from pallas_kernels.ops import choice
from pallas_kernels.ops.checks import check_attention
from pallas_kernels.support import Arrays, BlockSparse

# One jit for all cases, so that those of one shape with the same options share a program.
STATIC = (
    "scale", "sliding_window", "attention_chunk", "soft_cap", "block_sparse", "kv_layout",
    "partition_size", "implementation", "interpret",
)  # fmt: skip
OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "decode": ops.paged_attention,
    "v1": ops.paged_attention_v1,
    "v2": ops.paged_attention_v2,
}
PROGRAMS = {version: jax.jit(operation, static_argnames=STATIC) for version, operation in OPERATIONS.items()}
TILES = jax.jit(
    ops.tiled_paged_attention,
    static_argnames=(
        *("scale", "sliding_window", "attention_chunk", "soft_cap"),
        *("implementation", "interpret"),
    ),
)


def inputs(c: DecodeCase, version: str = "v1") -> tuple[dict[str, jax.Array], Any]:
    """Return the case's arrays on the device, and its options for one of OPERATIONS."""
    options = c.options
    if sparse := options.pop("block_sparse", None):
        options["block_sparse"] = BlockSparse(*sparse)
    if version == "v2":
        options["partition_size"] = max(c.partition_size, c.block_size)
    return {name: jnp.asarray(a) for name, a in make_inputs(c).items()}, options


def is_served(c: DecodeCase) -> bool:
    """Return whether the support table lets the kernels run the case."""
    named, options = inputs(c)
    arrays = Arrays(**named)
    try:
        choice.for_attention("mosaic_gpu", *check_attention(arrays, options), interpret=False)
    except NotImplementedError:
        return False
    return True


def weights_dtype(c: AttentionCase) -> str:
    """Return the type in which the kernels hold the weights."""
    return "float16" if c.is_quantised else c.dtype


def worst(
    c: AttentionCase, got: np.ndarray, weights: str | None = None
) -> tuple[float, float, tuple[int, ...]]:
    """Return the largest error compared with what is allowed there, that bound, and the index.

    A NaN counts as infinite. weights: data type of the softmax weights; None: the kernels' own.
    """
    error, allowed = c.errors(got, weights or weights_dtype(c))
    at = np.unravel_index(np.argmax(error / allowed), got.shape)
    return float(error[at]), float(allowed[at]), tuple(map(int, at))


def assert_close(c: AttentionCase, got: np.ndarray, weights: str | None = None) -> None:
    """Assert that the result is within the case's bounds of the oracle everywhere."""
    error, allowed, at = worst(c, got, weights)
    assert error <= allowed, f"{error=:.3g} > {allowed=:.3g} at {at}: {got[at]=} {oracle(c)[0][at]=}"
