"""Layers by type: weights of a layer's own parts alone, and what no layer can be."""

import dataclasses

import pytest

from jaxpaged.checks import InputError
from jaxpaged.models import names
from jaxpaged.models.config import Experts
from jaxpaged.models.families import from_hf
from jaxpaged.models.files import safetensors_files
from tests import tiny, tiny_states
from tests.models.test_decoder import GOLDENS
from tests.models.test_families import hf


def test_a_weight_is_there_for_the_layers_that_have_its_part():
    """The model's weights are the file's, with nothing added for parts that a layer has not."""
    name = "nemotron_h_experts"
    config = from_hf(hf(name))
    assert [kind.parts for kind in config.layers] == [
        *((False, True, False), (False, False, True), (True, False, False)),
        *((False, False, True), (False, True, False), (False, False, True)),
    ]
    numbers = {"qkv.weight": [2], "mixer.in.weight": [0, 4], "attention_norm.weight": [0, 2, 4]}
    numbers |= {"mlp_norm.weight": [1, 3, 5], "up.weight": [3], "experts.up": [1, 5], "router.weight": [1, 5]}
    assert {role: [*names.layers_with(config, role)] for role in numbers} == numbers
    tensors = safetensors_files.load(GOLDENS / "families" / name)
    assert names.num_weights(config) == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mixer": None, "layers": (dataclasses.replace(tiny_states.FULL, attends=False, feeds=False),)},
            "a layer's parts=None must be attention, a mixer or a feed-forward part",
        ),
        ({"parallel": True}, "parallel=True must be False where a layer has one part"),
        ({"shared_norm": True}, "shared_norm=True must be False where a layer has one"),
        (
            {"normed_residual": True, "norm_place": "after"},
            "normed_residual=True must be False where norms come after parts alone",
        ),
        ({"mixer": None}, "layers with states must have a mixer, and only they"),
        (
            {"experts": Experts(num_experts=4, num_chosen=2, renormalise=True, dense_layers=(0,))},
            r"dense layers=\[0\] must be different ints in",
        ),
    ],
)
def test_layers_that_no_model_has_are_refused(change, message):
    config = tiny_states.config(tiny_states.MAMBA, *tiny_states.ONE_PART)
    with pytest.raises(InputError, match=message):
        dataclasses.replace(config, **change)


def test_options_that_layers_of_one_part_do_not_serve_are_refused():
    kinds = [kind for kind in tiny_states.ONE_PART if not kind.has_state]
    config = dataclasses.replace(tiny.CONFIG, layers=tuple(kinds))
    with pytest.raises(InputError, match="enable_lora=True must be False with layers that lack attention"):
        tiny.driver(lambda load_as: tiny_states.load(load_as, config), config, enable_lora=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "M-x", "layers_block_type": None}, "pattern='M-x' must be letters of"),
        ({"layers_block_type": ["mamba3"]}, "layers_block_type=.* must be a list of 'linear_attention', "),
        ({"attention_bias": True}, "attention_bias=True must be False or left out"),
    ],
)
def test_of_nemotron_h_other_layers_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf("nemotron_h") | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm_multipliers": [1.0]}, "ssm_multipliers=.* must be a list of numbers > 0, for z, x, B, C, dt"),
        (
            {"mlp_multipliers": [1.0, 0.0]},
            "mlp_multipliers=0.0 must be a list of numbers > 0, for gate, down",
        ),
        ({"mamba_d_head": 5}, "mamba_d_head=5 must be 48 / mamba_n_heads=8, or 'auto'"),
    ],
)
def test_of_falcon_h1_other_factors_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf("falcon_h1") | change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("jamba", {"attn_layer_offset": 4}, "attn_layer_offset=4 must be less than attn_layer_period=4"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ("minimax", {"sliding_window": 8}, "sliding_window=8 must be None or left out"),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor=0 must be a number > 0"),
        ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu' or left out"),
        ("mamba2", {"head_dim": 5}, "head_dim=5 must be 64 / num_heads=8"),
        ("falcon_mamba", {"time_step_rank": 0}, "time_step_rank=0 must be an int >= 1"),
    ],
)
def test_of_mambas_other_sizes_are_refused(name, change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name) | change)


def test_norms_of_olmo_hybrid_stand_where_a_layer_has_them():
    """Layers with states are normed before their parts, the one with attention after them."""
    config = from_hf(hf("olmo_hybrid"))
    of_roles = {
        role: [*names.layers_with(config, f"{role}.weight")]
        for role in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    }
    states, others = [0, 2], [1]
    assert [*of_roles.values()] == [states, others, states, others]
    assert config.mixer.most_beta == 2
    assert from_hf(hf("olmo_hybrid") | {"linear_allow_neg_eigval": False}).mixer.most_beta == 1
    assert from_hf(hf("olmo_hybrid") | {"rope_parameters": None}).layers[1].rope is None


def test_letters_of_nemotron_h_are_layers():
    said = hf("nemotron_h") | {"layers_block_type": None, "hybrid_override_pattern": "M-*M-"}
    assert from_hf(said) == from_hf(hf("nemotron_h"))
    said = hf("nemotron_h") | {"layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"]}
    assert from_hf(said) == from_hf(hf("nemotron_h"))
