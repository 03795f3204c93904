"""The queue alone, against a Python list, with a tiny ring so that it wraps and is compacted often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import free_queue
from jaxpaged.memory.free_queue import FreeQueue

NUM_BLOCKS = 6
MAX_COUNT = 4


def to_list(queue: FreeQueue) -> list[int]:
    places = (int(queue.head) + np.arange(int(queue.span))) % queue.capacity
    return [int(i) for i in np.asarray(queue.ring)[places] if i >= 0]


def padded(ids: list[int]) -> tuple[jax.Array, jax.Array]:
    return jnp.array([*ids, *[0] * MAX_COUNT][:MAX_COUNT]), jnp.arange(MAX_COUNT) < len(ids)


@pytest.mark.parametrize("slack", [0, 64])
def test_equals_a_list(slack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue without slack has to look several times where taking meets holes."""
    monkeypatch.setattr(FreeQueue, "HOLE_SLACK", slack)
    pop_front = jax.jit(lambda queue, count: free_queue.pop_front(queue, count, MAX_COUNT))
    push_front = jax.jit(lambda *args: free_queue.push_front(*args))
    push_back = jax.jit(lambda *args: free_queue.push_back(*args))
    remove = jax.jit(lambda *args: free_queue.remove(*args))
    rng = np.random.default_rng(0)
    queue = free_queue.create(jnp.arange(1, NUM_BLOCKS), NUM_BLOCKS)
    model = list(range(1, NUM_BLOCKS))
    num_compactions = 0
    for _ in range(200):
        taken = sorted(set(range(1, NUM_BLOCKS)) - set(model))
        span = int(queue.span)
        match rng.choice(["pop", "front", "back", "back", "remove", "remove"]):
            case "pop":
                count = int(rng.integers(0, min(MAX_COUNT, len(model)) + 1))
                queue, ids = pop_front(queue, jnp.int32(count))
                want, model = model[:count], model[count:]
                assert ids.tolist() == [*want, *[0] * (MAX_COUNT - count)]
            case "front" | "back" as end:
                ids = rng.permutation(taken)[: rng.integers(0, MAX_COUNT + 1)].tolist()
                queue = (push_front if end == "front" else push_back)(queue, *padded(ids))
                model = ids[::-1] + model if end == "front" else model + ids
                num_compactions += int(queue.span) < span + len(ids)
            case "remove":
                ids = rng.permutation(model)[: rng.integers(0, MAX_COUNT)].tolist()
                named = [*ids, *ids[:1]]  # one of them twice
                queue = remove(queue, *padded(named))
                model = [i for i in model if i not in ids]
        assert to_list(queue) == model
        assert int(queue.num_free) == len(model)
        places = np.asarray(queue.place)
        assert all(queue.ring[places[i]] == i for i in model)
        assert set(np.flatnonzero(places >= 0)) == set(model)
    assert num_compactions >= 3, "the history never filled the ring with holes"


def test_compact_keeps_the_order() -> None:
    queue = free_queue.create(jnp.arange(1, NUM_BLOCKS), NUM_BLOCKS)
    queue, _ = free_queue.pop_front(queue, jnp.int32(2), MAX_COUNT)
    queue = free_queue.push_back(free_queue.remove(queue, *padded([4])), *padded([2, 1]))
    compacted = free_queue.compact(queue)
    assert to_list(queue) == to_list(compacted) == [3, 5, 2, 1]
    assert (int(compacted.head), int(compacted.span), int(queue.span)) == (0, 4, 5)


def test_last_namings() -> None:
    queue = free_queue.create(jnp.arange(1, NUM_BLOCKS), NUM_BLOCKS)
    queue, _ = free_queue.pop_front(queue, jnp.int32(3), MAX_COUNT)
    ids, mask = jnp.array([3, 1, 3, 1, 2, 2]), jnp.array([True, True, True, False, True, False])
    after, is_last = jax.jit(free_queue.last_namings)(queue, ids, mask)
    assert is_last.tolist() == [False, True, True, False, True, False]
    # When they are pushed, nothing is left of the search.
    after = free_queue.push_front(after, ids, is_last)
    queue = free_queue.push_front(queue, jnp.array([1, 3, 2]), jnp.array([True] * 3))
    assert to_list(after) == [2, 3, 1, 4, 5]
    jax.tree.map(np.testing.assert_array_equal, after, queue)
