"""Paged memory as immutable pytrees: knows blocks, tables and caches, but no model and no request."""
