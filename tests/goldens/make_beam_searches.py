"""Make beam_searches.json: what transformers' beam search finds with a tiny model of this folder and SmolLM2.

Run once, with Python 3.11, torch 2.13.0 (CPU) and transformers 5.23.0; SMOLLM2 is what
`benchmarks/peers/export_hf.py` makes of the package's GGUF file:
    python tests/goldens/make_beam_searches.py SMOLLM2

Without a token that ends an answer: there transformers and vLLM agree (`reference/beam_search.py` says where
they do not).
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
# Model, prompt, width, new tokens.
SEARCHES = [
    ("gqa_tied", list(range(3, 23)), 4, 24),
    ("gqa_tied", [7], 1, 12),
    ("gqa_tied", list(range(50, 10, -1)), 10, 40),
    ("smollm2", [504, 3575, 282, 4649, 314], 4, 20),
    ("smollm2", [8578, 327, 253, 655, 28, 665, 436, 253], 8, 16),
]


def main() -> None:
    made = []
    for name, prompt, width, num_new in SEARCHES:
        folder = Path(sys.argv[1]) if name == "smollm2" else HERE / name
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_new,
            do_sample=False,
            length_penalty=0.0,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = found.sequences[:, len(prompt) :].tolist()
        sums = [] if width == 1 else [round(v, 5) for v in found.sequences_scores.tolist()]
        made.append(
            {"model": name, "prompt": prompt, "width": width, "answers": answers, "cum_logprobs": sums}
        )
        print(name, width, "smallest gap of the answers:", min(smallest(sums), default=None))
    (HERE / "beam_searches.json").write_text("[\n" + ",\n".join(map(json.dumps, made)) + "\n]\n")


def smallest(sums: list[float]) -> list[float]:
    return [a - b for a, b in itertools.pairwise(sums)]


if __name__ == "__main__":
    main()
