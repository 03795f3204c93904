"""Oracles in NumPy and plain Python: sequential, obviously right, never fast. Imports nothing of jaxpaged."""
