"""Old path of `jaxpaged.handover.transport`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.handover.transport")
