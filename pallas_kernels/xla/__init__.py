"""Plain JAX forms of the operations, for every device."""
