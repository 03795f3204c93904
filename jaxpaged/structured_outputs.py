"""Structured outputs: what the text of an answer must look like. Names and defaults are vLLM's."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, check, checked_bool, checked_int, shown

# Kinds of constraints, of which one is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MOST_CHOICES = 4096
MOST_LEVELS = 16
BEGINNINGS = ("after_token_id", "reasoning_token_id")  # fields that say where a constraint begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on an answer's text. One of the first six fields is given.

    json: a JSON schema, as a mapping or as JSON text. A pydantic model gives one by `model_json_schema()`.
    regex: a regular expression that the whole answer matches.
    choice: texts, of which the answer is one.
    grammar: a grammar in Lark's notation or in GBNF; it may be recursive.
    json_object: any JSON object.
    structural_tag: parts of an answer that follow schemas, each between marks; as JSON text.
    disable_any_whitespace: no space between the values of JSON.
    disable_additional_properties: no properties of objects beyond those that a schema names.
    whitespace_pattern: a regular expression for the space between the values of JSON.
    max_depth: levels of values inside values where nothing else bounds them, as in `json_object`, from 1 to
        MOST_LEVELS. So they have an automaton, and the host need not follow them. None: any depth.
    after_token_id: a token behind which the constraint begins, as the one that ends a model's reasoning.
        None: it begins with the answer.
    reasoning_token_id: a token that begins the reasoning, which `after_token_id` ends. An answer that begins
        with another token has no reasoning: the constraint begins with it. None: it always waits for
        `after_token_id`.

    Raises `InputError` for a value of another type, and if none or several of the six are given.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    max_depth: int | None = None
    after_token_id: int | None = None
    reasoning_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises `InputError`."""
        schema = self.json
        is_schema = schema is None or isinstance(schema, str | Mapping)
        check("structured_outputs.json", schema, "a JSON schema: a mapping, or JSON text", is_schema)
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            is_text = value is None or (isinstance(value, str) and value != "")
            check(f"structured_outputs.{name}", value, "None or a text that is not empty", is_text)
        if self.choice is not None:
            self._check_choice(self.choice)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            checked_bool(f"structured_outputs.{name}", getattr(self, name))
        if self.json_object is not None:
            checked_bool("structured_outputs.json_object", self.json_object)
        if self.max_depth is not None:
            rule = f"None or an int in [1, {MOST_LEVELS}]"
            checked_int("structured_outputs.max_depth", self.max_depth, rule, 1, MOST_LEVELS)
        if self.after_token_id is not None:
            checked_int("structured_outputs.after_token_id", self.after_token_id, "None or an int >= 0", 0)
        if (begins := self.reasoning_token_id) is not None:
            rule = "None, or an int >= 0 beside another after_token_id"
            checked_int("structured_outputs.reasoning_token_id", begins, rule, 0)
            ok = self.after_token_id not in (None, begins)
            check("structured_outputs.reasoning_token_id", begins, rule, ok)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"{', '.join(given)} are given" if given else "none is given"
            raise InputError(f"structured_outputs must have one of {', '.join(KINDS)}: {what}")

    def _check_choice(self, choice: Any) -> None:
        rule = f"a list of 1 to {MOST_CHOICES} texts that are not empty"
        ok = isinstance(choice, list | tuple) and 0 < len(choice) <= MOST_CHOICES
        ok = ok and all(isinstance(each, str) and each for each in choice)
        check("structured_outputs.choice", choice, rule, ok)
        object.__setattr__(self, "choice", tuple(dict.fromkeys(choice)))

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def after(self, token_id: int, reasoning_token_id: int | None = None) -> "StructuredOutputsParams":
        """Return the constraint, beginning behind a token, or with an answer without reasoning."""
        return dataclasses.replace(self, after_token_id=token_id, reasoning_token_id=reasoning_token_id)

    def key(self) -> str:
        """Return JSON text that is the same for constraints of one meaning, wherever they begin.

        Raises `InputError`.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name not in BEGINNINGS]
        values = {name: getattr(self, name) for name in names}
        if isinstance(self.json, Mapping):
            values["json"] = dict(self.json)
        try:
            return json.dumps({name: value for name, value in values.items() if value is not None})
        except (TypeError, ValueError, RecursionError) as error:
            what = f"structured_outputs.json={shown(self.json)} must be a schema that JSON can say"
            raise InputError(f"{what}: {error}") from error


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    """Return a constraint of an object or of its fields in a mapping. Raises `InputError`."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    check(name, value, "None or a StructuredOutputsParams", isinstance(value, Mapping))
    known = StructuredOutputsParams.__dataclass_fields__
    for field in value:
        check(
            f"{name}: field", field, f"one of {', '.join(known)}", isinstance(field, str) and field in known
        )
    return StructuredOutputsParams(
        **{field: constraint for field, constraint in value.items() if constraint is not None}
    )
