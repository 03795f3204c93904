"""Mixers that keep a state in place of K and V: what each is, and how a layer computes it."""
