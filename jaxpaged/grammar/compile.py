"""Compiler of constraints: each to the tables of its automaton.

A constraint is a mapping with the fields of `StructuredOutputsParams`. This runs in a process of its own (see
`jaxpaged.grammar.worker`), which stops what takes too long.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import Either, GrammarError, Limits, Node, NotRegularError, text
from jaxpaged.grammar.recursive_schema import schema_source, tag_source
from jaxpaged.grammar.regex import parse_regex
from jaxpaged.grammar.schema import Style, read_schema, schema_node
from jaxpaged.grammar.structural_tag import read_structural_tag
from jaxpaged.grammar.tables import token_automaton
from jaxpaged.grammar.vocabulary import TokenBytes

LEVELS = (4, 3, 2)  # of what is recursive, the first whose automaton is within the limits
ANY_OBJECT = {"type": "object"}


def compile_constraint(fields: Mapping[str, Any], tokens: TokenBytes, limits: Limits) -> TokenAutomaton:
    """Return the automaton of a constraint.

    What is recursive is followed to `max_depth` levels, or to as many of `LEVELS` as are within the limits.
    Raises `GrammarError`.
    """
    problem: GrammarError | None = None
    try:
        for node, levels in nodes_of(fields, limits):
            try:
                made = token_automaton(byte_machine(node, limits), tokens, limits)
                return dataclasses.replace(made, levels=levels)
            except GrammarError as error:
                problem = problem or error
    except RecursionError:
        problem = problem or GrammarError("the grammar has names that are too long, or is nested too deep")
    assert problem is not None
    raise problem


def recursive_source(fields: Mapping[str, Any], limits: Limits) -> str | None:
    """Return the source of a constraint that llguidance is to follow; None for one that gets an automaton.

    A `grammar` goes to llguidance. So does JSON of any depth, of a schema that refers to itself or allows any
    value, where llguidance is installed and reads the schema as we do, unless `max_depth` is given. Raises
    `GrammarError` for a `grammar` that cannot go there, and for a schema that cannot be met.
    """
    if (grammar := fields.get("grammar")) is not None:
        _check_length("grammar", grammar, limits)
        return recursive.lark_source(grammar)
    if fields.get("max_depth") is not None or not recursive.is_installed():
        return None
    if (node_of := _node_of(fields, limits)) is None:
        return None
    if (tag := fields.get("structural_tag")) is not None:
        source = tag_source(read_structural_tag(tag), fields)
    else:
        source = schema_source(_schema(fields, limits), fields)
    try:
        if source is None or _exact(node_of) is not None:
            return None
        node_of(1)  # if any value is valid, one is in which nothing comes again
    except RecursionError:
        return None  # the automaton has a sentence for it
    return source


def nodes_of(fields: Mapping[str, Any], limits: Limits) -> Iterator[tuple[Node, int]]:
    """Yield the texts of a constraint: exactly, or for what is recursive, to fewer and fewer levels; and to
    how many, 0 where they are exact.

    Raises `GrammarError`.
    """
    if (regex := fields.get("regex")) is not None:
        _check_length("regex", regex, limits)
        yield parse_regex(regex), 0
    elif (choice := fields.get("choice")) is not None:
        _check_length("choice", "".join(choice), limits)
        yield Either(tuple(map(text, choice))), 0
    elif (node_of := _node_of(fields, limits)) is not None:
        if (exact := _exact(node_of)) is not None:
            yield exact, 0
            return
        most = fields.get("max_depth")
        for levels in LEVELS if most is None else (most,):
            yield node_of(levels), levels
    else:
        raise NotRegularError(f"structured_outputs.grammar={shown(fields.get('grammar'))} has no automaton")


def _node_of(fields: Mapping[str, Any], limits: Limits) -> Callable[[int], Node] | None:
    """Return what makes the texts of a constraint of JSON, with values inside values to so many levels.

    With 0 levels it raises an error where they may be of any depth. None for a constraint of another kind.
    """
    style = _style(fields)
    if (tag := fields.get("structural_tag")) is not None:
        _check_length("structural_tag", tag, limits)
        read = read_structural_tag(tag)
        return lambda levels: read.node(lambda schema: schema_node(schema, style, levels))
    if fields.get("json") is None and not fields.get("json_object"):
        return None
    schema = _schema(fields, limits)
    return lambda levels: schema_node(schema, style, levels)


def _schema(fields: Mapping[str, Any], limits: Limits) -> Any:
    schema = fields.get("json", ANY_OBJECT)
    return read_schema(schema if isinstance(schema, str) else json.dumps(schema), limits)


def _exact(node_of: Callable[[int], Node]) -> Node | None:
    """Return all texts; None where they may be of any depth. Raises `GrammarError` where there are none."""
    try:
        return node_of(0)
    except NotRegularError as problem:
        if not problem.is_recursive:
            raise
    return None


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
