"""Structured outputs as requests ask for them: by a response format, by a forced call, or by themselves."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.checks import InputError, check, shown
from jaxpaged.serve.parsers import REASONING_PARSERS
from jaxpaged.serve.parsers.base import Parser, Reasons
from jaxpaged.serve.parsers.forced import NAMED, REQUIRED
from jaxpaged.structured_outputs import StructuredOutputsParams, structured_outputs
from jaxpaged.text.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from jaxpaged.serve.tools import Form

FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def constraint_of(
    body: Any, response_format: Mapping[str, Any] | None, form: "Form | None" = None, tokenizer: Any = None
) -> StructuredOutputsParams | None:
    """Return the constraint on the form of an answer; None: any text.

    form: how the answer is read. A call that it forces goes before a response format, and that before strict
        tools. The constraint begins where its reasoning ends, and with an answer that has none.

    Raises `InputError`, also where a request asks twice.
    """
    asked = structured_outputs("structured_outputs", body.structured_outputs)
    by_format = _of_format(response_format)
    by_calls, strict = (form.constraint, form.strict) if form is not None else (None, None)
    if asked is not None and (by_format is not None or by_calls is not None):
        raise InputError("structured_outputs must be left out beside response_format and tool_choice")
    constraint = asked or by_calls or by_format or strict
    if constraint is None or form is None or form.reasoning is None or constraint.after_token_id is not None:
        return constraint
    parser = REASONING_PARSERS[form.reasoning]
    if parser.end_mark is None:
        raise InputError(f"structured outputs are not supported with the reasoning of {form.reasoning!r}")
    reasons = parser.reasons(form.prompt, form.begun)
    if reasons is Reasons.NO_MORE:
        return constraint
    end = _token_of(parser.end_mark, "end", tokenizer)
    if reasons is Reasons.NOW or parser.begin_mark is None:
        return constraint.after(end)
    return constraint.after(end, _token_of(parser.begin_mark, "beginning", tokenizer))


def _token_of(mark: str, what: str, tokenizer: Any) -> int:
    """Return the token of a mark of reasoning. Raises `InputError` if it has not one."""
    ids: list[int] = tokenizer.encode(mark, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(
            f"structured outputs need another reasoning parser: its {what} {mark!r} must be one token, and "
            f"is {len(ids)}"
        )
    return ids[0]


def response_format_of(text: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the format that a request for a response has in `text`, in the form of chat completions."""
    kind = (text or {}).get("format")
    if kind is None:
        return None
    check("text.format", kind, "an object", isinstance(kind, Mapping))
    if kind.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": kind}
    made: Mapping[str, Any] = kind
    return made


def _of_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        json_schema = response_format.get("json_schema")
        schema = json_schema.get("schema") if isinstance(json_schema, Mapping) else None
        check("response_format.json_schema.schema", schema, "a JSON schema", isinstance(schema, Mapping))
        return StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(response_format))
    raise InputError(f"response_format.type={shown(kind)} must be one of {', '.join(FORMATS)}")


def forced(
    tools: Sequence[Mapping[str, Any]], tool_choice: object, *, parallel: bool
) -> tuple[str, Sequence[Mapping[str, Any]], StructuredOutputsParams]:
    """Return the parser of forced calls, the tools that may be called, and what the answer must look like.

    tool_choice: "required", or an object that names a function. Raises `InputError`.
    """
    if tool_choice == "required":
        check("tools", tools, "given where tool_choice is 'required'", bool(tools))
        return REQUIRED, tools, StructuredOutputsParams(json=_schema_of_calls(tools, parallel=parallel))
    name = _named(tool_choice)
    named = [tool for tool in tools if tool["function"]["name"] == name]
    rule = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}} of one of tools"
    check("tool_choice", tool_choice, rule, bool(named))
    return NAMED, named[:1], StructuredOutputsParams(json=_parameters(named[0]))


def strict_calls(
    parser: type[Parser], tools: Sequence[Mapping[str, Any]], tokenizer: Any, *, parallel: bool
) -> StructuredOutputsParams | None:
    """Return the constraint on an answer that may call strict tools: free text, and calls by the tools'
    schemas.

    Returns None where no tool is strict, where calls are not marked JSON, or where their mark has special
    tokens, which no grammar allows. Raises `InputError`.
    """
    marks = parser.call_marks
    if marks is None or not any(_is_strict(tool) for tool in tools):
        return None
    trigger = tokenizer.encode(marks.trigger, add_special_tokens=False)
    if not vocabulary_of(tokenizer).special.isdisjoint(trigger):
        return None
    calls = [
        {
            "begin": f"{marks.before_name}{json.dumps(tool['function']['name'])}{marks.before_arguments}",
            "schema": _parameters(tool) if _is_strict(tool) else {"type": "object"},
            "end": marks.end,
        }
        for tool in tools
    ]
    tag = {"structures": calls, "triggers": [marks.trigger], "stop_after_first": not parallel}
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _named(tool_choice: object) -> object:
    """Return the function that a choice names, in either form of OpenAI's; None where it names none."""
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function":
        return None
    function = tool_choice.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool["function"].get("parameters")
    name = f"tools: parameters of {tool['function']['name']}"
    check(name, parameters, "a JSON schema", parameters is None or isinstance(parameters, Mapping))
    return parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _schema_of_calls(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls.

    Each tool's parameters are a schema of their own inside of it: what they refer to is looked up from there.
    """
    calls = []
    for i, tool in enumerate(tools):
        parameters = {**_parameters(tool), "$id": f"tool:{i}"}
        properties = {
            "name": {"type": "string", "enum": [tool["function"]["name"]]},
            "parameters": parameters,
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    bounds = {} if parallel else {"maxItems": 1}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "minItems": 1, "items": items} | bounds
