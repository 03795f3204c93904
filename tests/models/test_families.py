"""What families read of configs, and the table of them; experts that nobody chose; what depth costs."""

import collections
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.models import decoder, experts, families, layers, loading
from jaxpaged.models.config import LongScaling, Rope
from jaxpaged.models.families import from_hf
from tests.models.test_decoder import GOLDENS, batch_of


def hf(name):
    return json.loads((GOLDENS / "families" / name / "config.json").read_text())


def phi3_rope():
    return hf("phi3")["rope_parameters"]


def test_the_readmes_table_of_families_is_the_registry():
    assert families.markdown_table() in (Path(__file__).parents[2] / "README.md").read_text()


def test_an_unknown_model_type_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match=r"model_type='mamba' must be one of 'llama', 'mistral', .*'mpt'$"):
        from_hf({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False must be True or left out"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16 must be 32 or left out"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "=True must be False or left out"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False must be True or left out"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] must be \[\] or left out"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"experts a token=9 must be an int in \[1, 5\]"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types=.* must be a list .* for each layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention=True must be False or left out"),
        ("phi3", {"rope_parameters": phi3_rope() | {"long_factor": [1.0]}}, "must be 3 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=.* must be a list, one for each layer"),
        ("starcoder2", {"hidden_act": "mish"}, "hidden_act='mish' must be one of silu"),
    ],
)
def test_what_is_another_arithmetic_is_refused(name, change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name) | change)


def test_what_a_config_leaves_out_is_what_transformers_takes():
    assert from_hf(hf("gemma2") | {"final_logit_softcapping": None}).logit_soft_cap is None
    said = hf("gemma2")
    del said["final_logit_softcapping"], said["layer_types"]
    config = from_hf(said)
    assert config.logit_soft_cap == 30
    assert [kind.sliding_window for kind in config.layers] == [12, None]
    old = {name: value for name, value in hf("phi3").items() if name != "rope_parameters"}
    spread = dict(hf("phi3")["rope_parameters"])
    del spread["original_max_position_embeddings"], spread["rope_theta"]
    old |= {"rope_scaling": spread, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    assert from_hf(old) == from_hf(hf("phi3"))


def test_only_layers_that_all_have_a_window_free_their_blocks():
    config = from_hf(hf("gemma3_text"))
    assert config.sliding_window is None
    windows = [dataclasses.replace(config.layers[0], sliding_window=window) for window in (8, 12)]
    assert dataclasses.replace(config, layers=tuple(windows)).sliding_window == 12


def test_short_sequences_have_the_short_factors():
    scaling = LongScaling(
        short_factors=(1.0, 2.0), long_factors=(1.0, 8.0), original_max_len=32, attention_factor=1.5
    )
    rope = Rope(theta=100.0, dim=4, scaling=scaling)
    for max_len, want in ((32, [1, 0.05]), (33, [1, 0.0125])):
        frequencies, factor = layers.rope_frequencies(rope, max_len)
        np.testing.assert_allclose(frequencies, want, rtol=1e-6)
        assert factor == 1.5


@pytest.fixture
def moe():
    return loading.open_checkpoint(GOLDENS / "families" / "qwen3_moe").model(jnp.dtype("float32"))


def test_an_expert_that_no_token_chose_is_not_computed(moe, monkeypatch):
    """Not for those who pad the batch either."""
    computed = collections.Counter()
    call = experts.ExpertLinear.__call__

    def counted(self, x, layer, expert):
        jax.debug.callback(lambda e: computed.update([int(e)]), expert)
        return call(self, x, layer, expert)

    monkeypatch.setattr(experts.ExpertLinear, "__call__", counted)
    mlp = moe.layers.mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    is_padding = jnp.array([False, True, True, True])
    weights = mlp.choose(x, 0)
    mlp(x, 0, is_padding).block_until_ready()
    jax.effects_barrier()
    chosen = np.flatnonzero(weights[0])
    assert len(chosen) == 2
    assert computed == {int(expert): 2 for expert in chosen}  # gate and up, and down
    everyone = np.flatnonzero(np.any(weights > 0, axis=0))
    assert len(everyone) > 2, "the others would have chosen more"


def test_a_tokens_experts_add_up_alike_in_any_company(moe):
    mlp = moe.layers.mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
    nobody = jnp.zeros(8, bool)
    together = mlp(x, 1, nobody)
    for row in range(8):
        alone = mlp(x, 1, jnp.arange(8) != row)
        np.testing.assert_array_equal(alone[row], together[row])


def program(config):
    """Of one pass, in words."""
    model = decoder.abstract(config, jnp.dtype("float32"), loop_over_layers=True)
    graphdef, params = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(5, 8))
    positions = np.arange(32, dtype=np.int32)
    batch = batch_of(np.arange(1, 5, dtype=np.int32), positions, 8, 8)

    def run(params, cache):
        return nnx.merge(graphdef, params)(jnp.asarray(positions), jnp.asarray(positions), cache, batch)

    return str(jax.make_jaxpr(run)(params, cache))


@pytest.mark.parametrize("name", ["gemma3_text", "smollm3", "gpt_oss"])
def test_a_program_does_not_grow_with_the_number_of_layers(name):
    """With layers of several kinds in a period, too."""
    config = from_hf(hf(name))
    deeper = dataclasses.replace(config, layers=config.layers * 3)
    assert program(config).count(" = ") == program(deeper).count(" = ")
