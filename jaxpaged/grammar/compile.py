"""Compiler of constraints: each to the tables of its automaton.

A constraint is a mapping with the fields of `StructuredOutputsParams`. This runs in a process of its own (see
`jaxpaged.grammar.worker`), which stops what takes too long.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import Either, GrammarError, Limits, Node, NotRegularError, text
from jaxpaged.grammar.recursive_schema import schema_source
from jaxpaged.grammar.regex import parse_regex
from jaxpaged.grammar.schema import Style, read_schema, schema_node
from jaxpaged.grammar.structural_tag import structural_tag_node
from jaxpaged.grammar.tables import token_automaton
from jaxpaged.grammar.vocabulary import TokenBytes

LEVELS = (4, 3, 2)  # of what is recursive, the first whose automaton is within the limits
ANY_OBJECT = {"type": "object"}


def compile_constraint(fields: Mapping[str, Any], tokens: TokenBytes, limits: Limits) -> TokenAutomaton:
    """Return the automaton of a constraint.

    What is recursive is followed to `LEVELS` levels. Raises `GrammarError`.
    """
    problem: GrammarError | None = None
    try:
        for node in nodes_of(fields, limits):
            try:
                return token_automaton(byte_machine(node, limits), tokens, limits)
            except GrammarError as error:
                problem = problem or error
    except RecursionError:
        problem = problem or GrammarError("the grammar has names that are too long, or is nested too deep")
    assert problem is not None
    raise problem


def recursive_source(fields: Mapping[str, Any], limits: Limits) -> str | None:
    """Return the source of a constraint that llguidance is to follow; None for one that gets an automaton.

    A `grammar` goes to llguidance, and so does a JSON schema that refers to itself, where llguidance is
    installed and reads it as we do. Raises `GrammarError` for a `grammar` that cannot go there, and for such
    a schema that cannot be met.
    """
    if (grammar := fields.get("grammar")) is not None:
        _check_length("grammar", grammar, limits)
        return recursive.lark_source(grammar)
    if (schema := fields.get("json")) is None or not recursive.is_installed():
        return None
    read = read_schema(schema if isinstance(schema, str) else json.dumps(schema), limits)
    if (source := schema_source(read, fields)) is not None:
        schema_node(read, _style(fields), 1)  # if any value is valid, one is in which nothing comes again
    return source


def nodes_of(fields: Mapping[str, Any], limits: Limits) -> Iterator[Node]:
    """Yield the texts of a constraint: exactly, or for what is recursive, to fewer and fewer levels.

    Raises `GrammarError`.
    """
    if (regex := fields.get("regex")) is not None:
        _check_length("regex", regex, limits)
        yield parse_regex(regex)
    elif (choice := fields.get("choice")) is not None:
        _check_length("choice", "".join(choice), limits)
        yield Either(tuple(map(text, choice)))
    elif (schema := fields.get("json")) is not None:
        value = schema if isinstance(schema, str) else json.dumps(schema)
        yield from _schema_nodes(read_schema(value, limits), fields)
    elif fields.get("json_object"):
        yield from _schema_nodes(ANY_OBJECT, fields)
    elif (tag := fields.get("structural_tag")) is not None:
        _check_length("structural_tag", tag, limits)
        yield from _at_levels(
            lambda style, levels: structural_tag_node(tag, lambda its: schema_node(its, style, levels)),
            fields,
        )
    else:
        raise NotRegularError(f"structured_outputs.grammar={shown(fields.get('grammar'))} has no automaton")


def _schema_nodes(schema: Any, fields: Mapping[str, Any]) -> Iterator[Node]:
    return _at_levels(lambda style, levels: schema_node(schema, style, levels), fields)


def _at_levels(node_of: Callable[[Style, int], Node], fields: Mapping[str, Any]) -> Iterator[Node]:
    """Yield what is made exactly, or if it is recursive, at fewer and fewer levels."""
    style = _style(fields)
    try:
        yield node_of(style, 0)
        return
    except NotRegularError as problem:
        if not problem.is_recursive:
            raise
    for levels in LEVELS:
        yield node_of(style, levels)


def _style(fields: Mapping[str, Any]) -> Style:
    space = fields.get("whitespace_pattern")
    return Style(
        is_compact=bool(fields.get("disable_any_whitespace")),
        space=None if space is None else parse_regex(space),
        only_declared=bool(fields.get("disable_additional_properties")),
    )


def _check_length(name: str, value: str, limits: Limits) -> None:
    if len(value) > limits.max_spec_chars:
        raise GrammarError(f"{name} has {len(value)} characters, must have at most {limits.max_spec_chars}")
