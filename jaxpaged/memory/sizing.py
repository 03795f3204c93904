"""Sizes: the bytes of a block, and the number of blocks that fit."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxpaged.checks import INT32_MAX, InputError, check
from pallas_kernels.layouts import TOKEN_MAJOR, Layout

MOST_BLOCKS = 2**20  # limit for small models in a large memory: more blocks only cost time to make
FITTED, CAPPED = "as many as fit into", "as many as are made without being asked for, in"
SPARED = 64  # 1 of so many blocks is given up if that avoids compiling another program


@dataclass(frozen=True)
class Budget:
    """A memory, and what takes how much of it before the cache does. In bytes."""

    total: int
    what: str  # description of the total
    taken: tuple[tuple[str, int], ...] = ()  # description and size of each part that is taken

    @property
    def left(self) -> int:
        return self.total - sum(num_bytes for _, num_bytes in self.taken)

    def less(self, *taken: tuple[str, int]) -> "Budget":
        """Return the budget after these are taken, too; amounts of 0 are left out."""
        return replace(self, taken=(*self.taken, *(each for each in taken if each[1])))

    def lines(self) -> list[str]:
        """Return the sum as lines, one number each, as one writes it on paper."""
        numbers = [("", self.total, self.what), *(("-", taken, by) for by, taken in self.taken)]
        return [f"{sign:>1} {n:>19,}  {what}" for sign, n, what in [*numbers, ("=", self.left, "left")]]

    def __str__(self) -> str:
        """Return the sum in words."""
        *more, last = [f"{num_bytes} {by}" for by, num_bytes in self.taken] or [""]
        parts = f"{', '.join(more)} and {last}" if more else last
        return f"{self.what} less {parts}" if parts else self.what


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache, and the reason for it."""

    num_blocks: int  # of the first size class, the null block included
    bytes_per_block: int
    block_size: int  # tokens
    why: str  # reason for the number of blocks, in words; it refers to the budget if there is one
    budget: Budget | None = None  # memory from which the numbers follow
    more_blocks: tuple[int, ...] = ()  # of each further size class, the null block included
    more_bytes: tuple[int, ...] = ()  # of a block of each further size class

    @property
    def reason(self) -> str:
        return self.why if self.budget is None else f"{self.why} {self.budget}"

    @property
    def num_bytes(self) -> int:
        further = zip(self.more_blocks, self.more_bytes, strict=True)
        return self.num_blocks * self.bytes_per_block + sum(count * size for count, size in further)

    @property
    def blocks_by_class(self) -> tuple[int, ...]:
        """Blocks of each size class, the null block included."""
        return self.num_blocks, *self.more_blocks

    @property
    def bytes_by_class(self) -> tuple[int, ...]:
        """Bytes of a block of each size class."""
        return self.bytes_per_block, *self.more_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens the cache has places for (not in the null block)."""
        return (self.num_blocks - 1) * self.block_size


def bytes_per_block(
    *,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    layout: Layout = TOKEN_MAJOR,
) -> int:
    """Return the bytes of one block over all layers; by default vLLM's `CacheEngine.get_cache_block_size`."""
    return num_layers * layout.block_bytes(block_size, num_kv_heads, head_dim, dtype)


def most_blocks(num_layers: int, block_size: int) -> int:
    """Return the most blocks with which a slot's number, all layers counted, is an int32."""
    return INT32_MAX // (max(num_layers, 1) * block_size)  # layers with states alone have no slots


def cache_size(
    *,
    num_blocks: int | None,
    bytes_per_block: int,
    state_bytes_per_block: int,
    block_size: int,
    num_layers: int,
    budget: Budget | None,
    further_bytes: Callable[[int], int] = lambda num_blocks: 0,
) -> CacheSize:
    """Size the cache: `num_blocks` if given, else what the budget leaves, with what is kept of each block.

    further_bytes: returns the bytes of the further size classes' blocks that go with so many of the first.

    Not only what the rows can use: what they leave is where finished requests' prefixes stay findable.
    Raises `InputError` if not even one sequence of one block would fit, or if a slot's number, all layers
    counted, would be no int32.
    """
    max_blocks = most_blocks(num_layers, block_size)
    if num_blocks is not None:
        rule = f"at most {max_blocks}, for {num_layers} layers of {block_size} tokens a block"
        check("num_blocks", num_blocks, rule, num_blocks <= max_blocks)
        return CacheSize(num_blocks, bytes_per_block, block_size, "num_blocks was given")
    assert budget is not None
    fit = most_that_fit(budget.left, bytes_per_block + state_bytes_per_block, further_bytes)
    if fit < 2:
        raise no_room(bytes_per_block, budget)
    max_blocks = min(MOST_BLOCKS, max_blocks)
    if fit > max_blocks:
        return CacheSize(max_blocks, bytes_per_block, block_size, CAPPED, budget)
    return CacheSize(fit, bytes_per_block, block_size, FITTED, budget)


def most_that_fit(num_bytes: int, bytes_per_block: int, further_bytes: Callable[[int], int]) -> int:
    """Return how many blocks fit into so many bytes beside those of further size classes that go with them.

    further_bytes: as for `cache_size`; it must not fall as the number rises.
    """
    max_blocks = min(max(num_bytes, 0) // max(bytes_per_block, 1), INT32_MAX)

    def is_too_much(num_blocks: int) -> bool:
        return num_blocks * bytes_per_block + further_bytes(num_blocks) > num_bytes

    return bisect.bisect_left(range(1, max_blocks + 1), True, key=is_too_much)


def no_room(bytes_per_block: int, budget: Budget) -> InputError:
    return InputError(
        f"the cache needs at least 2 blocks of {bytes_per_block} bytes, "
        f"but only {max(budget.left, 0)} bytes are available ({budget})"
    )


def fitted(guess: int, max_blocks: int, fit_beside: Callable[[int], int]) -> int:
    """Return a number of blocks, at most `max_blocks`, that fits beside its program; less than 2: none does.

    `fit_beside` makes the program for so many blocks and says how many fit beside it, which hardly depends on
    their number. One program is made where the guess fits and gives up at most one block in `SPARED`, else
    two. All numbers are `coarse`: a little less memory next time gives the same program.
    """
    guess = coarse(min(guess, max_blocks))
    fit = min(fit_beside(guess), max_blocks)
    if guess <= fit <= guess + guess // SPARED:
        return guess
    while (guess := coarse(fit)) >= 2:
        fit = min(fit_beside(guess), max_blocks)
        if fit >= guess:
            break
    return guess


def coarse(number: int) -> int:
    """Return the number rounded down to eight binary digits: by less than one part in 128."""
    zeros = max(number.bit_length() - 8, 0)
    return number >> zeros << zeros
