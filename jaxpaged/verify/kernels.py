"""An operation's cases, and whether a function of any framework answers one of them right.

A function takes what `pallas_kernels.ops` says of its operation: the arrays in order, options by keyword, and
only those a case has. What it does not serve it is not asked: options that it has no parameter for, cases
that its `Terms` leave out, and those for which it raises NotImplementedError. It gives back the result, or
None if it has written to its arguments' caches in place. All else it must leave as it was.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxpaged.checks import checked_choice
from jaxpaged.verify import cache_cases, cases, frameworks, ragged, tiles

IGNORED = {"partition_size"}  # a function may lack this parameter
NEUTRAL: dict[str, Any] = {"kv_layout": "token_major", "sliding_window": None, "soft_cap": None}
Case = Any  # a case of one of the modules of cases


class WrongResult(AssertionError):
    """The answer is not right; the message names the case, where, what it is and what it must be."""


class NotServed(NotImplementedError):
    """The function says that it does not serve the case."""


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
        checked_choice("stale", self.stale, cases.STALE)
        checked_choice("padding", self.padding, cases.PADDING)
        if self.weights is not None:
            checked_choice("weights", self.weights, ("float32", "float16", "bfloat16"))
        for feature in self.without:
            checked_choice("without", feature, sorted(FEATURES))
        for name in self.only:
            checked_choice("only", name, sorted(FIELDS))

    def __repr__(self) -> str:
        return cases.call_of(self)

    def leaves_out(self, case: Case) -> str | None:
        """Return why these terms leave a case out, or None."""
        for name, values in self.only.items():
            value = getattr(case, name, None)
            value = getattr(case, "dtype", None) if name == "cache_dtype" and value is None else value
            if value is not None and value not in values:
                return f"{name}={value}"
        return next(iter(sorted(self.without & case.features)), None)


FEATURES = {
    "alibi", "block_sparse", "empty_rows", "head_major", "quantised", "scale", "scale_per_head",
    "shared_blocks", "sinks", "sliding_window", "soft_cap",
}  # fmt: skip
FIELDS = {"group_size"} | {
    field.name
    for kind in (cases.Case, tiles.Case, ragged.Case, cache_cases.WriteCase, cache_cases.MergeCase)
    for field in dataclasses.fields(kind)
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: its cases, what a function is given of each, and how far from right an answer is.

    `results` are the indices of the arguments that a function may write in place of returning an answer.
    `axes` are what the indices of an answer's element count, `arrays` the names of an answer's arrays.
    """

    cases: list[Case]
    arguments: Callable[[Case, Terms], tuple[list[Any], dict[str, Any]]]
    compared: Callable[[Case, tuple[np.ndarray, ...], Terms], Iterator["Compared"]]
    axes: tuple[str, ...]
    arrays: tuple[str, ...] = ()
    results: tuple[int, ...] = ()
    has_stale: bool = False  # whether slots that may not be read are filled as `Terms.stale` says

    def place(self, case: Case, number: int, at: tuple[int, ...]) -> str:
        """Return words for an element of the answer's array `number`."""
        axes = self.axes
        if getattr(case, "kv_layout", "") == "head_major" and "slot" in axes:
            axes = ("block", "head", "slot", "element")
        words = [f"{axis} {index}" for axis, index in zip(axes, at, strict=False)]
        return ", ".join([*self.arrays[number : number + 1], *words])


@dataclasses.dataclass(frozen=True)
class Compared:
    """One array of an answer: what it is, must be, and may be off by, by element.

    first: the index along the first axis that the arrays' first entries have in the answer.
    """

    got: np.ndarray
    want: np.ndarray
    error: np.ndarray  # NaN counts as infinite
    allowed: np.ndarray  # positive
    first: int = 0

    @property
    def worst(self) -> tuple[float, tuple[int, ...]]:
        """The largest error in units of what is allowed there, and where."""
        if not self.error.size:
            return 0.0, ()
        ratio = self.error / self.allowed
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        return float(ratio[at]), tuple(map(int, at))


def _decode_arguments(case: Any, terms: Terms, with_partitions: bool) -> tuple[list[Any], dict[str, Any]]:
    arrays, options = cases.make_inputs(case, stale=terms.stale, padding=terms.padding)
    if with_partitions:
        options["partition_size"] = max(case.partition_size, case.block_size)
    return list(arrays.values()), options


