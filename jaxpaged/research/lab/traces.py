"""Request traces: when each request came, how long it was, and what its prompt shares with others.

Three formats, told apart by their first line:

- Mooncake's, JSON lines: `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids`, one
  for each 512 tokens of the prompt, the last of them perhaps partial. Equal ids mean equal tokens, and equal
  tokens before them. A line may have a `block_size` of its own in place of 512, as those have that
  `LLM(..., record_trace=path)` writes; it is the same in all lines.
- Azure's, CSV: TIMESTAMP, ContextTokens, GeneratedTokens. Of content nothing is known: nothing is shared.
"""

import csv
import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import INT32_MAX, InputError, is_int, shown

LATEST_MS = 2**53  # beyond it, milliseconds are not told apart
MOONCAKE_BLOCK = 512  # tokens that a hash id stands for
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
DEFAULT_BLOCK = 16  # block size of a trace without content


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came."""

    name: str
    format: str
    arrival_s: np.ndarray  # [requests] float64, seconds since the first
    input_lens: np.ndarray  # [requests] int64, tokens; at least 1
    output_lens: np.ndarray  # [requests] int64, tokens
    content: np.ndarray | None  # [all content blocks] int64, numbered from 0; None: nothing is known of it
    block_size: int  # tokens a content block

    @property
    def num_requests(self) -> int:
        return len(self.input_lens)

    def first(self, num_requests: int) -> "Trace":
        """Return a trace of the first requests, `num_requests` or all."""
        kept = slice(min(num_requests, self.num_requests))
        content = None if self.content is None else self.content[: self.content_starts[kept.stop]]
        return replace(
            self,
            arrival_s=self.arrival_s[kept],
            input_lens=self.input_lens[kept],
            output_lens=self.output_lens[kept],
            content=content,
        )

    @property
    def content_starts(self) -> np.ndarray:
        """[requests + 1] where each request's content blocks begin in `content`, and the last one's end."""
        return np.concatenate([[0], np.cumsum(cdiv(self.input_lens, self.block_size))])


@dataclass(frozen=True)
class Blocks:
    """A trace's prompts cut into blocks: what a prefix cache is asked for.

    A block is a symbol, and two blocks have the same if and only if they have the same content and the same
    before it. Request r's are `symbols[starts[r] : starts[r] + num_findable[r]]`.
    """

    block_size: int  # tokens
    symbols: np.ndarray  # int32
    starts: np.ndarray  # [requests] int64
    num_findable: np.ndarray  # [requests] blocks with content that others may find
    num_lookup: np.ndarray  # [requests] the first so many may be hits
    num_held: np.ndarray  # [requests] blocks that the prompt takes up
    num_distinct: int

    def hit_tokens(self, hit_blocks: np.ndarray, input_lens: np.ndarray) -> np.ndarray:
        """Return the number of tokens in the first `hit_blocks[r]` blocks of each request."""
        return np.minimum(hit_blocks * self.block_size, input_lens)


def read(path: str) -> Trace:
    """Return the trace in a file. Raises `InputError`, with the line's number, for what is wrong in it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {path!r} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not numbered:
        raise InputError(f"trace {path!r} has no requests")
    is_json = numbered[0][1].lstrip().startswith("{")
    return (_mooncake if is_json else _azure)(path, numbered)


def of_requests(requests: Iterable[Mapping[str, Any]], name: str = "requests") -> Trace:
    """Return the trace of requests that have the fields of Mooncake's lines: see the module.

    A data frame's rows will do: `frame.to_dict("records")`. Raises `InputError`, with the request's number,
    counted from 1, for what is wrong.
    """
    numbered = [(number, json.dumps(dict(each), default=_plain)) for number, each in enumerate(requests, 1)]
    if not numbered:
        raise InputError(f"trace {name!r} has no requests")
    return _mooncake(name, numbered)


