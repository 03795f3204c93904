"""GGUF files: their header, weights, tokenizers and special tokens."""
