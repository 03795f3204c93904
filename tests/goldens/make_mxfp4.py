"""Make a tiny gpt-oss with experts in MXFP4, as the large ones are published, in mxfp4/, and its logits.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.24.0:
    python tests/goldens/make_mxfp4.py
Codes are the nearest to random weights. Transformers reads the folder itself, makes numbers of the codes, and
computes in float32. The folder gets config.json, model.safetensors and golden.json: token ids, and the logits
after every third of them.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

HERE = Path(__file__).parent / "mxfp4"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "sliding_window": 12,
    "swiglu_limit": 1.5,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SIZE_OF_CODE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUM_TOKENS, EVERY, GROUP = 40, 3, 32


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [..., groups, 16] and scales [..., groups] of a weight [..., inputs]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponents = (
        torch.floor(torch.log2(groups.abs().amax(dim=-1))) - 2
    )  # the largest is from 4 to 8 of a scale
    sizes = groups / torch.exp2(exponents)[..., None]
    codes = (sizes.abs()[..., None] - SIZE_OF_CODE).abs().argmin(dim=-1) | (sizes < 0).int() << 3
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)


def main() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES))
    for name, its in model.named_parameters():  # biases and sinks are zeros otherwise
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(its, std=0.2)
    HERE.mkdir(exist_ok=True)
    model.bfloat16().save_pretrained(HERE)
    tensors = load_file(HERE / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = mxfp4(tensors.pop(name).mT)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, HERE / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((HERE / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (HERE / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (HERE / "generation_config.json").unlink(missing_ok=True)
    read = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.bfloat16).float()
    read.set_experts_implementation("eager")
    tokens = torch.randint(0, SIZES["vocab_size"], (1, NUM_TOKENS))
    with torch.no_grad():
        logits = read(tokens).logits[0]
    rounded = [[round(v, 5) for v in row] for row in logits[::EVERY].tolist()]
    golden = {"token_ids": tokens[0].tolist(), "every": EVERY, "logits": rounded}
    (HERE / "golden.json").write_text(json.dumps(golden))
    print(sorted(tensors)[:12], logits.std(), read.model.layers[0].mlp.experts.down_proj.shape)


if __name__ == "__main__":
    main()
