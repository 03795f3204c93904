"""Batch work: prompts from files, in parts, and replicas on Ray."""
