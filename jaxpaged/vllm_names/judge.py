"""Judges vLLM's names and values for each door, by `table.py` and `names.json`. Imports nothing heavy."""

import dataclasses
import functools
import json
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, check, parsed_json, shown, unknown
from jaxpaged.vllm_names.table import BEAM, ENGINE, REQUEST, SERVER, Verdict

# The tables with vLLM's classes, by their titles in `names.json`, that say these names.
ENGINE_NAMES = (ENGINE, ("EngineArgs",))
SERVER_NAMES = (ENGINE | SERVER, ("FrontendArgs", "EngineArgs"))
SAMPLING_NAMES = (REQUEST, ("SamplingParams", "ChatCompletionRequest", "CompletionRequest"))
BEAM_NAMES = (BEAM, ("BeamSearchParams", "SamplingParams"))
FIELD_NAMES = (
    REQUEST,
    (
        "ChatCompletionRequest",
        "CompletionRequest",
        "ResponsesRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
        "LoadLoRAAdapterRequest",
        "UnloadLoRAAdapterRequest",
        "EmbeddingRequest",
        "PoolingRequest",
        "ClassificationRequest",
        "ScoreRequest",
        "RerankRequest",
        "SamplingParams",
    ),
)
Names = tuple[Mapping[str, Verdict], tuple[str, ...]]


@functools.cache
def known_names() -> dict[str, Any]:
    """Return the content of `names.json`: "versions", "short" and, by title, "names"."""
    made: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text())
    return made


def entry_of(name: str, titles: Iterable[str]) -> dict[str, Any] | None:
    """Return the entry of a name in the first of these classes of vLLM that has it: since, kind, default."""
    names = known_names()["names"]
    return next((names[title][name] for title in titles if name in names[title]), None)


def passes(name: str, value: object, names: Names, others: Mapping[str, Any] | None = None) -> bool:
    """Return whether a name that a door does not serve is known here; False if nobody knows it.

    `others`: the values given beside it. Raises `InputError` for a value that asks for what is not there.
    """
    table, titles = names
    verdict = table.get(name)
    if verdict is None:
        return False
    if verdict.takes_all or value is None:
        return True
    if verdict.keys is not None:
        rule = f"None or an object with keys of {', '.join(verdict.keys)}"
        check_keys(name, fields_of(name, value, rule), verdict.keys)
        return True
    entry = entry_of(name, titles) or {}
    neutral = [*verdict.neutral]
    if entry.get("default") is not None:
        neutral.append(entry["default"])
    elif entry.get("kind") == "flag":
        neutral.append(False)
    if verdict.like and others is not None:
        neutral.append(1 if others.get(verdict.like) is None else others[verdict.like])
    if not verdict.is_strict:
        neutral += [kind() for kind in (str, list, dict) if isinstance(_plain(value), kind)]
    if any(_same(value, each) for each in neutral):
        return True
    raise InputError(_refusal(name, value, verdict, neutral, entry))


def check_keys(name: str, value: Mapping[str, Any], table: Mapping[str, Verdict]) -> None:
    """Check an option's value key by key. Raises `InputError` for what is not served, or unknown."""
    for key, entry in value.items():
        verdict = table.get(key)
        if verdict is None:
            raise unknown(f"{name}: key=", key, table)
        if verdict.takes_all or entry is None or any(_same(entry, each) for each in verdict.neutral):
            continue
        if not verdict.is_strict and _plain(entry) in ("", [], {}):
            continue
        rule = " or ".join(map(repr, (None, *verdict.neutral)))
        instead = f"; use {verdict.use}" if verdict.use else ""
        what = f"{name}: {key}={shown(entry)}, an option of vLLM ({verdict.meaning})"
        raise InputError(f"{what}, is not supported: must be {rule}{instead}")


def fields_of(name: str, value: object, rule: str) -> Mapping[str, Any]:
    """Return the fields of an object, of JSON text or of a mapping. Raises `InputError`."""
    value = parsed_json(name, value, rule) if value != "" else {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    check(name, value, rule, isinstance(value, Mapping))
    assert isinstance(value, Mapping)
    return value


def without_neutral(options: Mapping[str, Any], known: Iterable[str], names: Names) -> dict[str, Any]:
    """Return the options that are `known`, or that nobody knows; the others are vLLM's and ask for nothing.

    Raises `InputError` for a value that asks for what is not there.
    """
    known = frozenset(known)
    return {
        name: value
        for name, value in options.items()
        if name in known or not passes(name, value, names, options)
    }


def _refusal(
    name: str, value: object, verdict: Verdict, neutral: Iterable[object], entry: Mapping[str, Any]
) -> str:
    rule = " or ".join(dict.fromkeys(map(repr, (None, *neutral))))
    instead = f"; use {verdict.use}" if verdict.use else ""
    what = f"{name}={shown(value)}, {_owner(entry)} ({verdict.meaning})"
    return f"{what}, is not supported: must be {rule}{instead}"


def _owner(entry: Mapping[str, Any]) -> str:
    """Return whose option it is, and of which versions where not all have it."""
    if not entry:
        return "an option of other servers"
    oldest = known_names()["versions"][0]
    since = f" since {entry['since']}" if entry["since"] != oldest else ""
    last = f" up to {entry['last']}" if "last" in entry else ""
    return f"an option of vLLM's{since}{last}"


def _plain(value: object) -> object:
    """Return a set or tuple as a list, for comparison with JSON values."""
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _same(value: object, neutral: object) -> bool:
    """Return whether a value is the neutral one; 1 is not True, and anything odd is not equal."""
    value = _plain(value)
    if isinstance(value, dict) and neutral:  # {"type": "text", "schema": None} says no more than the type
        value = {key: each for key, each in value.items() if each is not None}
    is_plain = isinstance(value, str | numbers.Real | list | dict)
    return is_plain and isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
