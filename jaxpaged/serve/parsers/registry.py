"""The parsers by their names, which are vLLM's where it has one like it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.serve.parsers.base import Chain, Fragment, NoCalls, Parser

TOOL_PARSERS: dict[str, type[Parser]] = {}
REASONING_PARSERS: dict[str, type[Parser]] = {}
# Parsers of answers whose form a grammar forces: no model's own, and not to be chosen.
FORCED_PARSERS: dict[str, type[Parser]] = {}


class ReadsAnswers(Protocol):
    """Protocol of a reader of one answer's text."""

    def feed(self, text: str) -> list[Fragment]:
        """Return the fragments that these characters complete."""

    def finish(self) -> list[Fragment]:
        """Return the fragments that are left at the answer's end."""


def tool_parser[P: type[Parser]](*names: str) -> Callable[[P], P]:
    """Make a class known as a parser of calls, by these names."""
    return _registering(TOOL_PARSERS, names)


def reasoning_parser[P: type[Parser]](*names: str) -> Callable[[P], P]:
    """Make a class known as a parser of reasoning, by these names."""
    return _registering(REASONING_PARSERS, names)


def forced_parser[P: type[Parser]](*names: str) -> Callable[[P], P]:
    """Make a class known as a parser of forced answers, by these names."""
    return _registering(FORCED_PARSERS, names)


def _registering[P: type[Parser]](table: dict[str, type[Parser]], names: Sequence[str]) -> Callable[[P], P]:
    def register(parser: P) -> P:
        table.update(dict.fromkeys(names, parser))
        return parser

    return register


def answer_parser(
    calls: str | None,
    reasoning: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompt: str = "",
    begun: str = "",
    is_end: Callable[[int], bool] | None = None,
) -> ReadsAnswers | None:
    """Return the parser of an answer, made of a parser of calls and one of reasoning; None if both are None.

    A form that is read for both by one class is read once. is_end: what the parser of reasoning asks of marks
    of its end, as `Parser` says.
    """
    of_calls = (TOOL_PARSERS | FORCED_PARSERS)[calls](tools, prompt, begun) if calls else None
    if reasoning is None:
        return of_calls
    if of_calls is not None and isinstance(of_calls, REASONING_PARSERS[reasoning]):
        return of_calls
    of_reasoning = REASONING_PARSERS[reasoning](tools, prompt, begun)
    of_reasoning.is_end = is_end
    return NoCalls(of_reasoning) if of_calls is None else Chain(of_reasoning, of_calls)


def detected(table: Mapping[str, type[Parser]], template: str) -> str | None:
    """Return the name of the parser whose signs a chat template has all; of several, the one with most."""
    parsers = [
        name for name, each in table.items() if each.signs and all(sign in template for sign in each.signs)
    ]
    return max(parsers, key=lambda name: len(table[name].signs), default=None)