def _tile_arguments(case: Any, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    (q, k, v, tables, seq_lens), starts, _ = tiles.inputs(case, terms.stale, terms.padding)
    return [q, k, v, tables, starts, seq_lens], case.options


def _ragged_arguments(case: Any, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    return list(ragged.inputs(case, terms.stale, terms.padding)), case.options


def _attention(module: Any, case: Any, got: tuple[np.ndarray, ...], terms: Terms) -> Iterator[Compared]:
    want = module.oracle(case)[0]
    out = _shaped(got, want)
    error, allowed = module.compared(case, out, terms.weights or case.dtype)
    yield Compared(out, want, error, allowed)


def _shaped(got: tuple[np.ndarray, ...], *want: np.ndarray) -> Any:
    """Return the answer's arrays in float64, one or a tuple; raise `WrongResult` unless their shapes are
    right.
    """
    if [a.shape for a in got] != [a.shape for a in want]:
        found, right = (", ".join(str(a.shape) for a in each) for each in (got, want))
        raise WrongResult(f"the answer has shape {found or 'nothing'} and must have {right}")
    arrays = tuple(a.astype(np.float64) for a in got)
    return arrays if len(want) > 1 else arrays[0]


def _exact(case: Any, got: tuple[np.ndarray, ...], terms: Terms, skip: int = 0) -> Iterator[Compared]:
    """Compare every element from block `skip` on, bit for bit; NaN equals itself."""
    del terms
    want = case.wanted()
    arrays = _shaped(got, *want)
    for array, right in zip(arrays if len(want) > 1 else (arrays,), want, strict=True):
        a, b = array[skip:], right[skip:].astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        yield Compared(a, b, np.where(same, 0.0, np.inf), np.ones(a.shape), skip)


def _merged(case: Any, got: tuple[np.ndarray, ...], terms: Terms) -> Iterator[Compared]:
    del terms
    (want,) = case.wanted()
    out = _shaped(got, want)
    yield Compared(out, want, np.nan_to_num(abs(out - want), nan=np.inf), case.allowed())


def _own(case: Any, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    del terms
    return case.arguments()


ROWS = ("row", "head", "element")
OPERATIONS = {
    "paged_attention_v1": Operation(
        cases.CASES,
        functools.partial(_decode_arguments, with_partitions=False),
        functools.partial(_attention, cases),
        ROWS,
        has_stale=True,
    ),
    "paged_attention_v2": Operation(
        cases.CASES,
        functools.partial(_decode_arguments, with_partitions=True),
        functools.partial(_attention, cases),
        ROWS,
        has_stale=True,
    ),
    "tiled_paged_attention": Operation(
        tiles.CASES,
        _tile_arguments,
        functools.partial(_attention, tiles),
        ("tile", "token", "head", "element"),
        has_stale=True,
    ),
    "ragged_paged_attention": Operation(
        ragged.CASES,
        _ragged_arguments,
        functools.partial(_attention, ragged),
        ("token", "head", "element"),
        has_stale=True,
    ),
    "reshape_and_cache": Operation(
        cache_cases.WRITES,
        _own,
        functools.partial(_exact, skip=1),  # block 0 is the null block: what it holds means nothing
        ("block", "slot", "head", "element"),
        ("k_cache", "v_cache"),
        (2, 3),
    ),
    "copy_blocks": Operation(
        cache_cases.COPIES, _own, _exact, ("block", "element"), ("cache 0", "cache 1"), (0,)
    ),
    "swap_blocks": Operation(cache_cases.SWAPS, _own, _exact, ("block", "element"), ("the target",), (1,)),
    "merge": Operation(cache_cases.MERGES, _own, _merged, ROWS),
}


def cases_of(op: str) -> list[Case]:
    """Return the cases of an operation, for `pytest.mark.parametrize(..., ids=str)`."""
    return list(OPERATIONS[checked_choice("op", op, OPERATIONS)].cases)


def check(function: Callable[..., Any], op: str, case: Case, terms: Terms | None = None) -> float:
    """Run one case. Returns: its worst error, in units of what is allowed.

    Raises: WrongResult; NotServed; what the function raises.
    """
    terms = terms or Terms()
    try:
        return worst_error(function, op, case, terms)
    except WrongResult as error:
        raise WrongResult(f"{error}{_stale_hint(function, op, case, terms)}") from None


def _stale_hint(function: Callable[..., Any], op: str, case: Case, terms: Terms) -> str:
    """Return a hint for a wrong case that is right if what may not be read is zero."""
    if not OPERATIONS[op].has_stale or terms.stale == "zero":
        return ""
    try:
        worst_error(function, op, case, dataclasses.replace(terms, stale="zero"))
    except Exception:  # whatever is wrong there, too
        return ""
    filled = "slots that may not be read hold NaN (int8: 127) on purpose"
    return f"; {filled}, and with stale='zero' (--stale zero) the case passes"


def worst_error(function: Callable[..., Any], op: str, case: Case, terms: Terms) -> float:
    """Return the worst error of one case, as `check` does, whose errors are without hints."""
    found = compare(function, op, case, terms)
    for number, each in enumerate(found):
        ratio, at = each.worst
        if not ratio <= 1:
            within = f" within {each.allowed[at]:.2g}" if np.isfinite(ratio) else ""
            place = OPERATIONS[op].place(case, number, (at[0] + each.first, *at[1:]))
            raise WrongResult(
                f"{case}: {place} is {each.got[at]:.6g} and must be {each.want[at]:.6g}{within}"
            )
    return max((each.worst[0] for each in found), default=0.0)


def compare(function: Callable[..., Any], op: str, case: Case, terms: Terms) -> list[Compared]:
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
        return list(operation.compared(case, got, terms))
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
