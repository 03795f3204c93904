"""Policies: where a freed block goes, and so which one is taken next.

A policy is a value: whatever differs from one to another is in it. Each of these does, block for block, what
one generation of vLLM's allocators does. To add one, write it down and name it in `POLICIES`: tests and
benchmarks then ask for its oracle.

Blocks are taken from the head of the free queue. A policy that has to know more of each block has a queue of
its own, a `FreeQueue` with more fields, and functions of its own to take from it and to note what happens:
`eviction` has those.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.checks import check
from jaxpaged.memory import free_queue
from jaxpaged.memory.free_queue import FreeQueue


@dataclass(frozen=True)
class Sweep:
    """A walk over the blocks that rows give back, row by row, in which each goes to the same end."""

    push: Callable[[Any, Int[Array, " n"], Bool[Array, " n"]], Any]  # adds the masked ids one by one
    last_block_first: bool = False  # direction through a row
    content: bool | None = None  # takes only blocks with findable content (True), or without (False)

    def takes(self, has_content: Bool[Array, " n"]) -> Bool[Array, " n"]:
        return jnp.ones_like(has_content) if self.content is None else has_content == self.content


@dataclass(frozen=True)
class Policy:
    """An eviction policy: the functions and flags that a pool, its block tables and swapping use."""

    name: str
    new_queue: Callable[[int], Any]  # makes a queue of all blocks but the null block
    sweeps: tuple[Sweep, ...]  # orders in which blocks are freed; each block belongs to one sweep
    copies_last: bool = False  # a row takes the block for its copy-on-write last
    unshares_in_swap: bool = False  # a block that several swapped rows share is copied for each of them
    keeps_content: bool = False  # free blocks stay findable until they are evicted
    # Functions that take blocks, and that remove found blocks from the queue.
    take: Callable[..., tuple[Any, Int[Array, " max_count"]]] = free_queue.pop_front
    remove: Callable[..., Any] = free_queue.remove
    # Functions that note blocks that were found (queue, ids, mask), and that have content (queue, ids, blocks
    # before each in its prompt, fingerprints of the contents, mask).
    note_hits: Callable[..., Any] | None = None
    note_content: Callable[..., Any] | None = None
    # What waiting requests will find: (queue, for each block a number, larger for the sooner; 0: nobody).
    note_waiting: Callable[..., Any] | None = None
    # The policy for blocks of so many tokens, where that makes a difference.
    for_block_size: Callable[[int], "Policy"] | None = None
    contract: int = 1  # version of the contract that it is written for (docs/research/contracts.md)


def sized(policy: Policy, block_size: int) -> Policy:
    """Return the policy as it is for blocks of `block_size` tokens."""
    if policy.for_block_size is None:
        return policy
    return replace(policy.for_block_size(block_size), name=policy.name)


def lowest_first(num_blocks: int) -> FreeQueue:
    return free_queue.create(jnp.arange(1, num_blocks, dtype=jnp.int32), num_blocks)


def highest_first(num_blocks: int) -> FreeQueue:
    return free_queue.create(jnp.arange(1, num_blocks, dtype=jnp.int32)[::-1], num_blocks)


def to_head(queue: FreeQueue, block_ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> FreeQueue:
    """Put blocks at the queue's head: what was freed last is taken first."""
    return free_queue.push_front(queue, block_ids, mask)


def to_tail(queue: FreeQueue, block_ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> FreeQueue:
    """Put blocks at the queue's tail: what was freed first is taken first, the least recently used."""
    return free_queue.push_back(queue, block_ids, mask)


# vLLM v0's `BlockAllocator`.
LIFO = Policy("lifo", highest_first, (Sweep(to_head),))
# vLLM 0.6.3's `NaiveBlockAllocator`; its tables take the copy last, when they write the tokens.
NAIVE = Policy("naive", lowest_first, (Sweep(to_head),), copies_last=True, unshares_in_swap=True)
# vLLM V1's `BlockPool`. The beginning of a prompt, which others may share, is given back and evicted last.
LRU = Policy("lru", lowest_first, (Sweep(to_tail, last_block_first=True),), keeps_content=True)
# vLLM V1 since mid-2026: blocks without content go to the head, and a row's last block is taken first.
LRU_SPLIT = Policy(
    "lru_split",
    lowest_first,
    (Sweep(to_tail, last_block_first=True, content=True), Sweep(to_head, content=False)),
    keeps_content=True,
)

POLICIES = {policy.name: policy for policy in (LIFO, NAIVE, LRU, LRU_SPLIT)}


def named(name: str) -> Policy:
    """Return the policy of this name. Raises `InputError` for an unknown one."""
    check("policy", name, f"one of {', '.join(POLICIES)}", name in POLICIES)
    return POLICIES[name]
