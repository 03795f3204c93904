"""Description of a recurrent mixer: sizes, weights, and what a layer keeps for a block of tokens."""

from typing import ClassVar, Protocol

import jax.numpy as jnp

from jaxpaged.checks import checked_int

type Shape = tuple[int, ...]
IN_FLOAT32 = ("mixer.a_log", "mixer.d", "mixer.dt_bias")  # roles that are float32 in every model


class Mixer(Protocol):
    """Protocol of a description. Instances are frozen and hashable. Roles begin with `mixer.`."""

    name: ClassVar[str]

    @property
    def kernel_size(self) -> int:
        """Tokens of the short convolution, the newest among them."""
        ...

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role."""
        ...

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return the outputs of each of a role's tensors in a file; None: all have as many."""
        ...

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return shapes and dtypes of what a layer keeps in a block of so many tokens, by name."""
        ...


def state_arrays(
    chunk: int, num_heads: int, num_key_heads: int, k_dim: int, v_dim: int
) -> dict[str, tuple[Shape, jnp.dtype]]:
    """Return the arrays of `ops.states.StateBlocks` in a block of `chunk` tokens, by name."""
    float32 = jnp.dtype("float32")
    return {
        "state": ((num_heads, k_dim, v_dim), float32),
        "k": ((chunk, num_key_heads, k_dim), float32),
        "u": ((chunk, num_heads, v_dim), float32),
        "log_decay": ((chunk, num_heads, 1), float32),
    }


def check_sizes(mixer: object, *names: str) -> None:
    """Check that these fields are sizes, which come from files. Raises `InputError`."""
    for name in names:
        checked_int(f"model config: {name} of a mixer", getattr(mixer, name), "an int >= 1", 1)
