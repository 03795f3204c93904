"""Make a tiny model of each family, in families/, and what transformers computes for it.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0 (from seed_oss on, 5.24.0):
    python tests/goldens/make_families.py [name ...]
Each folder gets config.json, model.safetensors (in float16, which all numbers were rounded to beforehand) and
golden.json: token ids, the logits after every third of them, and the greedy answer, with the smallest gap
between its two best logits. All is computed in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from make_tiny_llamas import greedy
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent / "families"
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
SLIDING_LAST = {**WINDOW, "num_hidden_layers": 3}
SLIDING_LAST["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
SIGMOIDS = {**EXPERTS, "num_experts": 5, "num_shared_experts": 2, "num_hidden_layers": 3}
GPT = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 128, "n_inner": 40}
NEWER: dict[str, dict[str, Any]] = {
    "ministral3": {
        **TINY,
        **WINDOW,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,  # queries grow from the position 16 on
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "granite_swa": {**TINY, **FACTORS, **SLIDING_LAST, "layer_rope_theta": [0, 500.0, 10000.0]},
    "granitemoe_swa": {
        **TINY,
        **FACTORS,
        **SLIDING_LAST,
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
        "attention_bias": True,
    },
    "granitemoehybrid": {
        **TINY,
        **FACTORS,
        "num_local_experts": 0,
        "shared_intermediate_size": 20,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
    },
    "granitemoehybrid_experts": {
        **TINY,
        **FACTORS,
        "num_local_experts": 4,
        "shared_intermediate_size": 12,
        "layer_types": ["full_attention"] * 2,
        "mamba_n_heads": 4,
    },
    "exaone": {**TINY, "head_dim": 8, "rope_parameters": LLAMA3_ROPE},
    "exaone_moe": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "num_experts": 8,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "routed_scaling_factor": 1.5,
    },
    "solar_open": {
        **TINY,
        **(ROUTED | {"num_hidden_layers": 2, "first_k_dense_replace": 0}),
        "head_dim": 8,
        "attention_bias": True,
    },
    "hy_v3": {**TINY, **SIGMOIDS, "head_dim": 8, "router_scaling_factor": 1.5, "attention_bias": True},
    "hunyuan_v1_moe": {
        **TINY,
        "head_dim": 8,
        "intermediate_size": 12,
        "num_experts": 5,
        "moe_topk": 2,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "ernie4_5_moe": {
        **TINY,
        "use_bias": False,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 8,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 2,
        "num_hidden_layers": 4,
    },
    "afmoe": {
        **TINY,
        **SIGMOIDS,
        **WINDOW,
        "head_dim": 8,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    # Two and three query heads of a KV head; RoPE of half a head where a window is.
    "laguna": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "num_experts": 5,
        "head_dim": 8,
        "num_attention_heads_per_layer": [4, 6, 2],
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 0.7,
        "shared_expert_intermediate_size": 12,
        "rope_parameters": BY_KIND,
    },
    "laguna_elements": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "num_experts": 5,
        "head_dim": 8,
        "gating": "per-element",
        "num_attention_heads_per_layer": [6, 2, 4],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "attention_bias": True,
        "shared_expert_intermediate_size": 12,
    },
    # Keys of 12 coordinates, values of 8; 4 KV heads where a window is, else 2.
    "mimo_v2_flash": {
        **TINY,
        **(ROUTED | {"n_shared_experts": None, "first_k_dense_replace": None}),
        **SLIDING_LAST,
        "num_attention_heads": 8,
        "head_dim": 12,
        "v_head_dim": 8,
        "attention_bias": True,
        "attention_value_scale": 0.6,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.334,
            },
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
    },
    "cohere2_moe": {
        **TINY,
        **SLIDING_LAST,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "logit_scale": 0.25,
        "intermediate_size": 12,
        "prefix_dense_intermediate_size": 20,
        "num_experts": 5,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
    },
    "cohere2_moe_rms": {
        **TINY,
        "head_dim": 8,
        "num_hidden_layers": 4,
        **WINDOW,
        "intermediate_size": 12,
        "rms_norm_eps": 1e-4,
        "num_experts": 5,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "attention_bias": True,
    },
    "flex_olmo": {**TINY, "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True},
    "olmo": {**TINY, "clip_qkv": 1.5},
    "mellum": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "head_dim": 8,
        "num_experts": 5,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {kind: {**rope, "partial_rotary_factor": 1.0} for kind, rope in BY_KIND.items()},
    },
    "flint": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "head_dim": 8,
        "num_experts": 5,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 12,
        "attention_bias": True,
    },
    "kolibri1": {
        **TINY,
        **EXPERTS,
        **SLIDING_LAST,
        "head_dim": 8,
        "num_experts": 5,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 12,
    },
    "sarvam_moe": {**TINY, **ROUTED, "head_dim": 8, "attention_bias": True},
    "hyperclovax": {**TINY, **FACTORS, "head_dim": 8},
    "internlm3": {**TINY, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {**TINY, "head_dim": 8, "attention_bias": True},
    "jais2": {**TINY, "head_dim": 8},
    "nanochat": {**TINY, "head_dim": 8, "final_logit_softcapping": 5.0, "attention_bias": True},
    "gpt_neo": {
        "hidden_size": 24,
        "num_heads": 3,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 12,
        "max_position_embeddings": 128,
    },
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_bigcode": GPT,
    "gpt_bigcode_heads": {**GPT, "multi_query": False},
}
VARIANTS |= NEWER
MODEL_TYPES = {"falcon_grouped": "falcon", "falcon_alibi": "falcon", "gpt_neox_sequential": "gpt_neox"}
MODEL_TYPES |= {"cohere_normed": "cohere", "stablelm_parallel": "stablelm"}
MODEL_TYPES |= {"granitemoehybrid_experts": "granitemoehybrid", "laguna_elements": "laguna"}
MODEL_TYPES |= {"cohere2_moe_rms": "cohere2_moe", "gpt_bigcode_heads": "gpt_bigcode"}
MODEL_TYPES |= dict.fromkeys(("gemma4_large", "gemma4_experts"), "gemma4_text")
# Models of text and images: what is inside, and as small a vision part as there may be.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
TEXT = {**TINY, "head_dim": 8}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", **TEXT, **HALF_WINDOWED, "query_pre_attn_scalar": 24},
        {"model_type": "siglip_vision_model", **CLIP},
    ),
    "mistral3": (
        {"model_type": "mistral", **TEXT, "sliding_window": None},
        {"model_type": "pixtral", **CLIP},
    ),
    "llama4": (
        {"model_type": "llama4_text", **LLAMA4},
        {
            "hidden_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 8,
            "projector_input_dim": 8,
            "projector_output_dim": 8,
        },
    ),
    "gemma4": (
        {"model_type": "gemma4_text", **VARIANTS["gemma4_large"], "pad_token_id": 0},
        {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 8,
        },
    ),
    "cohere2_vision": (
        {"model_type": "cohere2_moe", **NEWER["cohere2_moe"], "shared_expert_combination_strategy": "sum"},
        {"model_type": "siglip_vision_model", **CLIP},
    ),
    "llava": ({"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **CLIP}),
    "internvl": (
        {"model_type": "qwen3", **TEXT},
        {**CLIP, "image_size": [28, 28], "patch_size": [14, 14], "use_mask_token": False},
    ),
    "qwen2_vl": (
        {**TINY, "hidden_size": 32, "rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 8, "num_heads": 1, "hidden_size": 32},
    ),
    "qwen2_5_vl": (
        {**TINY, "hidden_size": 32, "rope_parameters": MROPE},
        {**QWEN_VISION, "out_hidden_size": 32},
    ),
    "qwen3_vl": ({**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, QWEN3_VISION),
    "qwen3_vl_moe": (
        {**TEXT, **EXPERTS, "num_experts": 5, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_VISION,
    ),
}
UNTIED = ("mistral3", "internvl")
SEEDS = {
    "mixtral": 100,
    "gemma3n_text": 104,
    "granitemoehybrid": 100,
}  # where the answer would hang on a rounding
IMPLEMENTATIONS = {"falcon_alibi": "sdpa"}  # its eager attention adds the slopes twice
# Those that came last, in their order: the seeds of the others stay what they were.
ADDED = ("llama4_text", "llama4", "gemma3n_text", "gemma4_text", "gemma4_large", "gemma4", "gemma4_experts")
ADDED += (*NEWER, "cohere2_vision")
# Models of transformers 5.24 that need an image; their decoder does not.
NEEDS_IMAGES = ("llama4",)
NUM_TOKENS, EVERY = 40, 3


def main(names: list[str]) -> None:
    first = [name for name in (*VARIANTS, *WRAPPERS) if name not in ADDED]
    for seed, name in enumerate([*first, *ADDED]):
        if not names or name in names:
            torch.manual_seed(SEEDS.get(name, seed))
            write(name, wrapped(name) if name in WRAPPERS else made(name, VARIANTS[name]))
    if not names or "gemma3n" in names:
        wrap_gemma3n()
    if not names or "mimo_v2" in names:
        fuse_mimo()


def fuse_mimo() -> None:
    """Write MiMo V2 Flash's model as MiMo V2.5 has it: transformers has no such type."""
    inside, folder = HERE / "mimo_v2_flash", HERE / "mimo_v2"
    folder.mkdir(exist_ok=True)
    said = json.loads((inside / "config.json").read_text())
    ropes, heads = said.pop("rope_parameters"), said["num_key_value_heads"]
    sliding = [int(kind == "sliding_attention") for kind in said.pop("layer_types")]
    said |= {
        "model_type": "mimo_v2",
        "architectures": ["MiMoV2ForCausalLM"],
        "attention_projection_layout": "fused_qkv",
        "hybrid_layer_pattern": sliding,
        "moe_layer_freq": [int(kind == "sparse") for kind in said.pop("mlp_layer_types")],
        "layernorm_epsilon": said.pop("rms_norm_eps"),
        "swa_num_attention_heads": said["num_attention_heads"],
        "swa_num_key_value_heads": 2 * heads,
        "swa_head_dim": said["head_dim"],
        "swa_v_head_dim": said["v_head_dim"],
        "sliding_window": said["sliding_window"] - 1,
        "sliding_window_size": said["sliding_window"] - 1,
        "rope_theta": ropes["full_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": ropes["full_attention"]["partial_rotary_factor"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(said, indent=2))
    tensors = load_file(inside / "model.safetensors")
    for key in [key for key in tensors if ".q_proj." in key]:
        names = [key.replace("q_proj", f"{x}_proj") for x in "qkv"]
        parts = [tensors.pop(name).unflatten(0, (heads, -1)) for name in names]
        tensors[key.replace("q_proj", "qkv_proj")] = torch.cat(parts, dim=1).flatten(0, 1).contiguous()
    tensors["visual.patch_embed.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "golden.json").write_text((inside / "golden.json").read_text())


def wrap_gemma3n() -> None:
    """Write Gemma 3n's text model as the model of text, images and sound has it: that needs timm."""
    inside, folder = HERE / "gemma3n_text", HERE / "gemma3n"
    folder.mkdir(exist_ok=True)
    config = AutoConfig.for_model("gemma3n", text_config=json.loads((inside / "config.json").read_text()))
    config.save_pretrained(folder)
    its = load_file(inside / "model.safetensors").items()
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in its}
    tensors |= {f"model.{part}.weight": torch.zeros(1) for part in ("vision_tower", "audio_tower")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "golden.json").write_text((inside / "golden.json").read_text())


def made(name: str, variant: dict[str, Any]) -> torch.nn.Module:
    model_type = MODEL_TYPES.get(name, name)
    sizes = {} if model_type in OWN_SIZES else SIZES
    few = {"vocab_size": SIZES["vocab_size"], "initializer_range": 0.25, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **few | sizes | variant)
    attention = IMPLEMENTATIONS.get(name, "eager")
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def wrapped(name: str) -> torch.nn.Module:
    text, vision = WRAPPERS[name]
    untied = {"tie_word_embeddings": False} if name in UNTIED else {}
    parts = {"text_config": {**SIZES, **text}, "vision_config": vision}
    config = AutoConfig.for_model(
        name,
        **parts,
        **untied,
        image_token_id=60,
        **(
            {"video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
            if "qwen" in name
            else {}
        ),
    )
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def write(name: str, model: torch.nn.Module) -> None:
    is_less_one = name.startswith("gemma") and not name.startswith(("gemma3n", "gemma4"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            shake(parameter_name, parameter, is_less_one=is_less_one)
            parameter.copy_(parameter.half().float())
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.normal_(std=0.2).copy_(buffer.half().float())
            if "layer_scalar" in buffer_name:
                buffer.normal_(mean=1.0, std=0.2).copy_(buffer.half().float())
        # The last few stand for images, where there are some.
        largest = SIZES["vocab_size"] - (4 if name in WRAPPERS else 0)
        token_ids = torch.randint(0, largest, (1, NUM_TOKENS))
        decoder = model.language_model if name in NEEDS_IMAGES else model
        logits = decoder(token_ids, use_cache=False).logits[0]
        answer, smallest_gap = greedy(decoder, token_ids)
        if name == "cohere2_vision":  # transformers' wrapper forgets what its text model multiplies by
            scale = model.config.text_config.logit_scale
            logits, smallest_gap = logits * scale, smallest_gap * scale
    folder = HERE / name
    model.half().save_pretrained(folder)
    if name == "qwen3_vl_moe":
        turn_experts(folder / "model.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    golden = {
        "token_ids": token_ids[0].tolist(),
        "every": EVERY,
        "logits": [[round(v, 5) for v in row] for row in logits[::EVERY].tolist()],
        "answer": answer,
        "smallest_gap": round(smallest_gap, 6),
    }
    (folder / "golden.json").write_text(json.dumps(golden))
    print(name, f"{smallest_gap:.4f}", f"{logits.abs().max():.2f}")


def turn_experts(file: Path) -> None:
    """Store experts as published models have them, inputs first; transformers reads both forms."""
    tensors = load_file(file)
    turned = {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
    save_file(tensors | turned, file, metadata={"format": "pt"})


def shake(name: str, parameter: torch.nn.Parameter, *, is_less_one: bool) -> None:
    """Give everything a value that matters: norms and biases begin as ones and zeros."""
    is_norm = parameter.ndim == 1 and "bias" not in name and "sinks" not in name
    if is_norm:
        parameter.normal_(mean=0.0 if is_less_one else 1.0, std=0.2)
    elif parameter.ndim == 1 or name.endswith("_bias"):
        parameter.normal_(std=0.2)
    elif parameter.std() < 0.01 or parameter.std() > 0.5:
        parameter.normal_(std=0.25)


if __name__ == "__main__":
    main(sys.argv[1:])
