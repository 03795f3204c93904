"""Description of a recurrent mixer: sizes, weights, and what a layer keeps for a block of tokens."""

from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxpaged.checks import check, checked_int

type Shape = tuple[int, ...]
IN_FLOAT32 = ("mixer.a_log", "mixer.d", "mixer.dt_bias")  # roles that are float32 in every model


@runtime_checkable
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

    def divided(self, size: int) -> "Mixer":
        """Return the description of one device's share of so many. Raises `InputError` if there is none."""
        ...

    def sections(self, role: str) -> list[int]:
        """Return the widths of a role's sections, each of which devices divide: of outputs, or of a
        convolution's channels. Empty: each device has all. The inputs of `mixer.out` are divided in any case.
        """
        ...


class OnOneDevice:
    """Base of descriptions whose states one device has whole."""

    name: ClassVar[str]

    def divided(self, size: int) -> Any:
        """Return the whole. Raises `InputError` for several devices."""
        check("tensor_parallel_size", size, f"1 with layers of {self.name}", size == 1)
        return self

    def sections(self, role: str) -> list[int]:
        """Return nothing: one device has all."""
        return []


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


def check_divided(size: int, mixer: Mixer, **numbers: int) -> None:
    """Raise `InputError` unless so many devices can divide each of these numbers of a mixer."""
    for name, number in numbers.items():
        rule = f"a divisor of the {number} {name} of {mixer.name}"
        check("tensor_parallel_size", size, rule, number % size == 0)


def check_sizes(mixer: object, *names: str) -> None:
    """Check that these fields are sizes, which come from files. Raises `InputError`."""
    for name in names:
        checked_int(f"model config: {name} of a mixer", getattr(mixer, name), "an int >= 1", 1)
