"""Shrinking of failing cases to the smallest that fails, and code that repeats it."""

import contextlib
import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.research.verify import frameworks, kernels
from jaxpaged.research.verify.cases.frame import KernelCase, call_of
from jaxpaged.research.verify.kernels import Terms


def smallest_case(case: KernelCase, fails: Callable[[KernelCase], bool], seconds: float) -> KernelCase:
    """Return the simplest failing case between `case`, which fails, and nothing.

    Each field takes a value of the class's `SIMPLER` or keeps its own, tuples lose entries and their entries
    become smaller. What fails only by chance is given back as it came.
    """
    ways = [lambda each: simplifications(each, timid=each is case)]
    return smallest(case, lambda each: each.is_sound and fails(each), ways, seconds)


def is_possible() -> bool:
    """Return whether hypothesis, which shrinks, is installed."""
    return importlib.util.find_spec("hypothesis") is not None


def smallest(
    value: Any, fails: Callable[[Any], bool], ways: list[Callable[[Any], Any]], seconds: float
) -> Any:
    """Return the simplest failing value that hypothesis finds within `seconds`.

    ways: each makes of a value a strategy of simpler ones, of which most are nearly as complicated, so that
    what fails is met. They are gone through again as long as they help.
    """
    if seconds <= 0 or not is_possible():
        return value
    import hypothesis
    from hypothesis.errors import Flaky, NoSuchExample

    until = time.monotonic() + seconds
    tried: dict[Any, bool] = {}

    def still_fails(candidate: Any) -> bool:
        if candidate not in tried and time.monotonic() < until:
            tried[candidate] = fails(candidate)
        return tried.get(candidate, False)

    settings = hypothesis.settings(
        database=None,
        deadline=None,
        derandomize=True,
        max_examples=300,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    last = None
    while value != last:
        last = value
        for way in ways:
            with contextlib.suppress(NoSuchExample, Flaky):
                value = hypothesis.find(way(value), still_fails, settings=settings)
    return value


def simplifications(case: KernelCase, timid: bool) -> Any:
    """Return a strategy of cases no larger than this one, the simplest first.

    timid: tuples' entries keep their values more often than not.
    """
    from hypothesis import strategies as st

    # A field keeps its value in most draws, so that faults which need several values together are met soon.
    def values(value: Any, simpler: tuple[Any, ...]) -> Any:
        simpler = tuple(v for v in simpler[: _place(value, simpler)] if _is_less(v, value))
        return st.sampled_from([*simpler, *[value] * (1 + 2 * len(simpler))]) if simpler else st.just(value)

    tuples = [f.name for f in dataclasses.fields(case) if _is_list(getattr(case, f.name))]
    others = {
        name: values(getattr(case, name), simpler)
        for name, simpler in case.SIMPLER.items()
        if name not in tuples and hasattr(case, name)
    }

    @st.composite
    def build(draw: Any) -> KernelCase:
        chosen = {name: draw(strategy) for name, strategy in others.items()}
        # Tuples of a length, such as starts and lengths of tiles, lose the same entries.
        for length in sorted({len(getattr(case, name)) for name in tuples}):
            alike = [name for name in tuples if len(getattr(case, name)) == length]
            rows = []
            for entries in zip(*(getattr(case, name) for name in alike), strict=True):
                stays = draw(st.sampled_from([False, True, True]))
                smaller = [_entry(draw, st, entry, timid) for entry in entries]
                rows += [smaller] if stays else []
            for place, name in enumerate(alike):
                chosen[name] = tuple(row[place] for row in rows)
        return dataclasses.replace(case, name="smallest", **chosen)

    return build()


def _is_list(value: Any) -> bool:
    return type(value) is tuple  # and no BlockSparse


def _is_less(value: Any, value_of_case: Any) -> bool:
    """Return whether a value is simpler: smaller, if a number, and other than the case's own."""
    both = isinstance(value, (int, float)) and isinstance(value_of_case, (int, float))
    return value < value_of_case if both and not isinstance(value_of_case, bool) else value != value_of_case


def _place(value_of_case: Any, simpler: tuple[Any, ...]) -> int:
    """Return the index of the case's own value among the simple ones; their end if it is not among them."""
    if value_of_case is None:
        return 0
    return simpler.index(value_of_case) if value_of_case in simpler else len(simpler)


def _entry(draw: Any, st: Any, entry: Any, timid: bool) -> Any:
    if type(entry) is tuple:
        return tuple(_entry(draw, st, each, timid) for each in entry)
    low, high = sorted((0, entry))
    smaller = st.integers(low, high)
    return draw(st.one_of(smaller, st.just(entry), st.just(entry)) if timid else smaller)


def snippet(path: str, op: str, case: KernelCase, terms: Terms) -> str:
    """Return Python code that checks this one case."""
    module, _, name = path.partition(":")
    outer = name.partition(".")[0]
    lines = [f"from {module} import {outer}" if path else "function = ...  # yours"]
    lines += [
        "from jaxpaged.research.verify import kernels",
        f"from {type(case).__module__} import {type(case).__name__}",
    ]
    if getattr(case, "block_sparse", None):
        lines.append("from jaxpaged.research.verify.oracles.attention import BlockSparse")
    call = f"kernels.check({name or 'function'}, {op!r}, case"
    if terms != Terms():
        call += f", kernels.{terms!r}"
    return "\n".join([*lines, "", f"case = {call_of(case)}", f"print({call}))"])


def save(
    folder: Path, path: str, function: Callable[..., Any], op: str, case: KernelCase, terms: Terms
) -> Path:
    """Write a function's arguments, its answer and the right answer to an .npz file.

    Arrays of types that NumPy's files do not know (bfloat16, 8-bit floats) are written as their bits; the
    entry `types` says of which type each array is, `case` which case it is.
    """
    arrays, options = kernels.OPERATIONS[op].arguments(case, terms)
    entries: dict[str, np.ndarray] = {}
    for number, each in enumerate(arrays):
        for place, array in enumerate(each if isinstance(each, list) else [each]):
            suffix = f"_{place}" if isinstance(each, list) else ""
            entries[f"argument_{number}{suffix}"] = np.asarray(array)
    entries |= {name: np.asarray(v) for name, v in options.items() if isinstance(v, (np.ndarray, np.generic))}
    entries |= _answers(function, op, case, terms)
    plain = {n: v for n, v in options.items() if n not in entries}
    said = {
        "op": op,
        "case": call_of(case),
        "terms": repr(terms),
        "options": {
            name: value if isinstance(value, (int, float, str)) else repr(value)
            for name, value in plain.items()
        },
        "types": {name: array.dtype.name for name, array in entries.items()},
    }
    bits = {n: a if frameworks.is_numpys(a.dtype) else a.view(f"u{a.itemsize}") for n, a in entries.items()}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{path.rpartition(':')[2].replace('.', '-') or 'function'}-{op}.npz"
    np.savez(file, allow_pickle=False, about=np.array(json.dumps(said)), **bits)
    return file


def _answers(function: Callable[..., Any], op: str, case: KernelCase, terms: Terms) -> dict[str, np.ndarray]:
    """Return the expected arrays and the function's, unless they cannot be compared."""
    with contextlib.suppress(Exception):  # the function's error is in the report
        comparisons = kernels.compare(function, op, case, terms)
        return {
            f"{what}_{i}": getattr(each, what)
            for i, each in enumerate(comparisons)
            for what in ("got", "want")
        }
    return {}
