"""Several caches at a time, a thread each, which share compiled programs."""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def side_by_side[Item, Found](function: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
    """Yield the results in order, computed on as many threads as there are cores."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        yield from threads.map(function, items)


class Programs:
    """Cache of compiled programs in which one of several threads compiles a program and the others wait."""

    def __init__(self) -> None:
        self._compiling = threading.Lock()
        self._compiled: set[Hashable] = set()

    def call[**P, Result](
        self, name: Hashable, program: Callable[P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Call a program; calls of one name have the same shapes and static arguments."""
        if name in self._compiled:
            return program(*args, **kwargs)
        with self._compiling:
            result = program(*args, **kwargs)
        self._compiled.add(name)
        return result
