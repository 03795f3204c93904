"""The sampler: its distribution against the NumPy one, and what a draw may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import sampling
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


def test_filters_keep_what_the_reference_keeps_of_many_tokens_among_them_equal_ones():
    rng = np.random.default_rng(5)
    many = rng.normal(scale=3, size=(24, 1000)).astype(np.float32)
    many[1::3] = np.round(many[1::3])  # hundreds of ties
    many[2::3] = np.minimum(many[2::3], 0) * rng.choice([1, 0, -0.0], size=1000)  # both zeros
    rows = [
        {
            "temperature": 1.0,
            "top_k": int(rng.choice([0, 1, 7, 500, 999, 1000, 2000])),
            "top_p": float(rng.choice([1.0, 0.31, 0.77, 0.993])),
            "min_p": float(rng.choice([0.0, 0.0, 0.013])),
        }
        for _ in many
    ]
    kept = np.isfinite(sampling._filter(jnp.asarray(many), options(rows, [0] * len(rows))))
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(
            kept[i], reference_sampler.probabilities(many[i], **row) > 0, err_msg=str(row)
        )


@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_a_top_p_of_1_keeps_all_of_a_large_vocabulary_whatever_its_neighbours_ask_for(num_rows):
    """Probabilities are summed in an order that the shape decides, and their sum may be 1 too early."""
    logits = np.random.default_rng(2).normal(scale=4, size=128_256).astype(np.float32)
    rows = [{"temperature": 1.0, "top_k": 128_256}, *[{"temperature": 1.0, "top_p": 0.5}] * (num_rows - 1)]
    kept = jax.jit(sampling._filter)(jnp.tile(logits, (num_rows, 1)), options(rows, list(range(num_rows))))
    np.testing.assert_array_equal(kept[0], logits)
    assert all(np.isfinite(row).sum() < 10_000 for row in kept[1:])


@pytest.mark.parametrize("temperature", [1e-37, 2e-38])
def test_the_smallest_temperatures_are_greedy(temperature, logits):
    rows = jnp.stack([jnp.asarray(logits), 1e4 * jnp.asarray(logits), jnp.asarray(logits) - 1e30])
    drawn = sample(
        rows, options([{"temperature": temperature}] * 3, [1, 2, 3]), jnp.arange(3, dtype=jnp.int32)
    )
    near = np.flatnonzero(logits == logits.max())
    assert drawn[0] in near
    assert drawn[1] in near


def test_the_likeliest_token_is_the_first_of_equals_and_always_a_token():
    rows = jnp.array([[0.0, 3, 3, 1], [-jnp.inf, -jnp.inf, -2, -jnp.inf], [jnp.nan, 1, 2, 3], [7, 7, 7, 7]])
    assert likeliest(rows).tolist() == [1, 2, 3, 0]
