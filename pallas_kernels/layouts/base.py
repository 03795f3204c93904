"""The base of layouts: how the K and V of one layer lie in arrays of blocks.

A layout is a frozen value that three methods define: `arrays`, `write` and `read`. A block is one line of
each array, so copying, swapping and counting bytes follow. `view` is for the kernels: where a token's head
has its numbers side by side, `view` gives their location, and kernels read them there. XLA reads whole blocks
of any other layout with `read`.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Mapping[str, jax.Array]


class Sizes(NamedTuple):
    """The sizes of a pool of blocks."""

    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int


class Location(NamedTuple):
    """The location of a token's head in an array: the array's name, and what each of its leading axes counts.

    An axis is "block", "token" (of the block), "head", or a number, the only index along it. An axis behind
    these has the head's numbers side by side; without one there is a single number.
    """

    array: str
    axes: tuple[str | int, ...]

    def at(self, block: Any, token: Any, head: Any) -> tuple[Any, ...]:
        """Return the index of these tokens of a block, for `ref.at` or an array."""
        values = {"block": block, "token": token, "head": head}
        return tuple(values.get(axis, axis) if isinstance(axis, str) else axis for axis in self.axes)

    def strides(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the elements from one "block", "token" and "head" to the next, and from the array's start to
        the "first".
        """
        strides = {"block": 0, "token": 0, "head": 0, "first": 0}
        for i, axis in enumerate(self.axes):
            elements = math.prod(shape[i + 1 :])
            if isinstance(axis, str):
                strides[axis] = elements
            else:
                strides["first"] += axis * elements
        return strides

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """Return the sizes of the pool that an array of this shape holds."""
        size_of = {axis: size for axis, size in zip(self.axes, shape, strict=False) if isinstance(axis, str)}
        return Sizes(size_of["block"], size_of.get("token", 1), size_of["head"], shape[-1])


class View(NamedTuple):
    """The locations of K and V, as kernels read a layout."""

    k: Location
    v: Location
    # Factors of the stored numbers, float32; None if there are none, or one for all tokens of a head
    # (`Layout.scales`).
    k_scale: Location | None = None
    v_scale: Location | None = None
    numbers: jnp.dtype | None = None  # the type of numbers that the arrays store as uint8


