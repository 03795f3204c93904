"""Prompts from the command line and from files, each with its options. Imports nothing heavy.

A file has a prompt a line, or JSON lines; lines end with a line feed, and nothing else ends one.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.chat import check_messages
from jaxpaged.checks import InputError, shown
from jaxpaged.sampling_params import SamplingParams, token_id
from jaxpaged.vllm_names.judge import SAMPLING_NAMES, passes

STANDARD_INPUT = "-"
PROMPTS = ("prompt", "prompt_token_ids", "messages")
OPTIONS = tuple(name for name in SamplingParams.__dataclass_fields__ if name != "output_kind")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request as somebody wrote it down."""

    prompt: dict[str, Any]  # {"prompt": text}, {"prompt_token_ids": [...]} or {"messages": [...]}
    params: SamplingParams
    id: Any = None  # what a line calls itself, to be repeated in its answer
    priority: int = 0
    cache_salt: str | None = None

    @property
    def title(self) -> str:
        """What to show above the answer."""
        [(kind, value)] = self.prompt.items()
        return str(value[-1]["content"] if kind == "messages" else value)


def of_texts(texts: Sequence[str], sampling: Mapping[str, Any]) -> list[Asked]:
    """The prompts of the command line. `sampling`: the fields of their `SamplingParams`."""
    params = SamplingParams(**sampling)
    for text in texts:
        if not text:
            raise InputError("--prompt '' must not be empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes that are no text in the terminal's encoding
            raise InputError(f"--prompt {text!r} must be text in the encoding of the terminal") from error
    return [Asked({"prompt": text}, params) for text in texts]


def read(file: str | None, sampling: Mapping[str, Any]) -> list[Asked]:
    """The prompts of a file, "-" for standard input; options that a line does not have are those of
    `sampling`.
    """
    if file is None:
        return []
    name = f"--prompts-file {file!r}"
    lines = _lines(file, name)
    if not any(line.strip() for line in lines):
        raise InputError(f"{name} must have at least one prompt")
    is_json = next(line for line in lines if line.strip()).lstrip().startswith("{")
    params = SamplingParams(**sampling)
    asked = []
    for number, line in enumerate(lines, start=1):
        if is_json and not line.strip():
            continue
        try:
            asked.append(of_row(line, sampling) if is_json else _text_line(line, params))
        except InputError as error:
            raise InputError(f"{name}, line {number}: {error}") from error
    return asked


def for_llm(asked: Asked, render_chat: Callable[..., dict[str, Any]], chat: bool) -> dict[str, Any]:
    """Return what `LLM.generate` takes for a request; messages always go through the chat template.

    `render_chat`: `LLM.render_chat`.
    """
    prompt, cuts = dict(asked.prompt), asked.params.cuts
    if "messages" in prompt:
        prompt = render_chat(prompt["messages"], cuts=cuts)
    elif chat and "prompt" in prompt:
        prompt = render_chat([{"role": "user", "content": prompt["prompt"]}], cuts=cuts)
    return prompt | ({} if asked.cache_salt is None else {"cache_salt": asked.cache_salt})


def _lines(file: str, name: str) -> list[str]:
    try:
        if file != STANDARD_INPUT:
            content = Path(file).read_bytes()
        elif sys.stdin is None:
            raise InputError(f"{name}: standard input is closed")
        else:
            content = sys.stdin.buffer.read()
        text = content.decode("utf-8-sig")  # with a byte order mark or without
    except FileNotFoundError:
        raise InputError(f"{name} must exist") from None
    except (OSError, ValueError) as error:  # a name with a zero byte, bytes that are not UTF-8
        raise InputError(f"{name} cannot be read: {error}") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _text_line(line: str, params: SamplingParams) -> Asked:
    if not line.strip():
        raise InputError("must not be empty")
    return Asked({"prompt": line}, params)


def of_row(row: str | bytes | dict[str, Any], sampling: Mapping[str, Any]) -> Asked:
    """Return what a line of JSON asks for, or what it says as a mapping. Raises `InputError`."""
    try:
        value = dict(row) if isinstance(row, dict) else json.loads(row)
    except (ValueError, RecursionError) as error:
        raise InputError(f"must be JSON: {error}") from error
    kinds = [kind for kind in PROMPTS if kind in value] if isinstance(value, dict) else []
    if len(kinds) != 1:
        raise InputError(f"must be an object with one of {', '.join(map(repr, PROMPTS))}")
    [kind] = kinds
    prompt = value.pop(kind)
    if kind == "messages":
        check_messages(prompt)
    elif kind == "prompt" and (not isinstance(prompt, str) or not prompt):
        raise InputError(f"prompt={shown(prompt)} must be a non-empty string")
    elif kind == "prompt_token_ids" and (not isinstance(prompt, list) or not prompt):
        raise InputError(f"prompt_token_ids={shown(prompt)} must be a non-empty list of token ids")
    own = _sampling_options(value)
    if isinstance(bias := own.get("logit_bias"), dict):  # of which JSON makes all keys texts
        own["logit_bias"] = {token_id(key): added for key, added in bias.items()}
    others = {name: value.pop(name) for name in ("id", "priority", "cache_salt") if name in value}
    others = {name: its for name, its in others.items() if its is not None}
    for name, asks in value.items():
        if asks is None or passes(name, asks, SAMPLING_NAMES, own):
            continue
        known = ", ".join([*PROMPTS, "id", "priority", "cache_salt", *OPTIONS])
        raise InputError(f"option {name!r} must be one of {known}")
    return Asked({kind: prompt}, SamplingParams(**{**sampling, **own}), **others)


def _sampling_options(row: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options out of a row; null stands for one that is not given, but for `max_tokens`."""
    if row.get("max_completion_tokens") is not None:
        row["max_tokens"] = row["max_completion_tokens"]
    row.pop("max_completion_tokens", None)
    own = {name: row.pop(name) for name in OPTIONS if name in row}
    return {name: value for name, value in own.items() if value is not None or name == "max_tokens"}
