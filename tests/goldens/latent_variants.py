"""Tiny models with latent attention, by name: what their configs say beside `SIZES`."""

from typing import Any

RANKS = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **RANKS,
        **EXPERTS,
        **GROUPS,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "rope_parameters": YARN,
    },
    # As V2-Lite: one product of queries, and experts chosen among all.
    "deepseek_v2_lite": {
        **RANKS,
        **EXPERTS,
        "q_lora_rank": None,
        "attention_bias": True,
        "rope_parameters": PLAIN,
    },
    "deepseek_v3": {**RANKS, **EXPERTS, **GROUPS, "rope_parameters": YARN},
    "deepseek_v3_plain": {
        **RANKS,
        **EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_parameters": PLAIN,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **RANKS,
        **EXPERTS,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": PLAIN,
    },
    "mistral4": {
        **RANKS,
        **EXPERTS,
        **GROUPS,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 16,  # queries grow from the position 16 on
            "llama_4_scaling_beta": 0.5,
            "partial_rotary_factor": 8 / 14,
        },
    },
    "minicpm3": {
        **RANKS,
        "num_hidden_layers": 2,
        "scale_emb": 3.0,
        "scale_depth": 1.1,
        "dim_model_base": 16,
        "tie_word_embeddings": False,
        "rope_parameters": PLAIN,
    },
}
