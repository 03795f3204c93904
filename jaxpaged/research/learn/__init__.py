"""Learning: log-probabilities with the engine's bits, and their gradients."""
