"""Tools for research and training: nothing that serves a request imports them.

- `verify`: checks kernels, allocators, layouts and policies against the oracles.
- `ptx`: runs the compiled text of GPU kernels without a GPU.
- `lab`: replays traces through the block pool, and compares policies.
- `replay`: saves an engine's state to a file, and runs it step by step.
- `learn`: log-probabilities with gradients, for training loops.
- `bench`: load for servers and offline engines.
- `integrations`: classes by which other libraries take an engine.
"""
