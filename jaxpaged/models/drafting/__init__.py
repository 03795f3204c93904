"""Heads that draft: one layer that reads hidden states of the model it drafts for."""
