"""Helpers of vLLM's scripts, by the names by which they import them."""

from jaxpaged.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
