"""Blocks: the K and V of a prompt's beginning as a plain value, for a file or another engine."""

import dataclasses
import json
import math
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from jaxpaged.checks import InputError, check, check_salt, is_int, shown
from jaxpaged.untrusted import dtype_named, read_json

FORMAT = "jaxpaged blocks, version 2"  # the one entry of the metadata
TOKENS = "token_ids"
PRESENT = "present"
OF_CACHE = "kv."  # begins the names of the cache's arrays


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """The format of blocks: what two engines must have in common to use each other's."""

    block_size: int  # tokens
    groups: str  # which layers share blocks, and which tokens these layers read
    layout: str  # with its options
    dtype: str  # of the computation
    num_layers: int  # that a block has room for
    num_kv_heads: int
    head_dim: int
    reuse_answers: bool  # whether they may have been computed as an answer
    model: str  # a digest of its description and of all its weights
    tensor_parallel_size: int = 1  # devices, each with the K and V of its own heads

    def require(self, blocks: "Blocks") -> None:
        """Raise `InputError` unless blocks have this format."""
        for name, mine in dataclasses.asdict(self).items():
            its = getattr(blocks.block_format, name)
            check(f"blocks: {name}", its, f"{mine!r}, as this engine's", its == mine)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """The full blocks of a prompt from its beginning on, as an engine had them: perhaps none.

    Layers with a block table of their own are a group. `present` says which blocks of each group are here: of
    the first group all, of others those that the next token reads. K and V cannot be checked: adopt only what
    comes from whom you trust.
    """

    block_format: BlockFormat
    token_ids: np.ndarray  # int32 [num_blocks, block_size]
    present: np.ndarray  # bool [num_groups, num_blocks]
    cache_salt: str | None
    # By the layout's names: [num_present, num_layers, ...], of several devices [num_present, devices, ...].
    # The first group's blocks come first. An array has the blocks of its size class alone.
    arrays: dict[str, np.ndarray]
    classes: tuple[int, ...] = ()  # size class of each group's blocks; empty: there is one

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt, counted once for all groups."""
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return sum(array.nbytes for array in self.arrays.values())

    def to_bytes(self) -> bytes:
        """Serialise to a safetensors file: the token ids, and each array's bytes, block by block."""
        said: dict[str, Any] = {
            "kind": dataclasses.asdict(self.block_format),
            "cache_salt": self.cache_salt,
            "arrays": {name: [x.dtype.name, x.shape[1:]] for name, x in self.arrays.items()},
        }
        said |= {"classes": self.classes} if self.classes else {}
        tensors = {
            OF_CACHE + name: np.ascontiguousarray(x)
            .reshape(-1)
            .view(np.uint8)
            .reshape(_flat(x.dtype, x.shape))
            for name, x in self.arrays.items()
        }
        return save(
            tensors
            | {TOKENS: np.ascontiguousarray(self.token_ids), PRESENT: np.ascontiguousarray(self.present)},
            metadata={FORMAT: json.dumps(said)},
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Self:
        """Read what `to_bytes` wrote, from anybody: nothing of it runs. Raises `InputError` for anything
        else.
        """
        try:
            length = int.from_bytes(data[:8], "little")
            said = read_json(read_json(data[8 : 8 + length])["__metadata__"][FORMAT])
            tensors = load(bytes(data))
            block_format, salt = _block_format(said["kind"]), said["cache_salt"]
            token_ids = tensors.pop(TOKENS)
            is_line = (
                token_ids.dtype == np.int32
                and token_ids.ndim == 2
                and token_ids.shape[1] == block_format.block_size
            )
            check("token_ids", token_ids, f"int32 [num_blocks, {block_format.block_size}]", is_line)
            present = tensors.pop(PRESENT)
            check_present(present, len(token_ids))
            classes = tuple(said.get("classes", ()))
            rule = f"a size class for each of {len(present)} groups"
            check("classes", classes, rule, not classes or len(classes) == len(present))
            counts = {int(present.sum())}
            if classes:
                counts = {int(present[np.asarray(classes) == each].sum()) for each in {*classes}}
            arrays = {
                name: _unpacked(tensors.pop(OF_CACHE + name), counts, *its)
                for name, its in said["arrays"].items()
            }
            check("tensors", sorted(tensors), "those of ids, presence and arrays", not tensors)
            check_salt("cache_salt", salt)
        except InputError as error:
            raise InputError(f"blocks: {error}") from error
        except Exception as error:  # safetensors, and values of any type where others belong
            raise InputError(f"blocks cannot be read: {type(error).__name__}: {error}") from error
        return cls(block_format, token_ids, present, salt, arrays, classes)


def check_present(present: np.ndarray, num_blocks: int) -> None:
    """Raise `InputError` unless this may say which of `num_blocks` blocks each group has."""
    is_line = present.dtype == np.bool_ and present.ndim == 2 and present.shape[1] == num_blocks
    rule = f"bool [num_groups, {num_blocks}], and true for the first group"
    check("present", present, rule, is_line and len(present) > 0 and bool(present[0].all()))


def _flat(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many blocks an array has, and the bytes of each."""
    return shape[0], math.prod(shape[1:]) * dtype.itemsize


def _unpacked(flat: np.ndarray, counts: set[int], dtype_name: str, shape: list[int]) -> np.ndarray:
    """Return an array [num_blocks, *shape] that lies as bytes, of one of these numbers of blocks. Raises
    `InputError` for another size.
    """
    num_blocks = len(flat) if flat.ndim == 2 else -1
    dtype, whole = dtype_named(dtype_name), (num_blocks, *shape)
    is_shape = all(is_int(size) and size > 0 for size in shape) and num_blocks in counts
    if flat.dtype != np.uint8 or not is_shape or flat.shape != _flat(dtype, whole):
        raise InputError(f"an array of {shown(dtype_name)}{shown(whole)} does not have {flat.shape} bytes")
    return flat.reshape(-1).view(dtype).reshape(whole)


def _block_format(said: dict[str, Any]) -> BlockFormat:
    types = {field.name: field.type for field in dataclasses.fields(BlockFormat)}
    if said.keys() != types.keys() or any(type(said[name]) is not its for name, its in types.items()):
        raise ValueError(f"its format is {shown(said)}")
    return BlockFormat(**said)
