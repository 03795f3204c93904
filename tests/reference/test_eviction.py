"""Policies against the definitions of their papers."""

import numpy as np
import pytest

from reference import eviction


def sieve_hits(symbols, size):
    """Count the hits of SIEVE as in the paper: a queue, the oldest first, and a hand that goes through it."""
    queue, visited, hand, hits = [], {}, 0, 0
    for symbol in symbols:
        if symbol in visited:
            hits += 1
            visited[symbol] = True
            continue
        if len(queue) == size:
            while visited[queue[hand]]:
                visited[queue[hand]] = False
                hand = (hand + 1) % size
            del visited[queue.pop(hand)]
            hand = hand if hand < len(queue) else 0  # behind the newest: it begins again
        queue.append(symbol)
        visited[symbol] = False
    return hits


@pytest.mark.parametrize("size", [1, 2, 3, 10, 50, 200])
def test_sieve_is_the_papers(size):
    """Prompts of one block each."""
    symbols = np.random.default_rng(size).zipf(1.3, 4000) % 800
    prompts = eviction.Prompts(eviction.Sieve(size + 1), size + 1)
    hits = sum(prompts.send([symbol], num_lookup=1, num_held=1) for symbol in symbols.tolist())
    assert hits == sieve_hits(symbols.tolist(), size)
