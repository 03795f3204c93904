"""Models and an adapter for vLLM's example scripts: SmolLM2, and tiny random ones with its tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxpaged.models import loading

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 2
EXPERTS, EXPERT_WIDTH = 4, 16


def make_models(folder: Path) -> dict[str, str]:
    """Write the models below a folder. Return their paths by their kinds.

    "text" is SmolLM2; "embed", "classify" (3 classes), "score" (one class) and "experts" are tiny random
    models of Qwen3's kind; "adapter" is a random adapter of rank 4 for SmolLM2.
    """
    checkpoint = loading.open_checkpoint(loading.SMOLLM2)
    tokenizer = checkpoint.tokenizer
    random = np.random.default_rng(0)
    found = {"text": loading.SMOLLM2}
    for kind, architecture, labels in (
        ("embed", "Qwen3ForCausalLM", 0),
        ("classify", "Qwen3ForSequenceClassification", 3),
        ("score", "Qwen3ForSequenceClassification", 1),
        ("experts", "Qwen3MoeForCausalLM", 0),
    ):
        path = folder / kind
        path.mkdir(parents=True)
        tokenizer.save_pretrained(path)
        config = _config(architecture, labels, len(tokenizer))
        (path / "config.json").write_text(json.dumps(config))
        save_file(_weights(config, labels, random), path / "model.safetensors")
        found[kind] = str(path)
    found["adapter"] = str(_adapter(folder / "adapter", checkpoint.config, random))
    return found


def _config(architecture: str, labels: int, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3_moe" if "Moe" in architecture else "qwen3",
        "dtype": "float32",
        "eos_token_id": 2,
        "pad_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
    }
    if labels:
        names = [f"LABEL_{i}" for i in range(labels)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    if "Moe" in architecture:
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_WIDTH,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _weights(config: dict[str, Any], labels: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(out: int, width: int) -> np.ndarray:
        return (random.standard_normal((out, width)) * 0.2).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], HIDDEN)}
    found["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        found[f"{at}.post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}.self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        for name in "qk":
            found[f"{at}.self_attn.{name}_norm.weight"] = np.ones(HEAD_DIM, np.float32)
        found[f"{at}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        if "num_experts" in config:
            found[f"{at}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        parts = range(EXPERTS) if "num_experts" in config else [None]
        for part in parts:
            mlp, width = (f"{at}.mlp", WIDTH) if part is None else (f"{at}.mlp.experts.{part}", EXPERT_WIDTH)
            found[f"{mlp}.gate_proj.weight"] = matrix(width, HIDDEN)
            found[f"{mlp}.up_proj.weight"] = matrix(width, HIDDEN)
            found[f"{mlp}.down_proj.weight"] = matrix(HIDDEN, width)
    if labels:
        found["score.weight"] = matrix(labels, HIDDEN)
    return found


def _adapter(folder: Path, config: Any, random: np.random.Generator, rank: int = 4) -> Path:
    """Write a random adapter of the query and value projections of a model."""
    folder.mkdir(parents=True)
    head_dim = config.head_dim
    sizes = {"q_proj": config.num_q_heads * head_dim, "v_proj": config.num_kv_heads * head_dim}
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(sizes),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    tensors = {}
    for layer in range(len(config.layers)):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, config.hidden_size)), ("B", (size, rank))):
                values = random.standard_normal(shape) * 0.02
                tensors[f"{at}.lora_{part}.weight"] = values.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
