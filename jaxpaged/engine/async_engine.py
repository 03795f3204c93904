"""Old path of `jaxpaged.api.async_engine`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.api.async_engine")
