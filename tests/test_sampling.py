"""The sampler: its distribution against the NumPy one, and what a draw may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling import SamplingState, likeliest, sample
from reference import sampler as reference_sampler

VOCAB = 12
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
]


def options(rows: list[dict], seeds: list[int]) -> SamplingState:
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [(defaults | row)[name] for row in rows] for name in ("temperature", *defaults)}
    return SamplingState(
        temperature=jnp.array(columns["temperature"], jnp.float32),
        top_k=jnp.array(columns["top_k"], jnp.int32),
        top_p=jnp.array(columns["top_p"], jnp.float32),
        min_p=jnp.array(columns["min_p"], jnp.float32),
        seed=jnp.array(seeds, jnp.uint32),
        wants_logprobs=jnp.zeros(len(seeds), bool),
    )


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    values = np.random.default_rng(0).normal(scale=1.5, size=VOCAB).astype(np.float32)
    values[5] = values[3]  # a tie, which the lower id wins
    return values


@pytest.mark.parametrize("row", OPTIONS, ids=str)
def test_draws_follow_the_reference_distribution(row, logits):
    num_draws = 4000
    draws = jax.jit(sample)(
        jnp.tile(logits, (num_draws, 1)),
        options([row] * num_draws, list(range(num_draws))),
        jnp.full(num_draws, 7, jnp.int32),
    )
    chance = reference_sampler.probabilities(logits, **row)
    counts = np.bincount(draws, minlength=VOCAB)
    assert not counts[chance == 0].any(), "a token was drawn that the options exclude"
    # Five standard deviations of a binomial count; the draws are fixed by their seeds.
    deviation = np.sqrt(num_draws * chance * (1 - chance))
    assert (np.abs(counts - num_draws * chance) <= 5 * deviation + 1e-9).all()


def test_a_draw_depends_on_its_seed_and_position_only(logits):
    rows = [dict(OPTIONS[i % len(OPTIONS)], temperature=1.0) for i in range(8)]
    spread = jnp.asarray(np.random.default_rng(1).normal(size=(8, VOCAB)), jnp.float32)
    positions = jnp.arange(8, dtype=jnp.int32)
    together = sample(spread, options(rows, list(range(8))), positions)
    for i in range(8):
        alone = sample(spread[i : i + 1], options(rows[i : i + 1], [i]), positions[i : i + 1])
        assert alone[0] == together[i]
    flat = jnp.zeros((64, 1000))
    free = [{"temperature": 1.0}] * 64
    same = jnp.full(64, 3, jnp.int32)
    assert len(set(sample(flat, options(free, list(range(64))), same).tolist())) > 50
    assert len(set(sample(flat, options(free, [5] * 64), jnp.arange(64, dtype=jnp.int32)).tolist())) > 50
    assert len(set(sample(flat, options(free, [5] * 64), same).tolist())) == 1


def test_the_likeliest_token_is_the_first_of_equals_and_always_a_token():
    rows = jnp.array([[0.0, 3, 3, 1], [-jnp.inf, -jnp.inf, -2, -jnp.inf], [jnp.nan, 1, 2, 3], [7, 7, 7, 7]])
    assert likeliest(rows).tolist() == [1, 2, 3, 0]
