"""Events of an engine's prefix cache, for routers: what it stores and what it forgets, in vLLM's messages."""
