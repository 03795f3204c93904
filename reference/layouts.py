"""Layouts of K and V, written as loops over tokens: what `pallas_kernels.layouts` must do.

Each is a pair of functions on named arrays. `write(arrays, k, v, slots)` puts tokens [num_heads, head_dim]
one after the other into their slots, slot = block * block_size + offset, and returns new arrays.
`read(arrays, block)` gives K and V of a block as float32 [block_size, num_heads, head_dim]; of places that
nobody wrote to, anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]
# Where in its array the numbers of a token's head are: (array, block, offset, head) -> a view of them.
Numbers = Callable[[Mapping[str, np.ndarray], str, int, int, int], np.ndarray]


@dataclass(frozen=True)
class Oracle:
    """NumPy oracle of a layout: the shapes of its blocks, and writes and reads of them."""

    block_size: int
    write: Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray], Arrays]
    read: Callable[[Mapping[str, np.ndarray], int], tuple[np.ndarray, np.ndarray]]


# Where the numbers of a head are, by layout: `which` is "k" or "v".


def token_major(
    arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int
) -> np.ndarray:
    return arrays[which][block, offset, head]


def token(arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int) -> np.ndarray:
    return arrays[which][block, head]


def head_major(
    arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int
) -> np.ndarray:
    return arrays[which][block, head, offset]


def fused(arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int) -> np.ndarray:
    """Return a token's head in `fused`, and in `all_layers`: these differ only in where the layers are."""
    return arrays["kv"][block, "kv".index(which), offset, head]


def split_x(arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int) -> np.ndarray:
    """Return a token's head in `split_x`.

    K has x numbers of a token, then those of the next token. V has a channel's numbers of all tokens.
    """
    if which == "k":
        return arrays["k"][block, head, :, offset]  # [head_dim / x, x]
    return arrays["v"][block, head, :, offset]


