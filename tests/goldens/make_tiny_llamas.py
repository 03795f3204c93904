"""Make the tiny Hugging Face Llamas and Mistrals of this folder, and what transformers computes for them.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0:
    python tests/goldens/make_tiny_llamas.py
Each folder gets config.json, model.safetensors and golden.json: token ids, the logits after each, and the
greedy answer to them, with the smallest gap between its two best logits.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

HERE = Path(__file__).parent
COMMON = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
VARIANTS = {
    "gqa_tied": {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha_biased": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "mqa_llama3_rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral_window": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "sliding_window": 12,
    },
}
NUM_NEW_TOKENS = 30


def main() -> None:
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        config_class = MistralConfig if "sliding_window" in variant else LlamaConfig
        model = AutoModelForCausalLM.from_config(config_class(**COMMON, **variant)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight") or parameter_name.endswith("bias"):
                    parameter.normal_(mean=float(parameter_name.endswith("norm.weight")), std=0.2)
            token_ids = torch.randint(0, COMMON["vocab_size"], (1, 70))
            logits = model(token_ids).logits[0]
            answer, smallest_gap = greedy(model, token_ids)
        folder = HERE / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        golden = {
            "token_ids": token_ids[0].tolist(),
            "logits": [[round(v, 6) for v in row] for row in logits.tolist()],
            "answer": answer,
            "smallest_gap": round(smallest_gap, 6),
        }
        (folder / "golden.json").write_text(json.dumps(golden))


def greedy(model: torch.nn.Module, token_ids: torch.Tensor) -> tuple[list[int], float]:
    """Append the likeliest next token again and again, computing everything anew each time."""
    gaps = []
    for _ in range(NUM_NEW_TOKENS):
        best = torch.topk(model(token_ids, use_cache=False).logits[0, -1], 2)
        gaps.append(float(best.values[0] - best.values[1]))
        token_ids = torch.cat([token_ids, best.indices[None, :1]], dim=1)
    return token_ids[0, -NUM_NEW_TOKENS:].tolist(), min(gaps)


if __name__ == "__main__":
    main()
