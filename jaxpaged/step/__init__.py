"""The compiled engine: its state, one step, and the loop of steps. Imports no thread, clock or host code."""
