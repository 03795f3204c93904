"""GreedyDual for prompts: what costs more to compute again stays longer.

A block that is given back is worth the floor, which is the worth of the last block taken, and the mean cost
of a block of its prompt. Under equal costs that is LRU. Here the cost grows with the prompt, because
attention looks at all tokens before: a block of a prompt of 65,536 tokens costs twice what one of a short
prompt does, for a model of Llama 3.1 8B's shape.

A block is never worth less than one behind it in a prompt: it keeps the worth that it had, if that is more.
So what is behind goes first, and no cached block becomes unfindable because one before it was taken.
"""

import functools
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import ranked_queue
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking

UNIT = 16  # cost of a block whose tokens attend to nothing
ATTENTION_TOKENS = 32768  # a token's attention over so many costs what all else of it does
TOKENS_A_STEP = 2 * ATTENTION_TOKENS // UNIT  # of a prompt, for which its blocks' mean cost rises by one
LAST_DEPTH, LENGTH = 0, 1  # of the block given back last: its depth, and its prompt's length, in blocks


def ranking(block_size: int) -> Ranking:
    """Return the ranking for blocks of `block_size` tokens."""
    return Ranking(functools.partial(_by_worth, block_size), memory=_nothing_given_back)


def _nothing_given_back(num_blocks: int) -> Int[Array, "2"]:
    return jnp.array([-1, 0], jnp.int32)


def _by_worth(
    block_size: int,
    queue: RankedQueue,
    ids: Int[Array, " n"],
    is_first: Bool[Array, " n"],
    now: Int[Array, " n"],
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    cost = UNIT + queue.note(RankedQueue.OTHER, ids) * block_size // TOKENS_A_STEP
    worth = jnp.where(is_first, cost, jnp.maximum(queue.rank[ids, 0] - queue.floor, cost))
    return queue.floor + worth, now


def push(
    ranking: Ranking, queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"], *, content: bool
) -> RankedQueue:
    """Give the masked ids back, as `ranked_queue.push`, and note of each how long its prompt is.

    A prompt is a run of blocks with content, each just before the last one given back in depth.
    """
    if not content:
        return ranked_queue.push(ranking, queue, ids, mask, content=False)
    depth = queue.note(RankedQueue.DEPTH, ids) - 1
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    latest = lax.cummax(jnp.where(mask, index, -1))  # masked entry up to each one
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
    depth_before = jnp.where(before < 0, queue.memory[LAST_DEPTH], depth[before])
    begins = mask & (depth != depth_before - 1)
    start = lax.cummax(jnp.where(begins, index, -1))
    length = jnp.where(start < 0, queue.memory[LENGTH], depth[start] + 1)
    target = jnp.where(mask, ids, queue.num_blocks)
    last = latest[-1]
    memory = jnp.where(last < 0, queue.memory, jnp.stack([depth[last], length[last]]))
    notes = queue.notes.at[target, RankedQueue.OTHER].set(length, mode="drop")
    return ranked_queue.push(ranking, replace(queue, notes=notes, memory=memory), ids, mask, content=True)
