"""Old path of `jaxpaged.api.outputs`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.api.outputs")
