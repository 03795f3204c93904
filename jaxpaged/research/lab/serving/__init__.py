"""A trace served by the engine's own scheduler, in the time of a GPU: a model, not a measurement."""
