"""Old path of `jaxpaged.batch.ray`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.batch.ray")
