"""Goldens of a model with real weights: greedy answers of transformers in float32, weights dequantised.

    python make_real_weights.py MODEL.gguf OUT.json     needs torch, transformers and gguf

`margins` are the gaps between the two best logits of each step: where one is small the order of sums may
decide.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

PROMPTS = {
    "plain": ["The capital of France is"],
    "code": [
        'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number, from fibonacci(0) = 0 on."""\n',
        "// Reads all lines of a file into a vector of strings.\n#include <fstream>\n#include <string>\n"
        "#include <vector>\n\nstd::vector<std::string> read_lines(const std::string& path) {\n",
    ],
}
NUM_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    prompts = []
    for kind, texts in PROMPTS.items():
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            answer = model.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                repetition_penalty=1.0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            generated = answer.sequences[0, len(ids) :].tolist()
            best = [logits[0].topk(2).values for logits in answer.logits]
            prompts.append(
                {
                    "kind": kind,
                    "prompt": text,
                    "prompt_ids": ids,
                    "generated": generated,
                    "margins": [round(float(a - b), 4) for a, b in best],
                    "text": tokenizer.decode(generated),
                }
            )
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    said = {
        "model": args.model.name,
        "made_with": f"{made_with}, float32, greedy, weights dequantised",
        "prompts": prompts,
    }
    args.out.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