class PackedView(NamedTuple):
    """The locations in a layout of 4 bits a number, as kernels read it: a number is code * scale + zero, in
    bfloat16.

    Scales and zeros of K are for a channel of `group` tokens: in their locations axis "token" counts groups.
    Those of V are for a token. A byte of a head has the codes of channels d and d + head_dim / 2, the first
    in its low bits. The newest group of a block, `new_group` (int32, -1 for none), has its K in `k_new`, in
    the type of the computation; only the last block of a sequence has one.
    """

    group: int  # tokens; block_size is a multiple
    k: Location
    k_scale: Location
    k_zero: Location
    k_new: Location
    new_group: Location
    v: Location
    v_scale: Location
    v_zero: Location


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """The base of all layouts. One with fields must be hashable: programs are compiled for a layout."""

    # The version of the contract that the layout is written for (docs/research/contracts.md).
    contract: ClassVar[int] = 1
    # The value of `kv_cache_dtype` that also names the layout's numbers; None if there is none.
    cache_dtype: ClassVar[str | None] = None
    # The largest error of a number that is read, as a share of the largest number written. None: a number is
    # read as it was written, in the computation's type. A test holds it to at most 16 times the error.
    tolerance: ClassVar[float | None] = None
    # Whether an engine's arrays are [num_layers, num_blocks, ...] rather than [num_blocks, num_layers, ...].
    layers_apart: ClassVar[bool] = False

    @abc.abstractmethod
    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of one layer, by name: each begins with num_blocks. dtype is that of the
        computation.
        """

    @abc.abstractmethod
    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the arrays with new tokens in their slots: slot = block * block_size + offset.

        k, v: [num_tokens, num_kv_heads, head_dim], at least two tokens.
        slots: [num_tokens] int32, in range.

        Tokens of a sequence come in their order, those of one call next to each other. Slots are distinct,
        but a token may be there twice. Tokens written to block 0 are padding and never read.
        """

    @abc.abstractmethod
    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        """Return K and V of blocks, each [*n, block_size, num_kv_heads, head_dim] in that dtype.

        block_ids: [*n] int32, in range. Slots that were never written hold anything.
        """

    def shared(self, num_kv_heads: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a layer that belong to no block. They start as zeros; `write` and `read` get
        them too.
        """
        return {}

    def on_several(self) -> "Layout":
        """Return the form for devices that each hold some of the kv heads. They run one program, so what this
        layout has for each head must be in `shared`.
        """
        return self

    def given(self, num_kv_heads: int, device: int = 0, num_devices: int = 1) -> dict[str, np.ndarray]:
        """Return the first values of `shared` arrays that do not start as zeros.

        num_kv_heads: of this device, one of `num_devices`. Neighbouring devices share a head where there are
            fewer heads than devices.
        """
        return {}

    def scales(self, arrays: Arrays, sizes: Sizes) -> tuple[jax.Array, jax.Array] | None:
        """Return factors of a view's numbers of K and of V, float32 [num_kv_heads] each; None if there are
        none.
        """
        return None

    def view(self) -> View | None:
        """Return where kernels find K and V; None if only XLA can read the layout."""
        return None

    def packed_view(self) -> PackedView | None:
        """Return where kernels find K and V in 4 bits; None if they are stored otherwise."""
        return None

    def on(self, platform: str) -> "Layout":
        """Return the form that suits a platform, such as "cpu" or "gpu": it holds the same numbers."""
        return self

    def keys_alone(self) -> "Layout | None":
        """Return the layout's form for latent attention, whose values are a part of its keys. None if there
        is none.
        """
        return None

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        """Return the rule that such blocks break, such as "block_size must be 1"; None if they break none."""
        return None

    def why_not_heads(self, num_kv_heads: int) -> str | None:
        """Return the rule that a model with so many kv heads breaks; None if it breaks none."""
        return None

    def block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        """Return the bytes of one layer of a block."""
        specs = self.arrays(1, block_size, num_kv_heads, head_dim, dtype).values()
        return sum(spec.size * jnp.dtype(spec.dtype).itemsize for spec in specs)

    def __str__(self) -> str:
        """Return the class's name in snake case."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSlice:
    """A slice of the arrays' blocks, such as a layer's: its block i is block first + i * stride of the
    arrays.
    """

    first: jax.Array  # [] int32
    stride: int = dataclasses.field(metadata={"static": True})
    num_blocks: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """The blocks of a cache in some layout, which operations take in place of an array of K and one of V."""

    arrays: dict[str, jax.Array]
    layout: Layout = dataclasses.field(metadata={"static": True})
    sizes: Sizes = dataclasses.field(metadata={"static": True})  # of the arrays
    blocks: BlockSlice | None = None  # which of the arrays' blocks ids and slots name; None: all

    @property
    def num_blocks(self) -> int:
        """The number of blocks that block ids can name."""
        return self.sizes.num_blocks if self.blocks is None else self.blocks.num_blocks

    def array_blocks(self, block_ids: jax.Array) -> jax.Array:
        """Return the blocks of the arrays that these block ids name."""
        return block_ids if self.blocks is None else self.blocks.first + block_ids * self.blocks.stride

    def read(self, block_ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """See `Layout.read`."""
        return self.layout.read(self.arrays, self.sizes, self.array_blocks(block_ids), dtype)

    @property
    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """See `Layout.scales`."""
        return self.layout.scales(self.arrays, self.sizes)


def create(
    layout: Layout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> Pool:
    """Return a pool of zeros for one layer. Raise ValueError for sizes that the layout does not support."""
    check(layout, block_size, head_dim, dtype)
    sizes = Sizes(num_blocks, block_size, num_kv_heads, head_dim)
    specs = layout.arrays(*sizes, dtype) | layout.shared(num_kv_heads)
    return Pool({name: jnp.zeros(s.shape, s.dtype) for name, s in specs.items()}, layout, sizes)


def check(layout: Layout, block_size: int, head_dim: int, dtype: jnp.dtype) -> None:
    """Raise ValueError if the layout does not support blocks of such sizes."""
    if rule := layout.why_not(block_size, head_dim, dtype):
        raise ValueError(f"{rule}, not {block_size=} with {head_dim=}, for kv_layout={layout}")
