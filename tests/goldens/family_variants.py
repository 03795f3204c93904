"""Tiny models of families, by name: what their configs say beside `SIZES`."""

from typing import Any

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 3.5],
    "partial_rotary_factor": 0.75,
}
WINDOW = {"sliding_window": 12}
OWN_SIZES = ("gpt2", "bloom", "mpt", "gpt_neo", "gptj", "gpt_bigcode")
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "gemma": {"head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, **WINDOW},
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
        **WINDOW,
    },
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "swiglu_limit": 1.5,
        **WINDOW,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4},
    "starcoder2": {"use_bias": True, **WINDOW},
    "falcon": {"multi_query": True, "bias": False},
    "falcon_grouped": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon_alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "gpt_neox": {"rotary_pct": 0.25, "use_parallel_residual": True},
    "gpt_neox_sequential": {"rotary_pct": 1.0, "use_parallel_residual": False},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "init_std": 0.25},
    "bloom": {"n_layer": 2, "n_head": 6, "hidden_size": 48},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "attn_config": {"clip_qkv": 1.0}},
}
TINY = {"hidden_size": 16, "intermediate_size": 24}
HALF_WINDOWED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FACTORS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
# The correction decides between groups of two experts, and the last layer alone has experts.
ROUTED = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
}
LLAMA4 = {
    **TINY,
    "head_dim": 8,
    "intermediate_size": 8,
    "intermediate_size_mlp": 24,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "moe_layers": [0, 2, 3],
    "num_experts_per_tok": 2,
    "attention_chunk_size": 12,
    "floor_scale": 16,
    "attn_scale": 0.5,
}
VARIANTS |= {
    "seed_oss": {**TINY, "head_dim": 8, "attention_bias": True, "attention_out_bias": True},
    "olmo3": {
        **TINY,
        **HALF_WINDOWED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    },
    "exaone4": {**TINY, **HALF_WINDOWED},
    "ernie4_5": {**TINY, "head_dim": 8, "use_bias": True},
    "helium": {**TINY, "head_dim": 4},
    "olmoe": {**TINY, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "cohere": {**TINY, "logit_scale": 0.25},
    "cohere_normed": {**TINY, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**TINY, **HALF_WINDOWED, "logit_scale": 0.25},
    "glm": {**TINY, "head_dim": 8, "attention_bias": True},
    "glm4": {**TINY, "head_dim": 8, "attention_bias": True},
    "granitemoe": {**TINY, **FACTORS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": {**TINY, **HALF_WINDOWED, "head_dim": 8},
    "cwm": {**TINY, **HALF_WINDOWED, "head_dim": 8, "rope_parameters": LLAMA3_ROPE},
    "vaultgemma": {
        **TINY,
        **HALF_WINDOWED,
        "head_dim": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
    },
    "stablelm": {**TINY, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm_parallel": {**TINY, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {**TINY, **ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "hunyuan_v1_dense": {
        **TINY,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "apertus": {**TINY, "rope_parameters": LLAMA3_ROPE},
    "minimax_m2": {
        **TINY,
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "dots1": {
        **TINY,
        **ROUTED,
        **WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "norm_topk_prob": True,
    },
    "qwen2_moe": {**TINY, **EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 12},
    "phimoe": {
        **TINY,
        "num_local_experts": 5,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
        # Transformers takes the factors of short sequences for long ones, too.
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.6],
            "long_factor": [1.0, 2.0],
            "short_mscale": 1.2,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
        },
    },
    "phi": {**TINY, "head_dim": 4},
    "granitemoeshared": {
        **TINY,
        **FACTORS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 12,
    },
    "arcee": {**TINY, "mlp_bias": True},
    "nemotron": {**TINY, "head_dim": 8},
    # Chunks end within tiles; queries of the last layer grow every 16 tokens; the second layer is dense.
    "llama4_text": LLAMA4,
    "gemma3n_text": {
        **TINY,
        **WINDOW,
        "head_dim": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 61,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.0, 0.0, 0.5],
    },
}
GEMMA4 = {
    **TINY,
    **WINDOW,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
# As the small models are, and as the large one is: with fewer KV heads where all tokens are seen.
VARIANTS |= {
    "gemma4_text": {
        **GEMMA4,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 61,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_large": {
        **(GEMMA4 | {"num_key_value_heads": 4, "num_global_key_value_heads": 2}),
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}
BESIDE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
VARIANTS["gemma4_experts"] = VARIANTS["gemma4_large"] | BESIDE
