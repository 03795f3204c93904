"""Old path of `jaxpaged.api.llm`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.api.llm")
