"""Models in Flax NNX, one file per family, and where their weights, configs and tokenizers come from."""
