"""Old path of `jaxpaged.handover.blocks`."""

from jaxpaged.moved import moved

__getattr__ = moved(__name__, "jaxpaged.handover.blocks")
