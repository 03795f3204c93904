"""Blocks of K and V from one engine to another."""
