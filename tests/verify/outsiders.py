"""Others' attention, adapted: JAX's own Pallas kernel for GPUs, and plain PyTorch."""

import functools
import warnings
from typing import Any


def pallas_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any,
    *, soft_cap: float | None = None, k_scale: Any = None, v_scale: Any = None,
) -> Any:  # fmt: skip
    """Compute attention by JAX's own kernel, in Pallas' interpreter."""
    import jax.numpy as jnp

    k, v = (x.transpose(2, 0, 1, 3) for x in (k_cache, v_cache))  # heads come first
    scales = [
        None if s is None else jnp.broadcast_to(jnp.reshape(s, (-1, 1, 1)), k.shape[:3])
        for s in (k_scale, v_scale)
    ]
    q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    return _pallas()(
        q, k, v, block_tables, seq_lens, *scales,
        k_splits=1, pages_per_compute_block=1, attn_logits_soft_cap=soft_cap, interpret=True,
    )  # fmt: skip


@functools.cache
def _pallas() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the module as a whole
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return paged_attention


def torch_attention(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, *, scale: float | None = None
) -> Any:
    """Compute attention in plain PyTorch: gather each row's blocks and call
    `scaled_dot_product_attention`.
    """
    import torch

    out = torch.zeros_like(q)
    for row, length in enumerate(seq_lens.tolist()):
        blocks = block_tables[row, : -(-length // k_cache.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].transpose(0, 1) for x in (k_cache, v_cache))
        if length:
            out[row] = torch.nn.functional.scaled_dot_product_attention(
                q[row, :, None], k, v, scale=scale, enable_gqa=True
            )[:, 0]
    return out
