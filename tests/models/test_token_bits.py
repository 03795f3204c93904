"""Bits of a token: the same in a tile of a prompt as in a decoding step, in programs as users have them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.models import loading
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights, random_weights
from jaxpaged.sampling import score
from tests import tiny_latents
from tests.kernels import native_targets
from tests.models.test_decoder import GOLDENS

FLOAT32 = LoadAs(jnp.dtype("float32"), loop_over_layers=True)
ROWS, LENGTH, BLOCK_SIZE = 4, 32, 8
BLOCKS = 1 + np.arange(ROWS * LENGTH // BLOCK_SIZE, dtype=np.int32).reshape(ROWS, -1)
SLOTS = (BLOCKS[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(ROWS, LENGTH)
NO_NATIVE = native_targets.why_not("float32")

pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.skipif(bool(NO_NATIVE), reason=f"no native kernels: {NO_NATIVE}"),
]


def wide_gemma3n() -> Decoder:
    """Make a Gemma 3n whose widths fill vectors, as those of all real ones do: 16 divides them."""
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / "gemma3n")
    c = checkpoint.config
    assert c.layer_inputs is not None
    inputs = dataclasses.replace(c.layer_inputs, width=16)
    c = dataclasses.replace(c, hidden_size=32, intermediate_size=32, layer_inputs=inputs)
    return Decoder(StoredWeights(c, checkpoint.names, random_weights(c, checkpoint.names, 0), FLOAT32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "families/gemma2",  # caps of scores and logits
        "wide gemma3n",  # AltUp, Laurel, inputs of layers, sparse activations
        pytest.param("families/gpt_oss", marks=pytest.mark.nightly),  # sinks, windows, experts
        pytest.param("families/bloom", marks=pytest.mark.nightly),  # slopes
        pytest.param("latents", marks=pytest.mark.nightly),  # products of each head, and a window
    ],
)
def test_a_token_has_the_same_bits_in_a_tile_and_in_a_decoding_step(name):
    """Four sequences of 32 tokens: K and V of each token, and the log-probability of some token behind it, as
    scores of prompts and of answers tell it. In four tiles, and four tokens at a time.
    """
    if name == "wide gemma3n":
        model = wide_gemma3n()
    elif name == "latents":
        kinds = tiny_latents.FULL, tiny_latents.WINDOW
        model = tiny_latents.load(FLOAT32, tiny_latents.config(*kinds))
    else:
        model = loading.open_checkpoint(GOLDENS / name).model(FLOAT32)
    graphdef, params = nnx.split(model)
    token_ids = np.random.default_rng(0).integers(3, 60, (ROWS, LENGTH)).astype(np.int32)

    @jax.jit
    def compute(params, cache, token_ids, starts, temperature=None):
        model, tile_len = nnx.merge(graphdef, params), token_ids.shape[1]
        positions = starts[:, None] + jnp.arange(tile_len)
        batch = PassBatch(
            slot_mapping=jnp.take_along_axis(jnp.asarray(SLOTS), positions, axis=1).reshape(-1),
            block_tables=jnp.asarray(BLOCKS),
            query_starts=starts,
            seq_lens=starts + tile_len,
            implementation="native",
        )
        hidden, cache = model(token_ids.reshape(-1), positions.reshape(-1), cache, batch)
        nothing = jnp.zeros(token_ids.size, jnp.int32)
        scores = score(model.logits(hidden), token_ids.reshape(-1), nothing, temperature)
        return scores.logprob.reshape(token_ids.shape), cache

    empty = model.create_cache(1 + BLOCKS.size, BLOCK_SIZE)
    scores, cache = compute(params, empty, token_ids, np.zeros(ROWS, np.int32))
    assert np.ptp(scores) > 1
    for place in range(LENGTH):
        starts = np.full(ROWS, place, np.int32)
        one, same = compute(params, cache, token_ids[:, place : place + 1], starts, np.ones(ROWS, np.float32))
        np.testing.assert_array_equal(one[:, 0], scores[:, place])
        jax.tree.map(np.testing.assert_array_equal, same, cache)
