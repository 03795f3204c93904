"""Quantised weights: codes and scales, on load and from files."""
