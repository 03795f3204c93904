"""Writes a Hugging Face directory (config, float32 safetensors, tokenizer) from a GGUF file.

    python benchmarks/peers/export_hf.py model.gguf out_directory

For transformers with torch, whose reader turns quantised weights into float32 but refuses to save the model
it made: what a loader needs is written here instead.
"""

import argparse
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def export(gguf: Path, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `directory`, made if needed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # the same memory as the embedding, which safetensors would refuse
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    config = model.config
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it names the GGUF's quantisation, and these weights have none
    config.to_json_file(directory / "config.json")
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Read the two paths and export."""
    parser = argparse.ArgumentParser(description="Write a Hugging Face directory from a GGUF file.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    if not args.gguf.is_file():
        parser.error(f"{args.gguf} must be a GGUF file")
    export(args.gguf, args.directory)


if __name__ == "__main__":
    main()
