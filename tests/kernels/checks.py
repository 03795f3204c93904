"""Running a case through an operation, and comparing it with the oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ops
from pallas_kernels.support import Arrays, BlockSparse
from reference import attention
from tests.shapes import Case, make_inputs, tolerance


@functools.cache
def oracle(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """The output in float64, and the same mean of the values' magnitudes."""
    arrays, options = make_inputs(c)
    want = attention.paged_attention(**arrays, **options)
    magnitudes = np.abs(arrays["v_cache"].astype(np.float32))
    return want, attention.paged_attention(**arrays | {"v_cache": magnitudes}, **options)


def inputs(c: Case) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The case's arrays on the device and its options as `ops` takes them."""
    arrays, options = make_inputs(c)
    if sparse := options.pop("block_sparse", None):
        options["block_sparse"] = BlockSparse(*sparse)
    return {name: jnp.asarray(a) for name, a in arrays.items()}, options


def is_served(c: Case) -> bool:
    """Whether the support table lets the kernels run the case."""
    named, options = inputs(c)
    arrays = Arrays(**named)
    try:
        ops._choose("mosaic_gpu", False, arrays, ops._check_attention(arrays, options))
    except NotImplementedError:
        return False
    return True


def weights_dtype(c: Case) -> str:
    """The type in which the kernels hold the weights."""
    return "float16" if c.is_quantised else c.dtype


def run(c: Case, version: str, **more: Any) -> np.ndarray:
    """The case through `ops.paged_attention_v1` or `_v2`, jitted, as float64."""
    arrays, options = inputs(c)
    if version == "v2":
        more["partition_size"] = max(c.partition_size, c.block_size)
    operation = getattr(ops, f"paged_attention_{version}")
    return np.asarray(jax.jit(functools.partial(operation, **options, **more))(**arrays), np.float64)


def assert_close(c: Case, got: np.ndarray, weights_dtype: str) -> None:
    """Within `tolerance` of the oracle everywhere; rows without tokens exactly zero."""
    want, mean_abs = oracle(c)
    assert np.isfinite(got).all(), f"{np.argwhere(~np.isfinite(got))[:4]=} of shape {got.shape}"
    allowed = tolerance(c, want, mean_abs, weights_dtype)
    at = np.unravel_index(np.argmax(abs(got - want) / allowed), want.shape)
    error = abs(got - want)[at]
    assert error <= allowed[at], f"{error=:.3g} > {allowed[at]:.3g} at {at}: {got[at]=} {want[at]=}"
    assert (got[np.array(c.seq_lens) == 0] == 0).all()
