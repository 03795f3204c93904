"""Calls as Llama 3.2, Llama 4 and others write them: an answer that is a Python list of calls.

[first(city="Berlin", days=3), second()]
"""

import ast
import json
import re
from typing import Any

from jaxpaged.serve.parsers.base import SPACE, Arguments, Begin, Parser, Reads, Source, Text
from jaxpaged.serve.parsers.registry import tool_parser

BEGIN, END = "<|python_start|>", "<|python_end|>"
_NEXT = re.compile(r"""["'()\[\]{}\\]""")
_LITERALS = {"true": True, "false": False, "null": None}  # as JSON writes them, and models, too


class _ListEnd:
    """Finds the bracket that closes the list which the text begins with."""

    def __init__(self) -> None:
        self._depth, self._quote, self._is_escaped = 0, "", False

    def __call__(self, text: str, at: int) -> tuple[int, bool]:
        """Return the index up to which the text belongs to the list, and whether the list ends there."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            match = _NEXT.search(text, at)
            if match is None:
                return len(text), False
            char, at = match[0], match.end()
            if char == "\\":
                self._is_escaped = True
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += 1 if char in "([{" else -1
                if not self._depth:
                    return at, True
        return at, False


@tool_parser("pythonic", "llama4_pythonic")
class Pythonic(Parser):
    """A list is read as a whole, so its calls come all at once. Nothing of it is run."""

    def read(self, source: Source) -> Reads[None]:
        """Yield the calls of a list with which the answer begins, then text."""
        source.record()
        yield from source.run(SPACE)
        yield from source.takes(BEGIN)
        yield from source.run(SPACE)
        if (yield from source.peek()) == "[":
            text, is_whole = yield from source.scan(_ListEnd())
            calls = _calls(text) if is_whole else None
            if calls:
                source.forget()
                yield from source.takes(END)
                for name, arguments in calls:
                    yield Begin(name)
                    yield Arguments(arguments)
        yield Text(source.recorded())
        source.forget()
        yield from source.rest(Text)


def _calls(text: str) -> list[tuple[str, str]] | None:
    """Return names and arguments as JSON; None where the text is no list of calls with plain values."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_call(each) for each in tree.elts]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    name = ast.unparse(node.func)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ValueError
    arguments = {str(each.arg): _value(each.value) for each in node.keywords if each.arg}
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return _LITERALS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(ast.literal_eval(k)): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    return ast.literal_eval(node)
