"""Recursive grammars over few tokens, each for llguidance and as the oracle's rules."""

import functools
import json
from typing import Any

from jaxpaged.engine.driver import Driver
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import Limits
from jaxpaged.grammar.recursive import Language
from jaxpaged.grammar.vocabulary import TokenBytes
from jaxpaged.structured_outputs import StructuredOutputsParams
from reference.context_free import TokenGrammar
from tests import tiny, tiny_grammars

# The sum of terms, with texts of two bytes a character, and of several characters a token.
SUM = 'start: term ("+" term)*\nterm: "1" | "é" | "(" start ")"\n'
SUM_RULES = {
    "start": [["term", "more"]],
    "more": [[], [b"+", "term", "more"]],
    "term": [[b"1"], ["é".encode()], [b"(", "start", b")"]],
}
# The same language in llama.cpp's notation, without the é; and one that begins with itself.
GBNF = 'root ::= term ("+" term)*\nterm ::= "1" | "(" root ")"\n'
GBNF_RULES = {**SUM_RULES, "term": [[b"1"], [b"(", "start", b")"]]}
LEFT = 'start: start "+1" | "1"\n'
LEFT_RULES = {"start": [[b"1", "more"]], "more": [[], [b"+1", "more"]]}
LISTS = {"type": "array", "items": {"$ref": "#"}}
LIST_RULES = {
    "start": [[b"[", "inside"]],
    "inside": [[b"]"], ["start", "rest"]],
    "rest": [[b"]"], [b", ", "start", "rest"]],
}
TREE = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/below"}, "b": {"enum": [1, "é"]}},
    "required": ["b"],
    "$defs": {"below": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "title": "or none"}},
}
TREE_RULES = {
    "start": [[b"{", "first", b'"b": ', "leaf", b"}"]],
    "first": [[], [b'"a": ', "below", b", "]],
    "below": [[b"null"], ["start"]],
    "leaf": [[b"1"], ['"é"'.encode()]],
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sum": ({"grammar": SUM}, SUM_RULES),
    "gbnf": ({"grammar": GBNF}, GBNF_RULES),
    "left": ({"grammar": LEFT}, LEFT_RULES),
    "lists": ({"json": LISTS, "disable_any_whitespace": True}, LIST_RULES),
    "tree": ({"json": TREE, "disable_any_whitespace": True}, TREE_RULES),
}
END = tiny_grammars.END
PIECES = [
    *(
        "+",
        "1",
        "(",
        ")",
        "[",
        "]",
        ", ",
        ",",
        " ",
        "{",
        "}",
        '"',
        "a",
        "b",
        ":",
        "null",
        "é",
        "+1",
        "((",
        "))",
    ),
    *(
        "))",
        "1)",
        "(1",
        "[[",
        "]]",
        "], [",
        '{"',
        '"a": ',
        '"b": ',
        '"b": 1}',
        "}}",
        "nu",
        "ll",
        "1+1",
        "é)",
        '"}',
    ),
]
TOKENS = TokenBytes(
    tuple(
        [b"", *(each.encode() for each in PIECES), b"\xc3", b"\xa9", b"\xa9+", b"(", *[b""] * 3]
        + [b"~%d" % i for i in range(tiny.CONFIG.vocab_size - len(PIECES) - 8)]
    ),
    (END,),
)


@functools.cache
def language(name: str) -> Language:
    source = Constraint(CASES[name][0], Limits()).source()
    assert source is not None
    return Language(source, TOKENS)


def oracle(name: str, opens: int | None = None, begins: int | None = None) -> TokenGrammar:
    return TokenGrammar(CASES[name][1], TOKENS.raw, TOKENS.eos_ids, opens, begins)


def asking(name: str, **more: Any) -> dict[str, Any]:
    """Return the sampling option of a grammar of `CASES`."""
    return {"structured_outputs": StructuredOutputsParams(**CASES[name][0], **more)}


def compiled(params: StructuredOutputsParams) -> Any:
    """Return the language of a constraint, or the automaton of one of `tiny_grammars`."""
    if params.regex is not None:
        return tiny_grammars.compiled(params)
    given = json.loads(params.key())
    [name] = [name for name, (its, _) in CASES.items() if all(given.get(key) == its[key] for key in its)]
    return language(name)


def with_languages(driver: Driver) -> Driver:
    """Let a driver's requests have recursive grammars, and those of `tiny_grammars`."""
    return tiny_grammars.with_grammars(driver, compiled)
