"""Make a low-rank adapter for some of the tiny models of families/, in lora/, and what transformers computes
of the model that PEFT merges it into.

Run once, behind make_families.py, with Python 3.11, torch 2.13.0 (CPU), transformers 5.23.0 and peft 0.21.2:
    python tests/goldens/make_lora.py
Each folder gets adapter_config.json, adapter_model.safetensors (in float16, which all numbers were rounded to
beforehand) and golden.json: token ids and the logits after every fifth of them. All is computed in float32.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
# Products in one and in pieces, in other orders, transposed, with patterns; experts beside attention.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "qwen3_moe": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "phi3": {"use_rslora": True},
    "gpt_neox": {},
    "bloom": {"target_modules": ["query_key_value", "dense_4h_to_h"], "layers_to_transform": [1]},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
NUM_TOKENS, EVERY = 30, 5


def main() -> None:
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(
            HERE / "families" / name, dtype=torch.float32, attn_implementation="eager"
        )
        token_ids = torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS))
        config = LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": "all-linear"} | variant)
        adapted = get_peft_model(model, config).eval()
        with torch.no_grad():
            before = model(token_ids, use_cache=False).logits[0]
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.2)
                if "lora_" in parameter_name:
                    parameter.copy_(parameter.half().float())
            merged = copy.deepcopy(adapted).merge_and_unload()
            logits = merged(token_ids, use_cache=False).logits[0]
        folder = HERE / "lora" / name
        adapted.peft_config["default"].base_model_name_or_path = f"../../families/{name}"  # no machine's own
        adapted.half().save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        golden = {
            "token_ids": token_ids[0].tolist(),
            "every": EVERY,
            "logits": [[round(v, 5) for v in row] for row in logits[::EVERY].tolist()],
        }
        (folder / "golden.json").write_text(json.dumps(golden))
        print(name, f"{logits.abs().max():.2f}", f"{(logits - before).abs().max():.2f}")


if __name__ == "__main__":
    main()
