"""The kernel for prompt attention: tiles of many query tokens, bound by tensor cores."""
