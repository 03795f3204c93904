"""Which adapter a request is answered with. `lora.request` is where vLLM's scripts import it from."""

from jaxpaged.lora.request import LoRARequest

__all__ = ["LoRARequest"]
