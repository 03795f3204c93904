"""Values that a file gives by patterns of modules' names, matched without backtracking.

A stranger's pattern may take Python's `re` for ever; RE2's time grows with the name and the pattern only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxpaged.checks import InputError, check, shown

MAX_CHARS = 1000  # characters of a pattern
MAX_SIZE = (
    2**16
)  # instructions of all compiled patterns together: those of a name are as many as its characters
MAX_PATTERNS = 1024
MAX_MEMORY = 2**17  # bytes of a compiled pattern


class Patterns:
    """PEFT's patterns: the first that is all of a name, or all behind one of its dots, says the value.

    `name` is what messages call them. Raises `InputError` for what is no pattern of RE2's, which has no
    lookaround and no backreferences, and for too many.
    """

    def __init__(self, name: str, given: Any) -> None:
        check(name, given, "an object", isinstance(given, Mapping))
        self._given: Mapping[str, Any] = given
        self._compiled = [*_compiled(name, given)]

    def value(self, module: str, default: Any) -> Any:
        """Return what is said of a module, or the default."""
        for pattern, compiled in zip(self._given, self._compiled, strict=True):
            if compiled.fullmatch(module):
                return self._given[pattern]
        return default


def _compiled(name: str, patterns: Mapping[str, Any]) -> Iterator[Any]:
    import re2  # what brings it to a machine is a pattern, not the loop

    options, size = re2.Options(), 0
    if len(patterns) > MAX_PATTERNS:
        raise InputError(f"{name} has {len(patterns)} patterns, must have at most {MAX_PATTERNS}")
    options.log_errors, options.max_mem = False, MAX_MEMORY
    for pattern in patterns:
        if len(pattern) > MAX_CHARS:
            raise InputError(
                f"{name} has {shown(pattern)}, must have patterns of at most {MAX_CHARS} characters"
            )
        try:
            made = re2.compile(rf"(?:.*\.)?(?:{pattern})", options)
        except (re2.error, UnicodeError) as error:
            why = error.args[0]
            why = why.decode("utf-8", "replace") if isinstance(why, bytes) else "it must be Unicode text"
            raise InputError(f"{name} has {shown(pattern)}, which is no pattern: {why}") from None
        size += made.programsize
        if size > MAX_SIZE:
            raise InputError(f"{name} has too many patterns, or too large ones, from {shown(pattern)} on")
        yield made
