"""An operation's cases, and whether a function of any framework answers one of them right.

A function takes what `pallas_kernels.ops` says of its operation: the arrays in order, options by keyword, and
only those a case has. What it does not serve it is not asked: options that it has no parameter for, cases
that its `Terms` leave out, and those for which it raises NotImplementedError. It gives back the result, or
None if it has written to its arguments' caches in place. All else it must leave as it was.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import checked_choice
from jaxpaged.research.verify import frameworks
from jaxpaged.research.verify.cases import caches, decode, frame, ragged, tiles
from jaxpaged.research.verify.cases.frame import FEATURES, Compared, KernelCase, WrongResult

__all__ = ["OPERATIONS", "Compared", "NotServed", "Terms", "WrongResult", "cases_of", "check", "compare"]

IGNORED = {"partition_size"}  # a function may lack this parameter
NEUTRAL: dict[str, Any] = {
    "kv_layout": "token_major",
    "sliding_window": None,
    "attention_chunk": None,
    "soft_cap": None,
}


class NotServed(NotImplementedError):
    """Error of a function that does not serve the case."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """Terms under which a function is called; the defaults are those of our own kernels.

    arrays: whose it takes: "numpy", "jax" or "torch".
    weights: the type in which it holds the softmax's weights; None: q's.
    stale: "zero" where it multiplies what it does not see by zero, which NaN survives.
    padding: "null" where it looks up table entries past a row's tokens, which then name block 0.
    only: of a case's fields those values that it serves, {"head_dim": (64, 128)}.
    without: features that it does not serve, such as "alibi", "sinks", "quantised" or "empty_rows".
    """

    arrays: str = "numpy"
    weights: str | None = None
    stale: str = "nan"
    padding: str = "invalid"
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        checked_choice("arrays", self.arrays, frameworks.FRAMEWORKS)
        checked_choice("stale", self.stale, frame.STALE)
        checked_choice("padding", self.padding, frame.PADDING)
        if self.weights is not None:
            checked_choice("weights", self.weights, ("float32", "float16", "bfloat16"))
        for feature in self.without:
            checked_choice("without", feature, sorted(FEATURES))
        for name in self.only:
            checked_choice("only", name, sorted(FIELDS))

    def __repr__(self) -> str:
        return frame.call_of(self)

    def leaves_out(self, case: KernelCase) -> str | None:
        """Return why these terms leave a case out, or None."""
        for name, values in self.only.items():
            value = getattr(case, name, None)
            value = getattr(case, "dtype", None) if name == "cache_dtype" and value is None else value
            if value is not None and value not in values:
                return f"{name}={value}"
        return next(iter(sorted(self.without & case.features)), None)


FIELDS = {"group_size"} | {
    field.name
    for kind in (decode.DecodeCase, tiles.TileCase, ragged.RaggedCase, caches.WriteCase, caches.MergeCase)
    for field in dataclasses.fields(kind)
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of kernels: its test cases, and the arguments of a function for each case.

    results: indices of the arguments that a function may write in place of returning an answer.
    """

    cases: Sequence[KernelCase]
    results: tuple[int, ...] = ()
    with_partitions: bool = False

    def arguments(self, case: KernelCase, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays in order, and the options by keyword."""
        arrays, options = case.arguments(terms.stale, terms.padding)
        if self.with_partitions and isinstance(case, decode.DecodeCase):
            options["partition_size"] = max(case.partition_size, case.block_size)
        return arrays, options


OPERATIONS = {
    "paged_attention_v1": Operation(decode.CASES),
    "paged_attention_v2": Operation(decode.CASES, with_partitions=True),
    "tiled_paged_attention": Operation(tiles.CASES),
    "ragged_paged_attention": Operation(ragged.CASES),
    "reshape_and_cache": Operation(caches.WRITES, results=(2, 3)),
    "copy_blocks": Operation(caches.COPIES, results=(0,)),
    "swap_blocks": Operation(caches.SWAPS, results=(1,)),
    "merge": Operation(caches.MERGES),
}


def cases_of(op: str) -> list[KernelCase]:
    """Return the cases of an operation, for `pytest.mark.parametrize(..., ids=str)`."""
    return list(OPERATIONS[checked_choice("op", op, OPERATIONS)].cases)


def check(function: Callable[..., Any], op: str, case: KernelCase, terms: Terms | None = None) -> float:
    """Run one case. Returns: its worst error, in units of what is allowed.

    Raises: WrongResult; NotServed; what the function raises.
    """
    terms = terms or Terms()
    try:
        return worst_error(function, op, case, terms)
    except WrongResult as error:
        raise WrongResult(f"{error}{_stale_hint(function, op, case, terms)}") from None


def _stale_hint(function: Callable[..., Any], op: str, case: KernelCase, terms: Terms) -> str:
    """Return a hint for a wrong case that is right if what may not be read is zero."""
    if not isinstance(case, frame.AttentionCase) or terms.stale == "zero":
        return ""
    try:
        worst_error(function, op, case, dataclasses.replace(terms, stale="zero"))
    except Exception:  # whatever is wrong there, too
        return ""
    filled = "slots that may not be read hold NaN (int8: 127) on purpose"
    return f"; {filled}, and with stale='zero' (--stale zero) the case passes"


def worst_error(function: Callable[..., Any], op: str, case: KernelCase, terms: Terms) -> float:
    """Return the worst error of one case, as `check` does, whose errors are without hints."""
    comparisons = compare(function, op, case, terms)
    for number, each in enumerate(comparisons):
        ratio, at = each.worst
        if not ratio <= 1:
            within = f" within {each.allowed[at]:.2g}" if np.isfinite(ratio) else ""
            values = f"is {each.got[at]:.6g} and must be {each.want[at]:.6g}{within}"
            raise WrongResult(f"{case}: {case.place(number, at)} {values}")
    return max((each.worst[0] for each in comparisons), default=0.0)


def compare(function: Callable[..., Any], op: str, case: KernelCase, terms: Terms) -> list[Compared]:
    """Run one case, and compare each array of the answer, however wrong.

    Raises: WrongResult if it cannot be compared, or an argument has changed that must not; NotServed; what
    the function raises.
    """
    operation = OPERATIONS[checked_choice("op", op, OPERATIONS)]
    if why := terms.leaves_out(case):
        raise NotServed(why)
    arrays, options = operation.arguments(case, terms)
    options = {name: _as(terms.arrays, v) for name, v in _asked(function, options).items()}
    given = _mapped(frameworks.to(terms.arrays), _mapped(np.copy, arrays))  # the case's own are shared
    before = _mapped(np.copy, arrays)
    try:
        out = function(*given, **options)
    except NotImplementedError as error:
        raise NotServed(str(error).partition("\n")[0] or "NotImplementedError") from None
    if out is None:
        if not operation.results:
            raise WrongResult(f"{case}: the function gives nothing back")
        out = [given[place] for place in operation.results]
        out = out[0] if len(out) == 1 else out
    for place, after in enumerate(given):
        # What is donated, or written to in place, may change.
        if place not in operation.results and not _same(before[place], after):
            raise WrongResult(f"{case}: the function has changed its argument {place}")
    got = tuple(map(frameworks.to_numpy, out if isinstance(out, (tuple, list)) else (out,)))
    try:
        return list(case.compared(got, terms.weights))
    except WrongResult as error:
        raise WrongResult(f"{case}: {error}") from None


def _asked(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without neutral ones that the function has no parameter for.

    Raises: NotServed for others without one.
    """
    accepted = frameworks.keywords_of(function)
    options = {n: v for n, v in options.items() if n not in NEUTRAL or v != NEUTRAL[n]}
    if accepted is None:
        return options
    if unknown := sorted(options.keys() - accepted - IGNORED):
        raise NotServed(f"no parameter {unknown[0]}")
    return {name: value for name, value in options.items() if name in accepted}


def _as(framework: str, value: Any) -> Any:
    return frameworks.to(framework)(value.copy()) if isinstance(value, np.ndarray) and value.ndim else value


def _mapped(do: Callable[[Any], Any], arrays: list[Any]) -> list[Any]:
    return [[do(a) for a in each] if isinstance(each, list) else do(each) for each in arrays]


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, list):
        return all(map(_same, before, after))
    return before.tobytes() == frameworks.to_numpy(after).tobytes()
