"""Learning: log-probabilities with the sampler's bits, and their gradients."""
