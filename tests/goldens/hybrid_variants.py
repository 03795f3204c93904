"""Tiny models with layers of states, by name: what their configs say beside `SIZES`."""

from typing import Any

DELTA = {
    "head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 20,
}
NEMOTRON = {
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_min": 1e-12,  # transformers takes it for a limit of time steps in prompts alone
}
FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.75, 1.25],
    "key_multiplier": 0.375,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.875,
    "ssm_multipliers": [0.75, 1.25, 1.5, 0.625, 0.875],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
MAMBA_1 = {"num_hidden_layers": 2, "state_size": 6, "time_step_rank": 5}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "lfm2": {**CONV, "conv_L_cache": 3, "block_multiple_of": 8, "tie_word_embeddings": False},
    "lfm2_moe": {
        **CONV,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "conv_bias": True,
    },
    "granitemoehybrid_states": {**MAMBA, "num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoehybrid_both": {**MAMBA, "num_local_experts": 4, "mamba_conv_bias": False},
    "bamba": {
        **{name: value for name, value in MAMBA.items() if name.startswith("mamba")},
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_proj_bias": True,
    },
    "nemotron_h": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "use_bias": True,
        "mlp_bias": True,
    },
    "nemotron_h_experts": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 16,
        "use_conv_bias": False,
    },
    "falcon_h1": FALCON_H1,
    "falcon_h1_normed": {
        **FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
    },
    "mamba": MAMBA_1,
    "falcon_mamba": {**MAMBA_1, "use_bias": True, "tie_word_embeddings": False},
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "olmo_hybrid": {
        **{name: value for name, value in DELTA.items() if name.startswith(("linear", "layer", "num"))},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
