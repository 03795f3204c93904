"""A policy from outside: what was never found goes before what was, and of equals the longest unused."""

import jax.numpy as jnp

from jaxpaged.contracts import RankedQueue, Ranking


def found_last(queue, block_ids, is_first, now):
    """Rank blocks by whether they were found since they have their content, then by when they were freed."""
    return jnp.minimum(queue.note(RankedQueue.HITS, block_ids), 1), now


FOUND_LAST = Ranking(found_last, contract=1)


class Oracle:
    """Oracle of FOUND_LAST in plain Python, for `jaxpaged verify policy --oracle`."""

    def __init__(self, num_blocks):
        self.empty, self.free_blocks, self.hits = list(range(1, num_blocks)), [], {}

    def take(self):
        if self.empty:
            return self.empty.pop(0)
        block = min(self.free_blocks, key=lambda block: min(self.hits[block], 1))  # the first of equals
        self.free_blocks.remove(block)
        return block

    def publish(self, block, depth, content):
        self.hits[block] = 0

    def hit(self, block):
        self.hits[block] += 1

    def revive(self, block):
        self.free_blocks.remove(block)

    def free(self, blocks):
        self.free_blocks += [block for block, has_content in blocks if has_content]
        self.empty += [block for block, has_content in blocks if not has_content]
