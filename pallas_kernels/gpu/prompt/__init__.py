"""Prompt attention: tiles of many query tokens."""
