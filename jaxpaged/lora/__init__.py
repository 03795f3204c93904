"""The adapter of a request. vLLM's scripts import it from `lora.request`."""

from jaxpaged.lora.request import LoRARequest

__all__ = ["LoRARequest"]
