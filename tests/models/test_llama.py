"""Llama and Mistral against transformers (stored logits), in NumPy and through a paged cache."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.models import llama, loading
from jaxpaged.models.attention import AttentionBatch
from jaxpaged.models.llama import Llama
from reference import model as reference_model
from tests import tiny

GOLDENS = Path(__file__).parents[1] / "goldens"
VARIANTS = ["gqa_tied", "mha_biased", "mqa_llama3_rope", "mistral_window"]
# Float32 against float32 in another order: sums of up to 64 terms, logits below 16.
TOLERANCE = 2e-4


@pytest.fixture(params=VARIANTS)
def golden(request):
    folder = GOLDENS / request.param
    checkpoint = loading.open_checkpoint(folder)
    stored = json.loads((folder / "golden.json").read_text())
    assert stored["smallest_gap"] > 2 * TOLERANCE  # no rounding decides the answer
    return checkpoint.config, checkpoint.load_weights(), stored


def paged_logits(config, weights, token_ids, block_size, tile_len) -> np.ndarray:
    """All tokens in one pass of tiles, over blocks in shuffled order."""
    num_tokens = -(-len(token_ids) // tile_len) * tile_len
    num_blocks = -(-num_tokens // block_size)
    model = Llama(config, weights, jnp.dtype("float32"))
    cache = model.create_cache(num_blocks + 1, block_size)
    table = 1 + np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    positions = np.arange(num_tokens, dtype=np.int32)
    num_tiles = num_tokens // tile_len
    batch = AttentionBatch(
        slot_mapping=jnp.asarray(table[positions // block_size] * block_size + positions % block_size),
        block_tables=jnp.tile(table, (num_tiles, 1)),
        query_starts=jnp.asarray(positions[::tile_len]),
        seq_lens=jnp.asarray(positions[::tile_len] + tile_len),
        implementation="xla",
    )
    padded = jnp.asarray([*token_ids, *[0] * (num_tokens - len(token_ids))], jnp.int32)
    hidden, _ = model(padded, jnp.asarray(positions), cache, batch)
    return np.asarray(model.logits(hidden))[: len(token_ids)]


def test_the_numpy_model_equals_transformers(golden):
    config, weights, stored = golden
    logits = reference_model.logits(config, weights, stored["token_ids"])
    np.testing.assert_allclose(logits, stored["logits"], atol=TOLERANCE, rtol=TOLERANCE)
    answer = reference_model.generate(config, weights, stored["token_ids"], len(stored["answer"]))
    assert answer == stored["answer"]


@pytest.mark.parametrize(("block_size", "tile_len"), [(4, 8), (16, 1)])
def test_the_paged_model_equals_transformers(golden, block_size, tile_len):
    config, weights, stored = golden
    logits = paged_logits(config, weights, stored["token_ids"], block_size, tile_len)
    np.testing.assert_allclose(logits, stored["logits"], atol=TOLERANCE, rtol=TOLERANCE)


def test_blocks_before_the_window_may_be_gone():
    """Tiles one after another; what no later token sees is poisoned, and the null block put in its place."""
    folder = GOLDENS / "mistral_window"
    checkpoint = loading.open_checkpoint(folder)
    config, stored = checkpoint.config, json.loads((folder / "golden.json").read_text())
    block_size, tile_len, num_tokens = 4, 10, len(stored["token_ids"])
    num_blocks = -(-num_tokens // block_size)
    model = Llama(config, checkpoint.load_weights(), jnp.dtype("float32"))

    @jax.jit
    def step(token_ids, positions, cache, batch):
        hidden, cache = model(token_ids, positions, cache, batch)
        return model.logits(hidden), cache

    cache = model.create_cache(num_blocks + 1, block_size)
    table = 1 + np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    for start in range(0, num_tokens, tile_len):
        num_gone = max(start + 1 - config.sliding_window, 0) // block_size
        gone = np.array([0, *table[:num_gone]])
        table[:num_gone] = 0
        cache = jax.tree.map(lambda side, gone=gone: side.at[gone].set(jnp.nan), cache)
        positions = np.arange(start, start + tile_len, dtype=np.int32)
        batch = AttentionBatch(
            slot_mapping=jnp.asarray(table[positions // block_size] * block_size + positions % block_size),
            block_tables=jnp.asarray(table[None]),
            query_starts=jnp.asarray(positions[:1]),
            seq_lens=jnp.asarray(positions[-1:] + 1),
            implementation="xla",
        )
        token_ids = jnp.asarray(stored["token_ids"][start : start + tile_len], jnp.int32)
        logits, cache = step(token_ids, jnp.asarray(positions), cache, batch)
        want = stored["logits"][start : start + tile_len]
        np.testing.assert_allclose(logits, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert num_gone > 0


def test_bfloat16_stays_near_float32():
    """Two layers of bfloat16 (8 bits of fraction): logits within a few percent of their spread."""
    exact = paged_logits(tiny.CONFIG, tiny.weights(), list(range(30)), 8, 10)
    model = Llama(tiny.CONFIG, tiny.weights(), jnp.dtype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    rounded = {name: np.asarray(w, jnp.bfloat16).astype(np.float32) for name, w in tiny.weights().items()}
    near = paged_logits(tiny.CONFIG, rounded, list(range(30)), 8, 10)
    assert np.abs(near - exact).max() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.norm.weight": None},
            "the weights lack 'model.norm.weight', which the model config asks for",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": np.zeros((3, 4))},
            r"weight 'model.layers.1.mlp.up_proj.weight' has shape \(3, 4\), must be \(48, 32\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    weights = {name: w for name, w in (tiny.weights() | change).items() if w is not None}
    with pytest.raises(InputError, match=message):
        llama.check_weights(tiny.CONFIG, weights)


def test_random_weights_are_those_of_the_config():
    weights = llama.random_weights(tiny.CONFIG, seed=1)
    assert {name: w.shape for name, w in weights.items()} == dict(llama.weight_shapes(tiny.CONFIG))
