"""Pooling models: vectors, classes and scores of texts, in place of answers."""
