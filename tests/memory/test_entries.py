"""Flat entries, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxpaged.memory import entries
from jaxpaged.memory.entries import dealt, first_equal, in_chunks


@pytest.mark.parametrize("num_values", [1, 3, 1000], ids=["all equal", "few values", "many values"])
def test_first_equal(num_values: int) -> None:
    find = jax.jit(lambda a, b, mask: first_equal(a, b, mask=mask))
    rng = np.random.default_rng(num_values)
    for _ in range(20):
        a, b = rng.integers(-num_values, num_values, (2, 60))
        mask = rng.random(60) < 0.8
        found = find(jnp.asarray(a), jnp.asarray(b.astype(np.uint32)), jnp.asarray(mask))
        keys = [
            (int(x), int(y)) if used else i for i, (x, y, used) in enumerate(zip(a, b, mask, strict=True))
        ]
        assert found.tolist() == [keys.index(key) for key in keys]


def test_dealt() -> None:
    counts = jnp.array([2, 0, 3, 4])
    for num in range(11):
        rows = [row for row, count in enumerate(counts.tolist()) for _ in range(count)]
        assert dealt(counts, num).tolist() == [rows[:num].count(row) for row in range(4)]


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thing once, row by row, whatever row a chunk begins or ends in."""
    monkeypatch.setattr(entries, "CHUNK", 4)
    counts = [2, 0, 3, 7, 0]
    want = [(row, k) for row, count in enumerate(counts) for k in range(count)]

    def note(row: Array, k: Array, used: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, num = carry
        place = jnp.where(used, num + jnp.arange(4), len(want))
        return seen.at[place].set(jnp.stack([row, k], axis=1), mode="drop"), num + jnp.sum(used)

    nothing = jnp.zeros((len(want), 2), jnp.int32), jnp.int32(0)
    seen, num = jax.jit(lambda counts: in_chunks(counts, note, nothing))(jnp.array(counts))
    assert int(num) == len(want)
    assert [tuple(pair) for pair in seen.tolist()] == want
