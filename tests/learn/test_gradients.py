"""Gradients of the learner: against transformers' backward pass, and against finite differences."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.models import loading
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights
from jaxpaged.research.learn.learner import Learner, padded
from tests import tiny, tiny_lora
from tests.models.test_decoder import GOLDENS

FLOAT32 = LoadAs(jnp.dtype("float32"))
SHORT = 21  # tokens of the second sequence, as in make_gradients.py


def state_of(config, names, tensors) -> nnx.State:
    """Return tensors of a model's file as the engine keeps weights: gradients are moved alike."""
    return nnx.state(Decoder(StoredWeights(config, names, tensors, FLOAT32)))


@pytest.mark.parametrize(
    "name",
    [
        "families/qwen3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gqa_tied", "families/gemma3_text", "families/mixtral", "families/gpt_neox")
        ),
    ],
)
def test_gradients_equal_those_of_transformers(name):
    """A batch has two lengths and factors of both signs; weights have the engine's form."""
    checkpoint = loading.open_checkpoint(GOLDENS / name)
    golden = np.load(GOLDENS / name / "gradients.npz")
    ids = json.loads((GOLDENS / name / "golden.json").read_text())["token_ids"]
    learner = Learner(EngineConfig(**tiny.DEFAULTS), checkpoint.config, checkpoint.module_names)
    params = nnx.state(checkpoint.model(FLOAT32))
    tokens, lengths = padded([ids, ids[:SHORT]])
    factors = np.zeros((2, len(ids) - 1), np.float32)
    for row, length in zip(factors, lengths, strict=True):
        row[: length - 1] = np.cos(np.arange(length - 1))

    def loss(params):
        values = learner.log_probs(params, tokens, lengths)
        return jnp.sum(values * factors), values

    (_, values), found = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(values[0], golden["value"], atol=1e-4)
    assert not np.any(values[1, SHORT - 1 :])
    want = state_of(checkpoint.config, checkpoint.names, {k: golden[k] for k in golden if k != "value"})
    pairs = dict(nnx.to_flat_state(want))
    for path, its in nnx.to_flat_state(found):
        wanted = np.asarray(pairs.pop(path).get_value())
        scale = np.abs(wanted).max()
        assert scale > 0, path
        np.testing.assert_allclose(its.get_value(), wanted, atol=1e-4 * scale, err_msg=str(path))
    assert not pairs


@pytest.mark.slow
def test_gradients_of_an_adapter_alone_are_those_of_finite_differences(tmp_path):
    config = EngineConfig(**tiny.DEFAULTS | {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8})
    learner = Learner(config, tiny.CONFIG, NAMES)
    params = state_of(tiny.CONFIG, NAMES, tiny.weights())
    adapter = learner.adapter(tiny_lora.write(tmp_path / "adapter"))
    tokens, lengths = padded(tiny.prompts([37, 20]))

    @jax.jit
    def loss(adapter):
        return jnp.mean(learner.log_probs(params, tokens, lengths, adapter))

    found = jax.jit(jax.grad(loss))(adapter)
    assert found.keys() == adapter.keys()
    alone = learner.log_probs(params, tokens, lengths)
    assert np.abs(alone - learner.log_probs(params, tokens, lengths, adapter)).max() > 0.1
    for role, pair in adapter.items():
        for side, matrix in enumerate(pair):
            # Along the gradient the slope is largest beside float32's noise and the curvature.
            step = found[role][side] * (0.02 / jnp.linalg.norm(found[role][side]))

            def moved(sign, role=role, side=side, step=step):
                its = list(adapter[role])
                its[side] = its[side] + sign * step
                return float(loss({**adapter, role: tuple(its)}))

            slope, want = (moved(1) - moved(-1)) / 2, float(jnp.sum(found[role][side] * step))
            assert abs(slope - want) < 2e-2 * want, (role, side)
            # Padding of panels is zero, and stays so.
            assert not np.any(np.asarray(found[role][side])[np.asarray(matrix) == 0])


def test_what_has_no_gradient_and_wrong_shapes_are_refused():
    config = EngineConfig(**tiny.DEFAULTS)
    for changed, message in (
        ({"quantization": "int8"}, "^quantization='int8' must be None for a learner$"),
        ({"tensor_parallel_size": 2}, "^tensor_parallel_size=2 must be 1 for a learner$"),
    ):
        with pytest.raises(InputError, match=message):
            Learner(dataclasses.replace(config, **changed), tiny.CONFIG, NAMES)
    learner = Learner(config, tiny.CONFIG, NAMES)
    for tokens, lengths, message in (
        (np.zeros((2, 9)), [9], r"^tokens of shape \(2, 9\) with lengths of shape \(1,\) must be \[batch,"),
        (np.zeros((1, 129)), [9], r"^length=129 must be in \[2, max_model_len=128\]$"),
    ):
        with pytest.raises(InputError, match=message):
            learner.log_probs(nnx.State({}), tokens, lengths)
