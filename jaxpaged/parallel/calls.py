"""Calls between processes: the list of methods that process 0 may have the other processes call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.checks import InputError, shown

type SendCall = Callable[[str, Sequence[Any]], Any]


class SharedCalls:
    """The methods of one class that all processes call together. No other one can be called from outside.

    Each name of the list is a method under `@calls.shared`. In process 0 the method first sends its name and
    arrays to the other processes by the object's `send_call` (None: there are none); there `make` calls the
    method of the same name.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._methods: dict[str, Callable[..., Any]] = {}

    def shared[**P, T](self, method: Callable[P, T]) -> Callable[P, T]:
        """Mark a method that is in the list as shared. Its arguments are host arrays and plain values."""
        name = method.__name__
        if name not in self.names:
            raise ValueError(f"{name=} must be one of {', '.join(self.names)}")
        self._methods[name] = method

        @functools.wraps(method)
        def call(*args: P.args, **options: P.kwargs) -> T:
            caller: Any = args[0]
            if caller.send_call is not None:
                caller.send_call(name, args[1:])
            return method(*args, **options)

        return call

    def make(self, caller: Any, name: str, arrays: Sequence[Any]) -> None:
        """Make a call that process 0 has sent. Raises `InputError` for a name that is not in the list."""
        if name not in self._methods:
            raise InputError(f"call={shown(name)} must be one of {', '.join(self.names)}")
        self._methods[name](caller, *arrays)
