"""Files that models come in: safetensors, GGUF, and what lies beside them."""
