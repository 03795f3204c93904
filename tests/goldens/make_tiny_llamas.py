"""Make the tiny Hugging Face Llamas of this folder, and the logits that transformers computes for them.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0:
    python tests/goldens/make_tiny_llamas.py
Each folder gets config.json, model.safetensors and golden.json (token ids, and the logits after each).
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
}


def main() -> None:
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **variant)).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight") or parameter_name.endswith("bias"):
                    parameter.normal_(mean=float(parameter_name.endswith("norm.weight")), std=0.2)
            token_ids = torch.randint(0, COMMON["vocab_size"], (1, 70))
            logits = model(token_ids).logits[0]
        folder = HERE / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        golden = {
            "token_ids": token_ids[0].tolist(),
            "logits": [[round(v, 6) for v in row] for row in logits.tolist()],
        }
        (folder / "golden.json").write_text(json.dumps(golden))


if __name__ == "__main__":
    main()