def _plain(value: Any) -> Any:
    """Return NumPy's arrays and numbers as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


type Lines = list[tuple[int, str]]


def _mooncake(path: str, lines: Lines) -> Trace:
    times: list[float] = []
    inputs, outputs, ids = [], [], []
    block_size = None
    for number, line in lines:
        fail = _failing(path, number)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise fail(f"must be a JSON object ({error})") from error
        if not isinstance(value, dict):
            raise fail(f"must be a JSON object, not {shown(value)}")
        for name in ("timestamp", "input_length", "output_length", "hash_ids"):
            if name not in value:
                raise fail(f"{name} is missing")
        size = value.get("block_size", MOONCAKE_BLOCK)
        if block_size is None:
            block_size = _int(fail, "block_size", size, 1)
        if size != block_size:
            raise fail(f"block_size={shown(size)} must be that of the lines before, {block_size}")
        time, hash_ids = value["timestamp"], value["hash_ids"]
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= LATEST_MS:
            raise fail(f"timestamp={shown(time)} must be a number of ms, from 0 to {LATEST_MS}")
        length = _int(fail, "input_length", value["input_length"], 1)
        if not isinstance(hash_ids, list) or not all(map(is_int, hash_ids)):
            raise fail(f"hash_ids={shown(hash_ids)} must be a list of ints")
        if len(hash_ids) != cdiv(length, block_size):
            rule = f"input_length={length} in blocks of {block_size} needs {cdiv(length, block_size)}"
            raise fail(f"hash_ids must have an id for each block: {rule}, not {len(hash_ids)}")
        _check_order(fail, "timestamp", times, time)
        times.append(time)
        inputs.append(length)
        outputs.append(_int(fail, "output_length", value["output_length"], 0))
        ids += hash_ids
    assert block_size is not None
    content = np.unique(_as_array(ids), return_inverse=True)[1].astype(np.int64)
    arrival = (np.array(times, np.float64) - times[0]) / 1000
    return _trace(path, "mooncake", arrival, inputs, outputs, content, block_size)


def _azure(path: str, lines: Lines) -> Trace:
    header = next(csv.reader([lines[0][1]]))
    if tuple(name.strip() for name in header) != AZURE_COLUMNS:
        raise _failing(path, lines[0][0])(
            f"must be a JSON object, or the header {','.join(AZURE_COLUMNS)}, not {shown(lines[0][1])}"
        )
    times: list[float] = []
    inputs, outputs = [], []
    for number, line in lines[1:]:
        fail = _failing(path, number)
        values = next(csv.reader([line]))
        if len(values) != len(AZURE_COLUMNS):
            raise fail(f"must have the {len(AZURE_COLUMNS)} columns of the header, not {len(values)}")
        try:
            when = datetime.datetime.fromisoformat(values[0].strip())
        except ValueError as error:
            raise fail(f"TIMESTAMP={values[0]!r} must be a date and time ({error})") from error
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.UTC)
        _check_order(fail, "TIMESTAMP", times, when.timestamp())
        times.append(when.timestamp())
        inputs.append(_int(fail, "ContextTokens", _number(values[1]), 1))
        outputs.append(_int(fail, "GeneratedTokens", _number(values[2]), 0))
    if not times:
        raise InputError(f"trace {path!r} has no requests")
    return _trace(path, "azure", np.array(times) - times[0], inputs, outputs, None, DEFAULT_BLOCK)


def _trace(
    path: str,
    format: str,
    arrival_s: np.ndarray,
    inputs: list[int],
    outputs: list[int],
    content: np.ndarray | None,
    block_size: int,
) -> Trace:
    input_lens, output_lens = np.array(inputs, np.int64), np.array(outputs, np.int64)
    return Trace(Path(path).name, format, arrival_s, input_lens, output_lens, content, block_size)


def _failing(path: str, number: int) -> Callable[[str], InputError]:
    return lambda what: InputError(f"trace {path!r}, line {number}: {what}")


def _int(fail: Callable[[str], InputError], name: str, value: object, least: int) -> int:
    if not is_int(value) or not least <= value <= INT32_MAX:  # type: ignore[operator]
        raise fail(f"{name}={shown(value)} must be an int >= {least}")
    return int(value)  # type: ignore[call-overload]


def _number(text: str) -> object:
    """Return the int that a column holds, or its text if it holds none."""
    try:
        return int(text)
    except ValueError:
        return text


def _check_order(fail: Callable[[str], InputError], name: str, times: list[float], time: float) -> None:
    if times and time < times[-1]:
        raise fail(f"{name} runs backwards: requests must be in the order in which they came")


def _as_array(ids: list[int]) -> np.ndarray:
    """Return ids as an array; ids may be as large as they like, a hash's for example."""
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        return np.array([str(each) for each in ids])


def blocks(trace: Trace, block_size: int, *, partial: bool = False) -> Blocks:
    """Divide the trace's prompts into blocks of `block_size` tokens, a divisor or a multiple of the trace's
    own.

    As the engine has it, full blocks can be found, and of each prompt at least one token is computed; with
    `partial` also the last, partly filled one, and all of a prompt: as simulators count that know only ids.
    """
    trace_block_size = trace.block_size
    if trace.content is not None and trace_block_size % block_size and block_size % trace_block_size:
        raise InputError(
            f"block_size={block_size} must divide the trace's own {trace_block_size} tokens, "
            "or be a multiple of them"
        )
    lens = trace.input_lens
    num_held = cdiv(lens, block_size)
    num_findable = num_held if partial else lens // block_size
    num_lookup = num_held if partial else (lens - 1) // block_size
    starts = np.cumsum(num_findable) - num_findable
    total = int(num_findable.sum())
    if total > INT32_MAX:
        raise InputError(f"block_size={block_size} must be larger: the trace has {total:,} such blocks")
    if trace.content is None:
        symbols, num_distinct = np.arange(total), total
    else:
        place = np.arange(total) - np.repeat(starts, num_findable)
        # The block's last token names it: in which content block it is, and where in that.
        end = np.minimum((place + 1) * block_size, np.repeat(lens, num_findable)) - 1
        ids = trace.content[np.repeat(trace.content_starts[:-1], num_findable) + end // trace_block_size]
        per_id = max(1, trace_block_size // block_size)
        symbols = ids * per_id + end % trace_block_size // block_size if per_id > 1 else ids
        symbols = _dense(symbols, int(trace.content.max()) * per_id + per_id)
        num_distinct = int(symbols.max(initial=-1)) + 1
    return Blocks(
        block_size, symbols.astype(np.int32), starts, num_findable, num_lookup, num_held, num_distinct
    )


def _dense(values: np.ndarray, bound: int) -> np.ndarray:
    """Renumber the values, all below `bound`, from 0."""
    if bound > 2**28:
        return np.unique(values, return_inverse=True)[1]
    is_there = np.zeros(bound, bool)
    is_there[values] = True
    return (np.cumsum(is_there) - 1)[values]