def by_heads(
    sizes: tuple[int, int, int],
    put: Callable[[Arrays, str, int, int, int, np.ndarray], None],
    get: Callable[[Mapping[str, np.ndarray], str, int, int, int], np.ndarray],
) -> Oracle:
    """Return functions that store each token's head by itself, at (which, block, offset, head).

    sizes: block_size, num_heads and head_dim.
    """
    block_size, num_heads, head_dim = sizes

    def write(arrays: Arrays, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Arrays:
        new = {name: array.copy() for name, array in arrays.items()}
        for token, slot in enumerate(slots):
            block, offset = divmod(int(slot), block_size)
            for which, x in (("k", k), ("v", v)):
                for head in range(num_heads):
                    put(new, which, block, offset, head, x[token, head])
        return new

    def read(arrays: Mapping[str, np.ndarray], block: int) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((2, block_size, num_heads, head_dim), np.float32)
        for i, which in enumerate("kv"):
            for offset in range(block_size):
                for head in range(num_heads):
                    out[i, offset, head] = get(arrays, which, block, offset, head)
        return out[0], out[1]

    return Oracle(block_size, write, read)


def plain(numbers: Numbers, block_size: int, num_heads: int, head_dim: int) -> Oracle:
    """Store numbers as they are, in the arrays' type."""

    def put(arrays: Arrays, which: str, block: int, offset: int, head: int, x: np.ndarray) -> None:
        place = numbers(arrays, which, block, offset, head)
        place[...] = x.reshape(place.shape)

    def get(arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int) -> np.ndarray:
        return numbers(arrays, which, block, offset, head).reshape(head_dim)

    return by_heads((block_size, num_heads, head_dim), put, get)


def float8(base: Oracle, dtype: np.dtype, largest: float, k_scale: np.ndarray, v_scale: np.ndarray) -> Oracle:
    """Store x / scale in a type of 8 bits that has no numbers beyond `largest`; scales are [num_heads]."""

    def write(arrays: Arrays, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Arrays:
        k, v = (
            np.clip(x.astype(np.float32) / scale[:, None], -largest, largest).astype(dtype)
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        return base.write(arrays, k, v, slots)

    def read(arrays: Mapping[str, np.ndarray], block: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = base.read(arrays, block)
        return k * k_scale[:, None], v * v_scale[:, None]

    return Oracle(base.block_size, write, read)


def measured_scale(x: np.ndarray, largest: float) -> np.float32:
    """Return the scale that makes the largest of these numbers the largest of the type."""
    return np.float32(np.max(np.abs(x.astype(np.float32))) / np.float32(largest))


def int8_per_token(numbers: Numbers, block_size: int, num_heads: int, head_dim: int) -> Oracle:
    """Store round(x / scale), with scale = max |x| / 127 of a token's head.

    Scales are [num_blocks, num_heads, block_size], those of K and V in one array where the numbers are.
    """

    def scale_of(
        arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int
    ) -> np.ndarray:
        both = arrays.get("kv_scale")
        scales = arrays[f"{which}_scale"] if both is None else both[:, "kv".index(which)]
        return scales[block, head, offset : offset + 1]

    def put(arrays: Arrays, which: str, block: int, offset: int, head: int, x: np.ndarray) -> None:
        values = x.astype(np.float32)
        scale = max(np.max(np.abs(values)) * np.float32(1 / 127), np.float32(1e-30))
        numbers(arrays, which, block, offset, head)[...] = np.clip(np.rint(values / scale), -127, 127)
        scale_of(arrays, which, block, offset, head)[...] = scale

    def get(arrays: Mapping[str, np.ndarray], which: str, block: int, offset: int, head: int) -> np.ndarray:
        codes = numbers(arrays, which, block, offset, head).astype(np.float32)
        return codes * scale_of(arrays, which, block, offset, head)

    return by_heads((block_size, num_heads, head_dim), put, get)


def int4_grouped(block_size: int, num_heads: int, head_dim: int, group: int = 16) -> Oracle:
    """Store codes from 0 to 15 with a scale and a zero.

    V has them for a token's head, K for a channel of a whole group of tokens.

    What an unfinished group of K has is kept in `k_new`, and when its last token comes, all of it is made
    codes.
    """

    def codes_of(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
        scale = bfloat16(np.maximum((high - low) * np.float32(1 / 15), np.float32(1e-30)))
        zero = bfloat16(low)
        return np.clip(np.rint((x - zero) / scale), 0, 15).astype(np.uint8), scale, zero

    def packed(codes: np.ndarray) -> np.ndarray:
        return codes[..., : head_dim // 2] + 16 * codes[..., head_dim // 2 :]

    def unpacked(codes: np.ndarray) -> np.ndarray:
        return np.concatenate([codes % 16, codes // 16], axis=-1).astype(np.float32)

    def write(arrays: Arrays, k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> Arrays:
        new = {name: array.copy() for name, array in arrays.items()}
        for token, slot in enumerate(slots):
            block, offset = divmod(int(slot), block_size)
            codes, scale, zero = codes_of(v[token].astype(np.float32), axis=-1)
            new["v"][block, offset] = packed(codes)
            new["v_scale"][block, :, offset], new["v_zero"][block, :, offset] = scale[:, 0], zero[:, 0]
            open_group, place = divmod(offset, group)
            new["k_new"][block, place] = k[token]
            new["new_group"][block] = open_group
            if place == group - 1:
                codes, scale, zero = codes_of(new["k_new"][block].astype(np.float32), axis=0)
                new["k"][block, open_group * group : offset + 1] = packed(codes)
                new["k_scale"][block, open_group], new["k_zero"][block, open_group] = scale[0], zero[0]
                new["new_group"][block] = -1
        return new

    def read(arrays: Mapping[str, np.ndarray], block: int) -> tuple[np.ndarray, np.ndarray]:
        a = {name: array[block] for name, array in arrays.items()}
        v = unpacked(a["v"]) * a["v_scale"].T.astype(np.float32)[..., None]
        v += a["v_zero"].T.astype(np.float32)[..., None]
        k = unpacked(a["k"])
        for group_index in range(block_size // group):
            span = slice(group_index * group, (group_index + 1) * group)
            if group_index == a["new_group"]:
                k[span] = a["k_new"]
            else:
                k[span] = k[span] * a["k_scale"][group_index].astype(np.float32) + a["k_zero"][
                    group_index
                ].astype(np.float32)
        return k, v

    return Oracle(block_size, write, read)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round finite float32 numbers to bfloat16's, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return (rounded & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
