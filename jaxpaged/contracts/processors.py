"""The contract of logits processors: a function from outside that changes the logits of requests.

    processor(logits, request) -> logits

- logits: float32 [rows, vocab], after the requests' own rules: allowed tokens, penalties, biases. A barred
  token has minus infinity.
- request: `RequestRows`, arrays with a line a row.
- the result: float32 [rows, vocab]. A row in which it leaves no finite number stays as it was.

It runs inside the compiled loop, for requests that give one of its arguments in `SamplingParams.extra_args`;
without arguments for all. The rows of others stay as they are, to the bit. A row's logits may depend on that
row alone, so that an answer is the same in any company. Beam searches are not processed.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.checks import InputError, check, checked_bool, checked_int, checked_number, shown, unknown
from jaxpaged.contracts import versions
from jaxpaged.contracts.host_processors import NUMBER, HostProcessors, LogitsProcessor, Words

MOST_ARGUMENTS = 16  # of all processors of an engine
MOST_PROCESSORS = 16
WORDS = 1 + MOST_ARGUMENTS  # of a row: which processors it has, a bit each, and the arguments' bits


class RequestRows(NamedTuple):
    """Fields of the requests whose logits are processed, one line for each."""

    token_ids: Int[Array, "rows max_model_len"]  # prompt and answer; what is behind `num_tokens` is no token
    prompt_lens: Int[Array, " rows"]
    num_tokens: Int[Array, " rows"]  # prompt and answer so far: the position of the new token
    request_ids: Int[Array, " rows"]  # numbers that tell requests apart which are under way
    arguments: Mapping[str, Array]  # values [rows] of `SamplingParams.extra_args`, by name


@dataclass(frozen=True)
class Processor:
    """A logits processor from outside: the function, and its arguments with their defaults.

    A default is an int, a float or a bool; values of requests have its type.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[str, int | float | bool], ...] = ()
    contract: int = 1
    name: str = ""  # set when it is found by its path

    def __post_init__(self) -> None:
        """Check the arguments. Raises `InputError`."""
        for name, default in self.arguments:
            check("arguments", name, "named by a text", isinstance(name, str))
            _encoded(name, default, default)

    def __call__(
        self, logits: Float[Array, "rows vocab"], request: RequestRows
    ) -> Float[Array, "rows vocab"]:
        """Return the changed logits. Raises ValueError, while tracing, for another shape or dtype."""
        out = self.function(logits, request)
        shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
        if shape != logits.shape or dtype != logits.dtype:
            got = f"{dtype or type(out).__name__}{list(shape or ())}"
            raise ValueError(
                f"logits_processors: {self.name!r} must return {logits.dtype}{list(logits.shape)}, not {got}"
            )
        return out


def processor[F: Callable[..., Any]](*, contract: int = 1, **arguments: Any) -> Callable[[F], F]:
    """Declare a function's arguments with their defaults; the decorator returns the function itself."""

    def declared(function: F) -> F:
        for name, value in (
            ("arguments", Processor(function, tuple(arguments.items())).arguments),
            ("contract", contract),
        ):
            setattr(function, name, value)
        return function

    return declared


def named(asked: Sequence[Any], max_num_seqs: int, vocab_size: int) -> tuple[Processor, ...]:
    """Return the processors that paths or values mean; classes of vLLM's form are one, behind the others.

    Raises `InputError`.
    """
    parts = [_imported(each) for each in asked]
    classes = [each for each in parts if isinstance(each, type) and issubclass(each, LogitsProcessor)]
    made = tuple(_named(given, each) for given, each in zip(asked, parts, strict=True) if each not in classes)
    if classes:
        host = HostProcessors(classes, max_num_seqs, vocab_size)
        made += (Processor(host, ((NUMBER, 0),), name=" ".join(each.__qualname__ for each in classes)),)
    names = [name for each in made for name, _ in each.arguments]
    for name in names:
        check("logits_processors: argument", name, "an argument of one processor", names.count(name) == 1)
    rule = f"at most {MOST_ARGUMENTS}"
    check("number of arguments of logits_processors", len(names), rule, len(names) <= MOST_ARGUMENTS)
    return made


