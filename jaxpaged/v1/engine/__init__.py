"""Where vLLM's scripts import engines from."""
