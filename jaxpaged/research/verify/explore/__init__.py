"""Exploration: every interleaving of a small world, walked with the compiled step."""
