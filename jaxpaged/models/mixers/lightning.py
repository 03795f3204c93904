"""Lightning attention: MiniMax Text-01 and M1."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged import row_sums
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import linear, times
from jaxpaged.models.mixers import paged
from jaxpaged.models.mixers.description import OnOneDevice, Shape, check_sizes, state_arrays
from jaxpaged.models.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Lightning(OnOneDevice):
    """Lightning attention (Qin and others 2024): linear attention with a constant decay of each head."""

    name: ClassVar[str] = "lightning"
    num_heads: int
    head_dim: int
    log_decays: tuple[tuple[float, ...], ...]  # of each layer with states, a number < 0 for each head
    norm_eps: float = 1e-6
    out_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        check_sizes(self, "num_heads", "head_dim")

    @property
    def kernel_size(self) -> int:
        """Return 1: there is no convolution."""
        return 1

    @property
    def width(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has q, k and v of all heads."""
        return {
            "mixer.in.weight": (3 * self.width, hidden_size),
            "mixer.gate.weight": (self.width, hidden_size),
            "mixer.norm.weight": (self.width,),
            "mixer.out.weight": (hidden_size, self.width),
        }

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.StateBlocks`."""
        return state_arrays(block_size, self.num_heads, self.num_heads, self.head_dim, self.head_dim)


class LightningMixer(nnx.Module):
    """The recurrence of activated q, k and v, a norm of all heads together, and a gate."""

    def __init__(self, weights: Weights, description: Lightning) -> None:
        self.description = description
        self.into, self.gate, self.out = (linear(weights, f"mixer.{name}") for name in ("in", "gate", "out"))
        self.norm = paged.stacked(weights, "norm.weight")

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], cache: KVCache, number: int, batch: PassBatch
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        """Compute the state layer of this number. Return its output in float32, and the cache."""
        d, dtype = self.description, x.dtype
        kept, tables = cache.states_of(), paged.tables_of(cache, number, batch)
        qkv = jax.nn.silu(self.into(x, number).astype(dtype).astype(jnp.float32)).astype(dtype)
        qkv = paged.apart(qkv.astype(jnp.float32)).reshape(-1, 3, d.num_heads, d.head_dim)
        log_decay = jnp.broadcast_to(jnp.asarray(d.log_decays[number], jnp.float32), (len(x), d.num_heads))
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        out, new = paged.advance(kept, q, k, v, log_decay, None, tables, batch)
        out = paged.apart(out.reshape(len(x), d.width).astype(dtype).astype(jnp.float32))
        out = (out * lax.rsqrt(row_sums.mean(out * out) + d.norm_eps)).astype(dtype)
        out = out * self.norm[number].astype(dtype)
        gate = jax.nn.sigmoid(self.gate(x, number).astype(dtype))
        return times(self.out((gate * out).astype(dtype), number), d.out_scale), cache.with_states(new)
