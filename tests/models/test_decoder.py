"""Every family against transformers (stored logits), in NumPy and through a paged cache."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.checks import InputError
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import loading, names, weights
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families import BY_TYPE, WRAPPER_OF
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.layer_form import LayerForm
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights
from reference import model as reference_model
from tests import tiny
from tests.marks import slow_and_nightly
from tests.models.covering import covering

GOLDENS = Path(__file__).parents[1] / "goldens"
LLAMAS = ["gqa_tied", "mha_biased", "mqa_llama3_rope", "mistral_window"]
FAMILIES = sorted(f"families/{folder.name}" for folder in (GOLDENS / "families").iterdir())
COVERING = covering([*LLAMAS, *FAMILIES], GOLDENS)
# Float32 against float32 in another order: sums of up to 64 terms, logits below 16.
TOLERANCE = 1e-4


def stored(name):
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    assert golden["smallest_gap"] > 2 * TOLERANCE  # no rounding decides the answer
    return golden


@pytest.fixture(params=[*LLAMAS, *FAMILIES])
def golden(request):
    return loading.open_checkpoint(GOLDENS / request.param), stored(request.param)


def assert_equal(logits, stored):
    np.testing.assert_allclose(
        logits[:: stored.get("every", 1)], stored["logits"], atol=TOLERANCE, rtol=TOLERANCE
    )


def batch_of(table, positions, tile_len, block_size) -> PassBatch:
    """Make the batch of one sequence: tiles of neighbouring tokens, and its block table."""
    starts = positions[::tile_len]
    return PassBatch(
        slot_mapping=jnp.asarray(table[positions // block_size] * block_size + positions % block_size),
        block_tables=jnp.tile(table, (len(starts), 1)),
        query_starts=jnp.asarray(starts),
        seq_lens=jnp.asarray(starts + tile_len),
        implementation="xla",
    )


def paged_logits(model, token_ids, block_size, tile_len, adapter=None) -> np.ndarray:
    """Compute the logits of all tokens in one pass of tiles, over blocks in shuffled order."""

    @jax.jit
    def run(model):
        return logits_of(model, token_ids, block_size, tile_len, adapter)

    return np.asarray(run(model))


def logits_of(model, token_ids, block_size, tile_len, adapter=None) -> jax.Array:
    """Compute `paged_logits` in a function that can be compiled."""
    hidden, _ = passed(model, token_ids, block_size, tile_len, adapter)
    return model.logits(hidden)[: len(token_ids)]


def passed(model, token_ids, block_size, tile_len, adapter=None, wanted=None) -> tuple[jax.Array, KVCache]:
    num_tokens = -(-len(token_ids) // tile_len) * tile_len
    num_blocks = -(-num_tokens // block_size)
    cache = model.create_cache(num_blocks + 1, block_size)
    table = 1 + np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    positions = np.arange(num_tokens, dtype=np.int32)
    padded = jnp.asarray([*token_ids, *[0] * (num_tokens - len(token_ids))], jnp.int32)
    batch = batch_of(table, positions, tile_len, block_size)
    if adapter is not None:
        adapters = jnp.full_like(batch.query_starts, adapter)
        batch = dataclasses.replace(batch, adapters=adapters)
    batch = dataclasses.replace(batch, wanted=wanted)
    return model(padded, jnp.asarray(positions), cache, batch)


def test_the_numpy_model_equals_transformers(golden):
    checkpoint, stored = golden
    by_role = weights.by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    assert_equal(reference_model.logits(checkpoint.config, by_role, stored["token_ids"]), stored)
    answer = stored["answer"][:5]  # each token anew
    assert reference_model.generate(checkpoint.config, by_role, stored["token_ids"], len(answer)) == answer


@pytest.mark.parametrize(
    ("name", "uses_native"),
    [
        *(
            pytest.param(name, True, marks=[] if name in COVERING else pytest.mark.slow)
            for name in [*LLAMAS, *FAMILIES]
        ),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in COVERING),
    ],
)
def test_the_paged_model_equals_transformers(name, uses_native, monkeypatch):
    """Layers in a loop, with native products, and one by one; tiles that end inside of blocks and windows."""
    monkeypatch.setenv("JAXPAGED_NATIVE", str(int(uses_native)))
    block_size, tile_len = (4, 8) if uses_native else (16, 1)
    model = loading.open_checkpoint(GOLDENS / name).model(LoadAs(jnp.dtype("float32")))
    golden = stored(name)
    assert_equal(paged_logits(model, golden["token_ids"], block_size, tile_len), golden)


@pytest.mark.parametrize("name", ["gqa_tied", "families/gpt_oss"])
def test_of_the_last_layer_only_what_is_wanted_is_computed(name):
    """What is wanted has the same bits, and so have all K and V; with biases and experts, too."""
    checkpoint, token_ids = loading.open_checkpoint(GOLDENS / name), stored(name)["token_ids"][:24]
    model = checkpoint.model(LoadAs(jnp.dtype("float32")))
    wanted = np.isin(np.arange(24), [7, 18])  # of the second of three tiles nothing
    run = jax.jit(lambda model, wanted: passed(model, token_ids, 4, 8, wanted=wanted))
    some, some_cache = run(model, jnp.asarray(wanted))
    all_, all_cache = run(model, jnp.ones(24, bool))
    np.testing.assert_array_equal(some[wanted], all_[wanted])
    jax.tree.map(np.testing.assert_array_equal, some_cache, all_cache)
    if model.form.own == "native":
        assert (some != all_).any(axis=1).tolist() == (~wanted).tolist()


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "gpt_oss"])
def test_layers_in_a_loop_equal_transformers_where_xla_multiplies(name, monkeypatch):
    """Some layers have windows and RoPEs of their own; others sinks, biases and experts."""
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    stored_, checkpoint = stored(f"families/{name}"), loading.open_checkpoint(GOLDENS / "families" / name)
    model = checkpoint.model(LoadAs(jnp.dtype("float32"), loop_over_layers=True))
    assert model.form == LayerForm("xla", "xla", loops=True)
    assert_equal(paged_logits(model, stored_["token_ids"], 16, 1), stored_)


@pytest.mark.parametrize(
    "name",
    slow_and_nightly(["gemma3_text", "gpt_oss", "llama4_text", "gemma4_text", "gemma4_large"], ["gpt_oss"]),
)
def test_the_engine_answers_as_transformers_does(name):
    """The models have windows in some layers, or sinks and experts, or chunks. Passes show the rest."""
    golden = stored(f"families/{name}")
    llm = LLM(GOLDENS / "families" / name, max_num_seqs=2, block_size=8, num_blocks=80, max_model_len=96)
    params = SamplingParams(max_tokens=len(golden["answer"]), temperature=0, ignore_eos=True)
    prompt = golden["token_ids"]
    results = llm.generate([prompt, prompt[:33]], params, use_tqdm=False)
    assert results[0].outputs[0].token_ids == golden["answer"]


def test_every_family_has_a_golden():
    found = {
        json.loads((GOLDENS / name / "config.json").read_text())["model_type"]
        for name in [*LLAMAS, *FAMILIES]
    }
    assert found == BY_TYPE.keys() | WRAPPER_OF.keys()


def test_blocks_before_the_window_may_be_gone():
    """Tiles one after another; what no later token sees is poisoned, and the null block put in its place."""
    golden, checkpoint = stored("mistral_window"), loading.open_checkpoint(GOLDENS / "mistral_window")
    config, num_tokens = checkpoint.config, len(golden["token_ids"])
    block_size, tile_len = 4, 10
    num_blocks = -(-num_tokens // block_size)
    model = checkpoint.model(LoadAs(jnp.dtype("float32")))

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
        token_ids = jnp.asarray(golden["token_ids"][start : start + tile_len], jnp.int32)
        batch = batch_of(table, positions, tile_len, block_size)
        logits, cache = step(token_ids, jnp.asarray(positions), cache, batch)
        want = golden["logits"][start : start + tile_len]
        np.testing.assert_allclose(logits, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert num_gone > 0


def test_bfloat16_stays_near_float32():
    """Two layers of bfloat16 (8 bits of fraction): logits within a few percent of their spread."""
    exact = paged_logits(tiny.load(LoadAs(jnp.dtype("float32"))), list(range(30)), 8, 10)
    model = tiny.load(LoadAs(jnp.dtype("bfloat16")))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    near = paged_logits(model, list(range(30)), 8, 10).astype(np.float32)
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
    changed = {name: w for name, w in (tiny.weights() | change).items() if w is not None}
    with pytest.raises(InputError, match=message):
        weights.check_weights(tiny.CONFIG, NAMES, changed)
    with pytest.raises(InputError, match=message):
        Decoder(StoredWeights(tiny.CONFIG, NAMES, changed, LoadAs(jnp.dtype("float32"))))


def test_random_weights_are_those_of_the_config():
    drawn = weights.random_weights(tiny.CONFIG, NAMES, seed=1)
    assert {name: w.shape for name, w in drawn.items()} == dict(names.stored_shapes(tiny.CONFIG, NAMES))
    assert names.num_weights(tiny.CONFIG) == sum(w.size for w in drawn.values())
