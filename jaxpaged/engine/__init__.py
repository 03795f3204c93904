"""The engine: a compiled loop of pure steps over one immutable state, and the host side that feeds it."""
