"""Old path of `jaxpaged.api.async_llm`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.api.async_llm")
