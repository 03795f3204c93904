"""What a layout is: how the K and V of one layer lie in arrays of blocks.

A layout is a frozen value with three methods that say all of it, `arrays`, `write` and `read`. A block is one
line of each array, so that copying, swapping and counting bytes follow. `view` is for the kernels: where a
layout can say at which place the numbers of a token's head lie next to each other, they read it themselves;
of any other XLA reads whole blocks by `read`.
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
    """Where something of a token's head lies: an array, and what each of its leading axes counts.

    An axis is "block", "token" (of the block), "head", or a number, the only place along it. An axis behind
    these has the head's numbers side by side; without one there is a single number.
    """

    array: str
    axes: tuple[str | int, ...]

    def at(self, block: Any, token: Any, head: Any) -> tuple[Any, ...]:
        """The index of these tokens of a block, for `ref.at` or an array."""
        values = {"block": block, "token": token, "head": head}
        return tuple(values.get(axis, axis) if isinstance(axis, str) else axis for axis in self.axes)

    def strides(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Elements from one block, token and head to the next, and from the array's begin to the first."""
        found = {"block": 0, "token": 0, "head": 0, "first": 0}
        for i, axis in enumerate(self.axes):
            elements = math.prod(shape[i + 1 :])
            if isinstance(axis, str):
                found[axis] = elements
            else:
                found["first"] += axis * elements
        return found

    def sizes(self, shape: tuple[int, ...]) -> Sizes:
        """The sizes of the pool that the array holds."""
        found = {axis: size for axis, size in zip(self.axes, shape, strict=False) if isinstance(axis, str)}
        return Sizes(found["block"], found.get("token", 1), found["head"], shape[-1])


class View(NamedTuple):
    """A layout as kernels read it."""

    k: Location
    v: Location
    # Factors of the stored numbers, float32; None: there are none, or a head has one for all
    # (`Layout.scales`).
    k_scale: Location | None = None
    v_scale: Location | None = None
    numbers: jnp.dtype | None = None  # what the bytes are, where the arrays have them as uint8


class PackedView(NamedTuple):
    """A layout of 4 bits a number as kernels read it: each is code * scale + zero, in bfloat16.

    Those of K are for a channel of `group` tokens, those of V for a token; axis "token" counts groups in the
    places of the former. A byte of a head has the codes of channels d and d + head_dim / 2, the first in its
    low bits. Of a block's group `new_group` (int32, -1 for none) K is in `k_new`, in the type of the
    computation; of a sequence's blocks only the last has one.
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
    """Base of all layouts. What has fields of its own must be hashable: programs are compiled for a
    layout.
    """

    # What `kv_cache_dtype` calls its numbers, if they are not those of the computation.
    cache_dtype: ClassVar[str | None] = None
    # Whether an engine keeps a layer's blocks together, [num_layers, num_blocks, ...], in place of a block's
    # layers.
    layers_apart: ClassVar[bool] = False

    @abc.abstractmethod
    def arrays(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of one layer, by name: each begins with num_blocks. dtype is that of the computation."""

    @abc.abstractmethod
    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        """The arrays with new tokens in their slots: slot = block * block_size + offset.

        k, v: [num_tokens, num_kv_heads, head_dim], at least two tokens; slots: [num_tokens] int32, in range.
        Tokens of a sequence come in their order, those of one call next to each other. Slots are distinct,
        but a token may be there twice, and what goes to block 0, where nobody looks, is padding.
        """

    @abc.abstractmethod
    def read(
        self, arrays: Arrays, sizes: Sizes, block_ids: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, jax.Array]:
        """K and V of these blocks [*n], in range, as [*n, block_size, num_kv_heads, head_dim] of that type.

        Of places that nobody has written to, anything.
        """

    def shared(self, num_kv_heads: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays of a layer that belong to no block. They begin as zeros, and go to `write` and `read`
        too.
        """
        return {}

    def on_several(self) -> "Layout":
        """The form of it for devices that have some of the kv heads each: what it has for each head must be
        in `shared` then, for their program is one.
        """
        return self

    def given(self, num_kv_heads: int, device: int = 0, num_devices: int = 1) -> dict[str, np.ndarray]:
        """What arrays of `shared` begin as, where they do not as zeros: those of one of several devices with
        so many kv heads each. Neighbours have the same where there are fewer heads than devices.
        """
        return {}

    def scales(self, arrays: Arrays, sizes: Sizes) -> tuple[jax.Array, jax.Array] | None:
        """What a view's numbers of K and V are to be multiplied by, float32 [num_kv_heads] each; None: by
        nothing.
        """
        return None

    def view(self) -> View | None:
        """Where kernels find K and V; None: XLA reads them."""
        return None

    def packed_view(self) -> PackedView | None:
        """Where kernels find K and V in 4 bits; None: they are not so."""
        return None

    def on(self, platform: str) -> "Layout":
        """The form of it that suits a device of this platform, "cpu" or "gpu" for one: the same numbers."""
        return self

    def why_not(self, block_size: int, head_dim: int, dtype: jnp.dtype) -> str | None:
        """The rule that such blocks break, "block_size must be 1" for one; None if there is none."""
        return None

    def why_not_heads(self, num_kv_heads: int) -> str | None:
        """The same of a model with so many kv heads."""
        return None

    def block_bytes(self, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        """Bytes of one layer of a block."""
        specs = self.arrays(1, block_size, num_kv_heads, head_dim, dtype).values()
        return sum(spec.size * jnp.dtype(spec.dtype).itemsize for spec in specs)

    def __str__(self) -> str:
        """Its class's name, in small letters."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSlice:
    """Some of the blocks that arrays have, a layer's for one: block i of them is block first + i * stride."""

    first: jax.Array  # [] int32
    stride: int = dataclasses.field(metadata={"static": True})
    num_blocks: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Blocks in some layout: what the operations of `ops` take in place of an array of K and one of V."""

    arrays: dict[str, jax.Array]
    layout: Layout = dataclasses.field(metadata={"static": True})
    sizes: Sizes = dataclasses.field(metadata={"static": True})  # of the arrays
    blocks: BlockSlice | None = None  # what block ids and slots are of; None: of all

    @property
    def num_blocks(self) -> int:
        """Of the part, if there is one."""
        return self.sizes.num_blocks if self.blocks is None else self.blocks.num_blocks

    def places(self, block_ids: jax.Array) -> jax.Array:
        """Which of the arrays' blocks these are."""
        return block_ids if self.blocks is None else self.blocks.first + block_ids * self.blocks.stride

    def read(self, block_ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """See `Layout.read`."""
        return self.layout.read(self.arrays, self.sizes, self.places(block_ids), dtype)

    @property
    def scales(self) -> tuple[jax.Array, jax.Array] | None:
        """See `Layout.scales`."""
        return self.layout.scales(self.arrays, self.sizes)


def create(
    layout: Layout, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> Pool:
    """A pool of zeros for one layer. Raises ValueError for sizes that the layout has no blocks of."""
    check(layout, block_size, head_dim, dtype)
    sizes = Sizes(num_blocks, block_size, num_kv_heads, head_dim)
    specs = layout.arrays(*sizes, dtype) | layout.shared(num_kv_heads)
    return Pool({name: jnp.zeros(s.shape, s.dtype) for name, s in specs.items()}, layout, sizes)


def check(layout: Layout, block_size: int, head_dim: int, dtype: jnp.dtype) -> None:
    """Raise ValueError if the layout has no blocks of such sizes."""
    if rule := layout.why_not(block_size, head_dim, dtype):
        raise ValueError(f"{rule}, not {block_size=} with {head_dim=}, for kv_layout={layout}")
