"""Compiler of constraints: each to the tables of its automaton, or to the source of a recursive one.

This runs in a process of its own (see `jaxpaged.grammar.worker`), which stops what takes too long.
"""

import dataclasses
import functools
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
from jaxpaged.grammar.structural_tag import StructuralTag, read_structural_tag
from jaxpaged.grammar.tables import token_automaton
from jaxpaged.grammar.vocabulary import TokenBytes

LEVELS = (4, 3, 2)  # of what is recursive, the first whose automaton is within the limits
ANY_OBJECT = {"type": "object"}
TOO_DEEP = "the grammar has names that are too long, or is nested too deep"


class Constraint:
    """A constraint, with what is read of its fields: once, though two things may be made of it.

    fields: those of `StructuredOutputsParams`.
    """

    def __init__(self, fields: Mapping[str, Any], limits: Limits) -> None:
        self.fields, self.limits = fields, limits

    def automaton(self, tokens: TokenBytes) -> TokenAutomaton:
        """Return its automaton.

        What is recursive is followed to `max_depth` levels, or to as many of `LEVELS` as are within the
        limits. Raises `GrammarError`.
        """
        problem: GrammarError | None = None
        try:
            for node, levels in self.nodes():
                try:
                    made = token_automaton(byte_machine(node, self.limits), tokens, self.limits)
                    return dataclasses.replace(made, levels=levels)
                except GrammarError as error:
                    problem = problem or error
        except RecursionError:
            problem = problem or GrammarError(TOO_DEEP)
        assert problem is not None
        raise problem

    def source(self) -> str | None:
        """Return the source that llguidance is to follow; None for a constraint that gets an automaton.

        A `grammar` goes to llguidance. So does JSON of any depth, of a schema that refers to itself or allows
        any value, where llguidance is installed and reads the schema as we do, unless `max_depth` is given.
        Raises `GrammarError` for a `grammar` that cannot go there, and for a schema that cannot be met.
        """
        fields = self.fields
        if (grammar := fields.get("grammar")) is not None:
            self._check_length("grammar", grammar)
            return recursive.lark_source(grammar)
        if fields.get("max_depth") is not None or not recursive.is_installed() or not self._is_of_json:
            return None
        if self._tag is not None:
            source = tag_source(self._tag, fields)
        else:
            source = schema_source(self._schema, fields)
        try:
            if source is None or self._exact is not None:
                return None
            self._node_of(1)  # if any value is valid, one is in which nothing comes again
        except RecursionError:
            return None  # the automaton has a sentence for it
        return source

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Yield its texts: exactly, or for what is recursive, to fewer and fewer levels; and to how many, 0
        where they are exact.

        Raises `GrammarError`.
        """
        fields = self.fields
        if (regex := fields.get("regex")) is not None:
            self._check_length("regex", regex)
            yield parse_regex(regex), 0
        elif (choice := fields.get("choice")) is not None:
            self._check_length("choice", "".join(choice))
            yield Either(tuple(map(text, choice))), 0
        elif not self._is_of_json:
            given = shown(fields.get("grammar"))
            raise NotRegularError(f"structured_outputs.grammar={given} has no automaton")
        elif self._exact is not None:
            yield self._exact, 0
        else:
            most = fields.get("max_depth")
            for levels in LEVELS if most is None else (most,):
                yield self._node_of(levels), levels

    @property
    def _is_of_json(self) -> bool:
        fields = self.fields
        is_schema = fields.get("json") is not None or bool(fields.get("json_object"))
        return is_schema or fields.get("structural_tag") is not None

    @functools.cached_property
    def _node_of(self) -> Callable[[int], Node]:
        """Return what makes the texts of a constraint of JSON, with values inside values to so many levels.

        With 0 levels it raises an error where they may be of any depth.
        """
        style, tag = _style(self.fields), self._tag
        if tag is not None:
            return lambda levels: tag.node(lambda schema: schema_node(schema, style, levels))
        schema = self._schema
        return lambda levels: schema_node(schema, style, levels)

    @functools.cached_property
    def _tag(self) -> StructuralTag | None:
        if (tag := self.fields.get("structural_tag")) is None:
            return None
        self._check_length("structural_tag", tag)
        return read_structural_tag(tag)

    @functools.cached_property
    def _schema(self) -> Any:
        schema = self.fields.get("json", ANY_OBJECT)
        return read_schema(schema if isinstance(schema, str) else json.dumps(schema), self.limits)

    @functools.cached_property
    def _exact(self) -> Node | None:
        """All texts of a constraint of JSON; None where they may be of any depth.

        Raises `GrammarError` where there are none.
        """
        try:
            return self._node_of(0)
        except NotRegularError as problem:
            if not problem.is_recursive:
                raise
        return None

    def _check_length(self, name: str, value: str) -> None:
        most = self.limits.max_spec_chars
        if len(value) > most:
            raise GrammarError(f"{name} has {len(value)} characters, must have at most {most}")


def _style(fields: Mapping[str, Any]) -> Style:
    space = fields.get("whitespace_pattern")
    return Style(
        is_compact=bool(fields.get("disable_any_whitespace")),
        space=None if space is None else parse_regex(space),
        only_declared=bool(fields.get("disable_additional_properties")),
    )
