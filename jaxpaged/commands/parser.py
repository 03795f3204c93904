"""The parser of the command line, exit codes, and what commands need. Imports nothing heavy."""

import argparse
import contextlib
import importlib.util
import sys
from typing import Any, NoReturn

from jaxpaged.checks import InputError
from jaxpaged.vllm_names.flags import without_vllms

EXIT_ERROR = 1  # not the user's mistake
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell reports Ctrl-C

type Commands = Any  # what `add_subparsers` returns, for which argparse has no public name


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in one line, and can accept vLLM's flags whose values change nothing."""

    takes_vllms = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments that are left without vLLM's flags. Raises `InputError`."""
        if self.takes_vllms:
            args = without_vllms(sys.argv[1:] if args is None else args, self.has_flag)
        return super().parse_known_args(args, namespace)

    def has_flag(self, flag: str) -> bool:
        """Return whether the command itself has this flag."""
        return flag in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """End with one clear line, without the usage in front of it."""
        with contextlib.suppress(ValueError):  # the stream is closed
            self._print_message(f"jaxpaged: {' '.join(message.split())}\n", sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def require(packages: tuple[str, ...], extra: str) -> None:
    """Check that packages are installed; raise `InputError` with what to install otherwise."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing).replace('_', '-')} is missing: pip install 'jaxpaged[{extra}]'"
        )
