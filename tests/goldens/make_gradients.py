"""Make gradients.npz beside the goldens of five families: what transformers' backward pass gives.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.24.0:
    python tests/goldens/make_gradients.py
The loss is the sum of the log-probabilities of each token behind the first, times `factors`, over two
sequences: the golden's tokens, and its first 21. Arrays are by the names of model.safetensors, in float32,
beside `value`, the log-probabilities of the first sequence.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
FOLDERS = ("gqa_tied", "families/qwen3", "families/gemma3_text", "families/mixtral", "families/gpt_neox")
SHORT = 21  # tokens of the second sequence


def main() -> None:
    for name in FOLDERS:
        folder = HERE / name
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = json.loads((folder / "golden.json").read_text())["token_ids"]
        values = [log_probs(model, its) for its in (ids, ids[:SHORT])]
        sum((its * factors(len(its))).sum() for its in values).backward()
        with torch.no_grad(), tempfile.TemporaryDirectory() as there:
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
            model.save_pretrained(there)
            found = load_file(Path(there) / "model.safetensors")
        np.savez_compressed(folder / "gradients.npz", value=values[0].detach().numpy(), **found)


def log_probs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1)[range(len(ids) - 1), ids[1:]]


def factors(count: int) -> torch.Tensor:
    """Return the weight of each log-probability in the loss: both signs, as advantages have."""
    return torch.cos(torch.arange(count, dtype=torch.float32))


if __name__ == "__main__":
    main()
