"""Validity of single values: those of an `enum` beside other keywords, and names of properties."""

import functools
from collections.abc import Iterator
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar.deterministic import ByteMachine, matches
from jaxpaged.grammar.formats import FORMATS
from jaxpaged.grammar.json_values import format_texts, pattern_text
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import Limits, both
from jaxpaged.grammar.places import Place, not_regular, wrong


def is_valid(value: Any, place: Place, whole: Any) -> bool:
    """Return whether a value is valid at a place of a whole schema. Raises `GrammarError` if none could be.

    Nothing is fetched: a reference that is not in the schema is an error.
    """
    import jsonschema  # here: few schemas need it
    import referencing

    ours = {"pattern": _pattern, "format": _format}
    ours |= dict.fromkeys(("patternProperties", "additionalProperties"), _of_properties)
    names = jsonschema.Draft202012Validator.VALIDATORS
    ours = {key: functools.partial(check, path=place.path, theirs=names[key]) for key, check in ours.items()}
    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, ours)
    try:
        return kind(whole, registry=referencing.Registry()).evolve(schema=place.schema).is_valid(value)
    except (
        *(jsonschema.exceptions.UnknownType, referencing.exceptions.Unresolvable),
        *(TypeError, AttributeError, KeyError),
    ) as problem:
        raise wrong(place.path, f"has a keyword that cannot be read: {shown(str(problem))}") from None


def contains_match(text: str, pattern: str, path: str) -> bool:
    """Return whether a text contains a match of a pattern. Raises `GrammarError`."""
    return matches(_searcher(pattern, path), text)


@functools.lru_cache(maxsize=256)
def _searcher(pattern: str, path: str) -> ByteMachine:
    return byte_machine(pattern_text(pattern, path), Limits())


@functools.lru_cache(maxsize=32)
def _format_machine(name: str) -> ByteMachine:
    return byte_machine(both(format_texts(name)), Limits())


# Keywords as jsonschema calls them. Its own would give patterns to `re`, which may take forever.


def _pattern(
    validator: Any, pattern: Any, instance: Any, schema: Any, *, path: str, theirs: Any
) -> Iterator[Any]:
    if isinstance(instance, str) and not contains_match(instance, pattern, f"{path}/pattern"):
        yield _error()


def _format(
    validator: Any, name: Any, instance: Any, schema: Any, *, path: str, theirs: Any
) -> Iterator[Any]:
    if isinstance(instance, str) and name in FORMATS and not matches(_format_machine(name), instance):
        yield _error()


def _of_properties(
    validator: Any, value: Any, instance: Any, schema: Any, *, path: str, theirs: Any
) -> Iterator[Any]:
    if isinstance(instance, dict) and schema.get("patternProperties"):
        raise not_regular(path, "patternProperties beside an object of an enum is not followed")
    yield from theirs(validator, value, instance, schema) or ()


def _error() -> Exception:
    from jsonschema.exceptions import ValidationError

    return ValidationError("")
