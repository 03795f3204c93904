"""Policies against the definitions of their papers."""

import json
from pathlib import Path

import numpy as np
import pytest

from reference import eviction
from reference.prompts import Prompts


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
    prompts = Prompts(eviction.Sieve(size + 1), size + 1)
    hits = sum(prompts.send([symbol], num_lookup=1, num_held=1) for symbol in symbols.tolist())
    assert hits == sieve_hits(symbols.tolist(), size)


GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "policies.json").read_text())


@pytest.mark.parametrize("policy", ["lru", "fifo", "sieve", "s3fifo", "plain_lfu"])
@pytest.mark.parametrize("trace", GOLDENS["traces"])
def test_hits_are_those_of_libcachesim(policy, trace):
    """Prompts of one block each, so that prefixes and blocks in use play no part."""
    for size, hits in GOLDENS["hits"][trace][policy].items():
        num_blocks = int(size) + 1
        prompts = Prompts(
            eviction.POLICIES[policy](num_blocks), num_blocks, name_of=lambda symbols: symbols[0]
        )
        symbols = GOLDENS["traces"][trace]
        assert sum(prompts.send([each], num_lookup=1, num_held=1) for each in symbols) == hits, size


@pytest.mark.parametrize("trace", GOLDENS["traces"])
def test_tinylfu_is_near_libcachesims(trace):
    """Allow 5%: the sketches have different hash functions and sizes, so estimates differ."""
    symbols = GOLDENS["traces"][trace]
    for size in (100, 200):
        prompts = Prompts(eviction.TinyLfu(size + 1), size + 1, name_of=lambda each: each[0])
        found = sum(prompts.send([each], num_lookup=1, num_held=1) for each in symbols)
        assert found == pytest.approx(GOLDENS["hits"][trace]["tinylfu"][str(size)], rel=0.05)
