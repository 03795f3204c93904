"""Parts as somebody else writes them: they import JAX, NumPy and `jaxpaged.contracts` alone."""
