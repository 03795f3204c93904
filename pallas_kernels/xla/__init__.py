"""Implementations of the operations in plain JAX, for every device."""
