"""Structural tags: free text in which marks begin parts that follow a schema, in vLLM's two forms."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar.nodes import Either, GrammarError, Node, Tagged, Then, text

NAME = "structural_tag"
MAX_TAGS = 256


@dataclass(frozen=True)
class StructuralTag:
    """Structural tag as it was read.

    behind: for each trigger what may stand behind it: a text, a schema and an end each.
    """

    behind: dict[str, list[tuple[str, Any, str]]]
    must_have_one: bool
    ends_with_first: bool

    def node(self, node_of: Callable[[Any], Node]) -> Node:
        """Return its texts; `node_of` reads its schemas. Raises `GrammarError`."""

        def tag(begin: str, schema: Any, end: str) -> Node:
            return Then((text(begin), node_of(schema), text(end)))

        tags = tuple(
            (trigger, Either(tuple(tag(*each) for each in triggered)))
            for trigger, triggered in self.behind.items()
        )
        return Tagged(tags, must_have_one=self.must_have_one, ends_with_first=self.ends_with_first)


def read_structural_tag(value: str) -> StructuralTag:
    """Return a structural tag from JSON text.

    value: has `structures` (`begin`, `schema`, `end`) and `triggers`, or a `format` of the type
    `triggered_tags`. Each `begin` must begin with a trigger. Raises `GrammarError`.
    """
    try:
        tag = json.loads(value)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"{NAME}={shown(value)} must be JSON: {problem}") from None
    form = tag.get("format", tag) if isinstance(tag, dict) else {}
    if not isinstance(form, dict):
        raise _error(f"has format={shown(form)}, must be an object", "#")
    if "structures" in form:
        given_tags, bare = form["structures"], "schema"
    elif form.get("type") == "triggered_tags":
        given_tags, bare = form.get("tags"), "content"
    else:
        kind = form.get("type")
        raise _error(
            f"has type={shown(kind)}, must have structures, or a format of type='triggered_tags'", "#"
        )
    triggers = form.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise _error("has triggers that are not a list of texts", "#/triggers")
    if (
        not isinstance(given_tags, list)
        or not 0 < len(given_tags) <= MAX_TAGS
        or not 0 < len(triggers) <= MAX_TAGS
    ):
        raise _error(f"must have 1 to {MAX_TAGS} tags, and triggers", "#")
    behind: dict[str, list[tuple[str, Any, str]]] = {trigger: [] for trigger in triggers}
    for i, each in enumerate(given_tags):
        path = f"#/{'tags' if bare == 'content' else 'structures'}/{i}"
        begin, end, schema = _parts(each, bare, path)
        trigger = next((mark for mark in triggers if begin.startswith(mark)), None)
        if trigger is None:
            raise _error(f"has begin={shown(begin)}, which begins with none of triggers", path)
        behind[trigger].append((begin[len(trigger) :], schema, end))
    return StructuralTag(
        {trigger: tags for trigger, tags in behind.items() if tags},
        must_have_one=_flag(form, "at_least_one"),
        ends_with_first=_flag(form, "stop_after_first"),
    )


def _parts(each: Any, bare: str, path: str) -> tuple[str, str, Any]:
    """Return where a tag begins and ends, and its schema."""
    if not isinstance(each, dict) or bare not in each:
        raise _error(f"must be an object with begin, {bare} and end", path)
    begin, end, schema = each.get("begin"), each.get("end"), each[bare]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise _error("must have begin and end, each a text", path)
    if bare == "content":
        kind = schema.get("type") if isinstance(schema, dict) else schema
        if kind != "json_schema" or "json_schema" not in schema:
            raise _error(f"has a content of type={shown(kind)}, must be 'json_schema'", path)
        schema = schema["json_schema"]
    return begin, end, schema


def _flag(form: dict[str, Any], name: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise _error(f"has {name}={shown(value)}, must be true or false", "#")
    return value


def _error(what: str, path: str) -> GrammarError:
    return GrammarError(f"{NAME} at {path} {what}", path)
