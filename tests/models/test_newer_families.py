"""Newer families: what they refuse, and how configs of before transformers knew them are read."""

import pytest

from jaxpaged.checks import InputError
from jaxpaged.models.families import from_hf
from tests.models.test_families import hf, without


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"router_scaling_factor": 2.0}, "router_scaling_factor=2.0 must be 1 or left out"),
        ("glm4_moe", {"moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq=\[0, 1, 1\] must be 1 or left out"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 must be 0 or left out"),
        (
            "laguna",
            {"mlp_layer_types": ["sparse"]},
            "mlp_layer_types=.* must be a list of 'dense' and 'sparse'",
        ),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 6, 3]},
            "a layer's num_q_heads=3 must be a multiple",
        ),
        ("laguna", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] must be \[0\] or left out"),
        ("laguna", {"gating": "none"}, "gating='none' must be True, 'per-head' or 'per-element'"),
        ("afmoe", {"n_group": 2}, "n_group=2 must be 1 or left out"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1]}, "moe_topk=.* must be an int, or the same for each layer"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [8, 8]}, "moe_intermediate_size=8 must be 12"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5 must be a number of"),
        ("exaone_moe", {"is_moe_layer": [False, True, True]}, "is_moe_layer=.* must be .* or left out"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba3", "attention"]},
            "layer_types=.* must be 'mamba' or 'attention' for each layer",
        ),
        ("granitemoehybrid_states", {"mamba_d_head": 5}, "mamba_d_head=5 must be 64 / mamba_n_heads=8, or"),
        ("granitemoehybrid_states", {"time_step_limit": [-1, 2]}, "time_step_limit=-1 must be two numbers"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "value heads=3 must be a multiple of the 2 key"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 must be 1 or left out"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types=.* must be a list of 'full_att"),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta=.* must be a list of numbers >= 0"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types=.* must be a list of"),
        ("internlm3", {"bias": False, "mlp_bias": None}, "qkv_bias=True must be False, as bias is"),
        ("mimo_v2", {"attention_projection_layout": None}, "layout=None must be 'fused_qkv'"),
        ("mimo_v2", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern=.* one for each layer"),
        (
            "mimo_v2",
            {"add_full_attention_sink_bias": True},
            "add_full_attention_sink_bias=True must be False",
        ),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts=8 must be 0 or left out"),
        ("cohere2_moe", {"expert_selection_fn": "sparsemax"}, "must be 'softmax' or 'sigmoid'"),
    ],
)
def test_what_is_another_arithmetic_is_refused(name, change, message):
    with pytest.raises(InputError, match=message):
        from_hf(hf(name) | change)


def test_files_of_before_transformers_knew_a_model_are_read():
    """Their fields have other names, or say the same once more."""
    said = without(hf("sarvam_moe"), "n_routed_experts", "n_shared_experts", "attention_bias")
    old = {"num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": True}
    assert from_hf(said | old) == from_hf(hf("sarvam_moe"))
    said = without(hf("exaone"), "num_hidden_layers", "rms_norm_eps", "hidden_act")
    old = {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}
    assert from_hf(said | old) == from_hf(hf("exaone"))
    said = without(hf("internlm3"), "attention_bias", "mlp_bias")
    assert from_hf(said | {"qkv_bias": True, "bias": True}) == from_hf(hf("internlm3"))
    said = without(hf("hunyuan_v1_moe"), "moe_topk", "num_experts")
    each = {
        "moe_topk": [2, 2],
        "num_experts": 5,
        "moe_intermediate_size": [12, 12],
        "num_shared_expert": [1, 1],
    }
    assert from_hf(said | each) == from_hf(hf("hunyuan_v1_moe"))
    assert from_hf(hf("laguna") | {"mlp_only_layers": [0]}) == from_hf(hf("laguna"))
    said = without(hf("cohere2_moe_rms"), "layer_types", "mlp_layer_types")
    config = from_hf(said | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 20})
    assert [kind.sliding_window for kind in config.layers] == [None, 12, 12, 12]
    assert [kind.rope is None for kind in config.layers] == [False] * 4
    assert (config.experts.dense_layers, config.experts.dense_size) == ((0,), 20)
    assert from_hf(hf("mimo_v2")) == from_hf(hf("mimo_v2_flash"))
