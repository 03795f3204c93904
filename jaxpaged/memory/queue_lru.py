"""Queue-informed LRU: the blocks that waiting requests will find go last.

Of these blocks those go first that only later requests of the queue will find. All others go before them,
the least recently used at first. vLLM's issue 48485 proposes it.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import ranked_queue
from jaxpaged.memory.entries import CHUNK
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking


def _by_queue(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    return queue.note(RankedQueue.OTHER, ids), now


RANKING = Ranking(_by_queue)


def note_waiting(queue: RankedQueue, wanted: Int[Array, " num_blocks"]) -> RankedQueue:
    """Note of all blocks how soon a waiting request will find them; 0: none will.

    Costs O(num_blocks), and O(log num_blocks) for each block whose number changes.
    """
    changes = queue.notes[:, RankedQueue.OTHER] != wanted
    (ids,) = jnp.nonzero(changes, size=queue.num_blocks, fill_value=0)
    ids = jnp.pad(ids.astype(jnp.int32), (0, -queue.num_blocks % CHUNK))
    count = jnp.sum(changes, dtype=jnp.int32)

    def put(i: int | Int[Array, ""], queue: RankedQueue) -> RankedQueue:
        some = lax.dynamic_slice(ids, (i * CHUNK,), (CHUNK,))
        real = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) < count
        ranked = real & (queue.place[some] >= 0) & ranked_queue.has_content(queue, some)
        target = jnp.where(real, some, queue.num_blocks)
        queue = replace(
            queue,
            notes=queue.notes.at[target, RankedQueue.OTHER].set(wanted[some], mode="drop"),
            rank=queue.rank.at[jnp.where(ranked, some, queue.num_blocks), 0].set(wanted[some], mode="drop"),
        )
        return ranked_queue.play(queue, some, ranked)

    return lax.fori_loop(0, cdiv(count, CHUNK), put, queue)
