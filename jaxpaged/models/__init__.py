"""One decoder in Flax NNX for all families, and where weights, configs and tokenizers come from."""
