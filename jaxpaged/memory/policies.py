"""Policies: where a freed block goes, and so which one is taken next.

A policy is a value: whatever differs from one to another is in it. Each of these does, block for block, what
one generation of vLLM's allocators does. To add one, write it down and name it in `POLICIES`: tests and
benchmarks then ask for its oracle.

Blocks are always taken from the head of the free queue. A policy that has to remember more of each block
makes a queue of its own, a `FreeQueue` with more fields, which the functions of `free_queue` leave as they
are; one that takes blocks elsewhere than at the head will need a third function beside the two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.checks import check
from jaxpaged.memory import free_queue
from jaxpaged.memory.entries import reversed_groups
from jaxpaged.memory.free_queue import FreeQueue


@dataclass(frozen=True)
class Freed:
    """Blocks that nobody holds any more, in the order in which they were given back."""

    block_ids: Int[Array, " n"]
    mask: Bool[Array, " n"]  # where there is one; each block once
    has_content: Bool[Array, " n"]  # which can still be found
    group: Int[Array, " n"]  # equal neighbours were given back together: the blocks of a row


@dataclass(frozen=True)
class Policy:
    """What a pool, the tables over it and swapping ask."""

    name: str
    new_queue: Callable[[int], FreeQueue]  # of all `num_blocks` blocks but the null block
    give_back: Callable[[FreeQueue, Freed], FreeQueue]
    last_block_first: bool = False  # a row gives its blocks back from the last to the first
    copies_last: bool = False  # of the blocks that a row takes, the one for its copy-on-write is the last
    unshares_in_swap: bool = False  # a block that several swapped rows share is copied for each of them
    keeps_content: bool = False  # free blocks stay findable as long as may be


def lowest_first(num_blocks: int) -> FreeQueue:
    return free_queue.create(jnp.arange(1, num_blocks, dtype=jnp.int32), num_blocks)


def highest_first(num_blocks: int) -> FreeQueue:
    return free_queue.create(jnp.arange(1, num_blocks, dtype=jnp.int32)[::-1], num_blocks)


def to_head(queue: FreeQueue, freed: Freed) -> FreeQueue:
    """What was freed last is taken first."""
    return free_queue.push_front(queue, freed.block_ids, freed.mask)


def to_tail(queue: FreeQueue, freed: Freed) -> FreeQueue:
    """What was freed first is taken first: the least recently used."""
    return free_queue.push_back(queue, freed.block_ids, freed.mask)


def by_content(queue: FreeQueue, freed: Freed) -> FreeQueue:
    """With content to the tail; without, to the head, a group last to first, so that it is taken in order."""
    order = reversed_groups(freed.group)
    queue = free_queue.push_front(queue, freed.block_ids[order], (freed.mask & ~freed.has_content)[order])
    return free_queue.push_back(queue, freed.block_ids, freed.mask & freed.has_content)


# vLLM v0's `BlockAllocator`.
LIFO = Policy("lifo", highest_first, to_head)
# vLLM 0.6.3's `NaiveBlockAllocator`; its tables take the copy last, when they write the tokens.
NAIVE = Policy("naive", lowest_first, to_head, copies_last=True, unshares_in_swap=True)
# vLLM V1's `BlockPool`. The beginning of a prompt, which others may share, is given back and evicted last.
LRU = Policy("lru", lowest_first, to_tail, last_block_first=True, keeps_content=True)
# The same since mid-2026.
LRU_SPLIT = Policy("lru_split", lowest_first, by_content, last_block_first=True, keeps_content=True)

POLICIES = {policy.name: policy for policy in (LIFO, NAIVE, LRU, LRU_SPLIT)}


def named(name: str) -> Policy:
    """The policy of this name. Raises `InputError` for an unknown one."""
    check("policy", name, f"one of {', '.join(POLICIES)}", name in POLICIES)
    return POLICIES[name]
