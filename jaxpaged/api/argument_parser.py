"""The parser of vLLM's example scripts."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parse a command line whose flags may be written with underscores in place of dashes."""

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._known(each) for each in given], namespace)

    @staticmethod
    def check_port(value: str) -> int:
        """Return a port's number; for `type=` of an argument. Raises `ArgumentTypeError`."""
        if not (value.isascii() and value.isdecimal() and 1024 <= int(value) <= 65535):
            raise argparse.ArgumentTypeError("Port must be an integer from 1024 to 65535")
        return int(value)

    def _known(self, argument: str) -> str:
        """Return a long flag, up to its "=", with dashes if it is not known with underscores."""
        flag, equals, value = argument.partition("=")
        if not argument.startswith("--") or flag in self._option_string_actions:
            return argument
        return flag.replace("_", "-") + equals + value
