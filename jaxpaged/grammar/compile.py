"""Compiler of constraints: each to the tables of its automaton, or to the source of a recursive one.

This runs in a process of its own (see `jaxpaged.grammar.worker`), which stops what takes too long.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.deterministic import ByteMachine
from jaxpaged.grammar.gbnf import is_gbnf, read_gbnf
from jaxpaged.grammar.lark import lark_of
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import (
    Either,
    GrammarError,
    Limits,
    Node,
    NotRegularError,
    TooLargeError,
    text,
)
from jaxpaged.grammar.places import UnmetError, read_schema
from jaxpaged.grammar.regex import parse_regex
from jaxpaged.grammar.rules import Rules, simplest
from jaxpaged.grammar.schema import Style, schema_node, schema_rules
from jaxpaged.grammar.structural_tag import StructuralTag, read_structural_tag
from jaxpaged.grammar.tables import token_automaton
from jaxpaged.grammar.vocabulary import TokenBytes

LEVELS = (4, 3, 2)  # of what is recursive, the first whose automaton is within the limits
SHARE_OF_TIME = 0.4  # of the time limit, behind which llguidance follows what might have an automaton
ANY_OBJECT = {"type": "object"}
TOO_DEEP = "the grammar has names that are too long, or is nested too deep"


class Constraint:
    """A constraint on texts, with its fields read once for every form that is compiled of it.

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
            if (machine := self._machine) is not None:
                if isinstance(machine, GrammarError):
                    raise machine
                return token_automaton(machine, tokens, self.limits)
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

        What is recursive goes to llguidance: a `grammar`, and JSON of any depth unless `max_depth` is given.
        So does what is too large for an automaton. Without llguidance, and where it cannot follow a schema
        exactly, there is None. Raises `GrammarError` for a `grammar` that cannot go there, and for what
        cannot be met.
        """
        grammar = self.fields.get("grammar")
        if grammar is not None and self._rules is None:
            return recursive.lark_source(grammar)
        try:
            if self._exact is not None:
                is_small = not isinstance(self._machine, TooLargeError)
                return None if is_small else self.large_source()
            if self.fields.get("max_depth") is not None or (grammar is None and not recursive.is_installed()):
                return None
            if grammar is not None and self._rules is not None:
                recursive.check_installed()
                return lark_of(self._rules) + recursive.EVERY_TOKEN
            return self._followed()
        except NotRegularError:
            return None  # the automaton has a sentence for it, too
        except RecursionError:
            if grammar is not None:
                raise GrammarError(TOO_DEEP) from None
            return None  # the automaton has a sentence for it

    def large_source(self) -> str | None:
        """Return the source of what is too large for an automaton, not recursive; None without llguidance."""
        if not recursive.is_installed():
            return None
        try:
            if self._is_of_json:
                return self._followed()
            assert self._exact is not None
            return lark_of(Rules(self._exact, {})) + recursive.EVERY_TOKEN
        except (GrammarError, RecursionError):
            return None

    def _followed(self) -> str | None:
        """Return the source of a constraint of JSON; None where it is not followed exactly."""
        named: dict[str, Node] = {}
        style, tag = _style(self.fields), self._tag
        try:
            if tag is not None:
                start = tag.node(lambda schema: schema_rules(schema, style, named))
            else:
                start = schema_rules(self._schema, style, named)
            return recursive.JSON_SOURCE + lark_of(Rules(start, named)) + recursive.EVERY_TOKEN
        except UnmetError:
            raise
        except GrammarError:
            return None  # the automaton has a sentence for it, or fewer levels

    def nodes(self) -> Iterator[tuple[Node, int]]:
        """Yield its texts: exactly, or for what is recursive, to fewer and fewer levels; and to how many, 0
        where they are exact.

        Raises `GrammarError`.
        """
        if self._exact is not None:
            yield self._exact, 0
        elif not self._is_of_json:
            given = shown(self.fields.get("grammar"))
            raise NotRegularError(f"structured_outputs.grammar={given} has no automaton")
        else:
            max_depth = self.fields.get("max_depth")
            for levels in LEVELS if max_depth is None else (max_depth,):
                yield self._node_of(levels), levels

    @functools.cached_property
    def _machine(self) -> ByteMachine | GrammarError | None:
        """The machine of all texts, or why there is none; None where they are recursive."""
        if self._exact is None:
            return None
        seconds = SHARE_OF_TIME * self.limits.cpu_seconds if recursive.is_installed() else math.inf
        try:
            return byte_machine(self._exact, self.limits, seconds)
        except GrammarError as problem:
            return problem

    @functools.cached_property
    def _rules(self) -> Rules | None:
        """Rules of a `grammar` that we read ourselves, in their simplest form; None of another one."""
        grammar = self.fields["grammar"]
        self._check_length("grammar", grammar)
        recursive.check_text(grammar)
        return simplest(read_gbnf(grammar)) if is_gbnf(grammar) else None

    @property
    def _is_of_json(self) -> bool:
        fields = self.fields
        is_schema = fields.get("json") is not None or bool(fields.get("json_object"))
        return is_schema or fields.get("structural_tag") is not None

    @functools.cached_property
    def _node_of(self) -> Callable[[int], Node]:
        """Return a function from a depth to the node of a JSON constraint whose values are nested at most so
        deep.

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
        """All its texts; None where they are recursive. Raises `GrammarError` if there is none."""
        fields = self.fields
        if (regex := fields.get("regex")) is not None:
            self._check_length("regex", regex)
            return parse_regex(regex)
        if (choice := fields.get("choice")) is not None:
            self._check_length("choice", "".join(choice))
            return Either(tuple(map(text, choice)))
        if not self._is_of_json:
            rules = self._rules
            return rules.start if rules is not None and not rules.named else None
        try:
            return self._node_of(0)
        except NotRegularError as problem:
            if not problem.is_recursive:
                raise
        return None

    def _check_length(self, name: str, value: str) -> None:
        max_chars = self.limits.max_spec_chars
        if len(value) > max_chars:
            raise GrammarError(f"{name} has {len(value)} characters, must have at most {max_chars}")


def _style(fields: Mapping[str, Any]) -> Style:
    space = fields.get("whitespace_pattern")
    return Style(
        is_compact=bool(fields.get("disable_any_whitespace")),
        space=None if space is None else parse_regex(space),
        only_declared=bool(fields.get("disable_additional_properties")),
    )