RULE = "a function under @processor, or a LogitsProcessor class (docs/research/processors.md)"


def _imported(asked: Any) -> Any:
    return versions.imported("logits_processors", asked, RULE) if isinstance(asked, str) else asked


def _named(asked: Any, part: Any) -> Processor:
    path = asked if isinstance(asked, str) else ""
    versions.check_version("logits_processors", asked, part, "processor")
    if not isinstance(part, Processor):
        arguments = getattr(part, "arguments", None)
        if not callable(part) or not isinstance(arguments, tuple):
            raise InputError(f"logits_processors={shown(asked)} must be {RULE}")
        part = Processor(
            function=part,
            arguments=arguments,
            contract=getattr(part, "contract", 1),
            name=getattr(part, "__qualname__", ""),
        )
    return replace(part, name=path or part.name or "processor")


def words_of(
    processors: tuple[Processor, ...], given: Mapping[str, Any] | None, params: Any = None
) -> tuple[int, ...]:
    """Return a row's words of what a request gives, an int32 each; none for a row that is not processed.

    params: parameters of the request, for processors that the host calls.

    Raises `InputError` for arguments that no processor has, and for values of another type.
    """
    given = given or {}
    known = [name for each in processors for name, _ in each.arguments]
    is_any = any(isinstance(each.function, HostProcessors) for each in processors)
    for name in given:
        if name not in known and not is_any:
            raise unknown("extra_args: argument ", name, dict.fromkeys(known))
    applies, words, keeps = 0, list[int](), None
    for bit, each in enumerate(processors):
        if isinstance(each.function, HostProcessors):
            number, keeps = each.function.take(params)
            applies |= 1 << bit
            words.append(number)
            continue
        if not each.arguments or any(name in given for name, _ in each.arguments):
            applies |= 1 << bit
        words += [_encoded(name, given.get(name, default), default) for name, default in each.arguments]
    if keeps is None:
        return (applies, *words) if applies else ()
    made = Words((applies, *words))
    made.keeps = keeps
    return made


def _encoded(name: str, value: Any, like: int | float | bool) -> int:
    """Return the bits of an argument as an int32. Raises `InputError` unless it is of its default's type."""
    name = f"extra_args: {name}"
    if isinstance(like, bool):
        return int(checked_bool(name, value))
    if isinstance(like, int):
        return checked_int(name, value, "an int in [-2**31, 2**31)", -(2**31))
    check(name, like, "by default an int, a float or a bool", isinstance(like, float))
    number = checked_number(name, value, "a number that float32 has", -3e38, 3e38)
    return int(np.float32(number).view(np.int32))


def processed(
    processors: tuple[Processor, ...],
    logits: Float[Array, "rows vocab"],
    words: Int[Array, "rows words"],
    applies: Bool[Array, " rows"],
    rows: tuple[Array, Array, Array, Array],
) -> Float[Array, "rows vocab"]:
    """Return the logits changed by the processors of those rows to which they apply.

    words: of each row, as `words_of` makes them. rows: the arrays of `RequestRows` before the arguments.
    """
    place = 1
    for bit, each in enumerate(processors):
        arguments, of_rows = {}, applies & ((words[:, 0] >> bit) & 1 == 1)
        for name, default in each.arguments:
            bits = words[:, place]
            if isinstance(default, float):
                bits = lax.bitcast_convert_type(bits, jnp.float32)
            arguments[name] = bits != 0 if isinstance(default, bool) else bits
            place += 1
        if isinstance(each.function, HostProcessors):
            arguments[NUMBER] = jnp.where(of_rows, arguments[NUMBER], 0)
        change = functools.partial(_changed, each, of_rows, RequestRows(*rows, arguments))
        logits = lax.cond(jnp.any(of_rows), change, lambda logits: logits, logits)
    return logits


def _changed(
    each: Processor, of_rows: Bool[Array, " rows"], request: RequestRows, logits: Float[Array, "rows vocab"]
) -> Float[Array, "rows vocab"]:
    """Return the logits after a processor; a row that it leaves without a finite logit keeps its old ones."""
    new = each(logits, request)
    is_left = jnp.any(jnp.isfinite(new), axis=1)
    return jnp.where((of_rows & is_left)[:, None], new, logits)
