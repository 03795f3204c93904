"""Heads that draft: their arithmetic, against vLLM's and a head in NumPy."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.memory import features
from jaxpaged.models import loading, lora
from jaxpaged.models.drafting import eagle3, mtp
from jaxpaged.models.drafting.head import Head
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import by_role
from reference import draft_head
from tests import tiny, tiny_mtp
from tests.models.test_decoder import batch_of

GOLDENS = Path(__file__).parents[1] / "goldens" / "eagle3"
FLOAT32 = LoadAs(jnp.dtype("float32"))
TOLERANCE = 3e-5


def computed(head: Head, embedded, hidden, taps, of_model=lambda x: x):
    """Run a head over positions from 0 on: its features, hidden states, own features, and logits."""
    n = len(embedded)

    @jax.jit
    def run(head, embedded, hidden, taps):
        cache, _ = features.taken(head.create_cache(4, 4))
        batch = batch_of(np.array([3, 1, 2]), np.arange(n, dtype=np.int32), n, 4)
        given = head.features(hidden, taps)
        out, own, _ = head(embedded, given, jnp.arange(n), cache, batch)
        return given, out, own, head.logits(out, of_model)

    return map(np.asarray, run(head, embedded, hidden, taps))


@pytest.mark.parametrize("name", ["plain", "normed"])
def test_an_eagle3_head_equals_vllms_and_the_numpy_head(name):
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    chosen = golden.pop("chosen")
    told = {key: np.array(value, np.float32) for key, value in golden.items()}
    served = dataclasses.replace(tiny.CONFIG, vocab_size=61, hidden_size=24)
    found = eagle3.open_head(str(GOLDENS / name), served)
    taps = np.split(told["taps"], 3, axis=1)

    weights = by_role(found.config, eagle3.NAMES, found.tensors)
    given = draft_head.features(found.config, weights, taps)
    hidden, own = draft_head.entries(found.config, weights, told["embedded"], given)
    logits = hidden @ weights["lm_head.weight"].T
    oracle = {"features": given, "hidden": hidden, "own": own, "logits": logits}

    given, hidden, own, logits = computed(found.load(FLOAT32), told["embedded"], taps[0], taps)
    assert np.isneginf(np.delete(logits, chosen, axis=1)).all()
    ours = {"features": given, "hidden": hidden, "own": own, "logits": logits[:, chosen]}
    for key in ours:
        np.testing.assert_allclose(oracle[key], told[key], atol=TOLERANCE)
        np.testing.assert_allclose(ours[key], told[key], atol=TOLERANCE)


@pytest.mark.parametrize(("uses_native", "adapter"), [(False, None), (True, 1)])
def test_hidden_states_behind_layers_equal_the_numpy_models(uses_native, adapter, monkeypatch):
    """Layers one by one, as a GPU has them by default; and in a loop, with an adapter, here of zeros."""
    monkeypatch.setenv("JAXPAGED_NATIVE", str(int(uses_native)))
    model, behind, positions = tiny.load(FLOAT32), (0, 2), np.arange(9, dtype=np.int32)
    [token_ids] = tiny.prompts([9])
    batch = batch_of(np.array([3, 1, 2], np.int32), positions, 9, 4)
    if adapter is not None:
        lora.make_room(model, NAMES, num_adapters=1, rank=1)
        batch = dataclasses.replace(batch, adapters=np.full(1, adapter, np.int32))

    @jax.jit
    def run(model, batch):
        return model.tapped(
            jnp.asarray(token_ids), jnp.asarray(positions), model.create_cache(4, 4), batch, behind
        )

    _, found, _ = run(model, batch)
    oracle = draft_head.taps(tiny.CONFIG, tiny.reference_weights(), token_ids, behind)
    np.testing.assert_allclose(np.stack(found), oracle, atol=TOLERANCE, rtol=TOLERANCE)


def test_an_mtp_layer_equals_the_numpy_layer(tmp_path):
    checkpoint = loading.open_checkpoint(tiny_mtp.write(tmp_path))
    layer = mtp.open_layer(checkpoint)
    config, served = layer.config, checkpoint.config
    rng = np.random.default_rng(2)
    embedded, hidden = rng.standard_normal((2, 9, served.hidden_size), np.float32)
    weights = by_role(config, layer.names, checkpoint.load_weights())
    want_hidden, want_own = draft_head.entries(config, weights, embedded, hidden)
    given, out, own, logits = computed(layer.load(FLOAT32), embedded, hidden, [], lambda x: 2 * x)
    np.testing.assert_array_equal(given, hidden)
    np.testing.assert_allclose(out, want_hidden, atol=TOLERANCE)
    np.testing.assert_allclose(own, want_own, atol=TOLERANCE)
    np.testing.assert_array_equal(logits, 2 * out)


def test_files_without_an_mtp_layer_are_refused(tmp_path):
    for name, message in (
        (
            "families/glm4_moe",
            "method='mtp' is not for this model: the weights lack 'model.layers.3.shared_head",
        ),
        ("gqa_tied", "method='mtp' is not for this model: model_type='llama' must be one of 'glm4_moe'"),
    ):
        with pytest.raises(InputError, match=message):
            mtp.open_layer(loading.open_checkpoint(GOLDENS.parent / name))
