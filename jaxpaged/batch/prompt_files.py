"""Prompts from the command line and from files, each with its options. Imports nothing heavy.

A file has a prompt a line, or JSON lines; lines end with a line feed, and nothing else ends one.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, check, read_finite_json, shown, unknown
from jaxpaged.sampling_params import SamplingParams, token_id
from jaxpaged.text.conversations import joined, read_messages
from jaxpaged.text.templates import template_kwargs
from jaxpaged.vllm_names.judge import SAMPLING_NAMES, passes

STANDARD_INPUT = "-"
PROMPTS = ("prompt", "prompt_token_ids", "messages")
# What a line says beside its prompt and its sampling options.
OTHERS = ("id", "priority", "cache_salt", "kv_cache_ttl")
# Variables of the chat template of a line's messages.
TEMPLATE = {"reasoning_effort": (str, "a string"), "chat_template_kwargs": (dict, "an object")}
OPTIONS = tuple(name for name in SamplingParams.__dataclass_fields__ if name != "output_kind")


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """One request as somebody wrote it down."""

    error = ""  # it has none

    prompt: dict[str, Any]  # {"prompt": text}, {"prompt_token_ids": [...]} or {"messages": [...]}
    params: SamplingParams
    id: Any = None  # what a line calls itself, to be repeated in its answer
    priority: int = 0
    cache_salt: str | None = None
    kv_cache_ttl: float | None = None
    template_kwargs: Mapping[str, Any] | None = None  # variables for the chat template of messages
    where: str = ""  # it was written down, for messages

    @property
    def title(self) -> str:
        """Title to show above the answer."""
        [(kind, value)] = self.prompt.items()
        return joined(value[-1]["content"]) if kind == "messages" else str(value)


@dataclasses.dataclass(frozen=True)
class Refused:
    """Line that holds no valid request."""

    error: str  # one sentence, with the file and the line
    id: Any = None  # what the line calls itself
    title: str = ""


def of_texts(texts: Sequence[str], sampling: Mapping[str, Any]) -> list[PromptLine]:
    """Return the prompts of the command line. `sampling`: the fields of their `SamplingParams`."""
    params = SamplingParams(**sampling)
    names = [f"--prompt number {i}" if len(texts) > 1 else "--prompt" for i in range(1, len(texts) + 1)]
    for text in texts:
        if not text:
            raise InputError("--prompt '' must not be empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes that are no text in the terminal's encoding
            raise InputError(f"--prompt {text!r} must be text in the encoding of the terminal") from error
    return [PromptLine({"prompt": text}, params, where=name) for text, name in zip(texts, names, strict=True)]


def read(
    file: str | None, sampling: Mapping[str, Any], *, skip_errors: bool = False
) -> list[PromptLine | Refused]:
    """Return the prompts of a file, "-" for standard input; options that a line does not have are those of
    `sampling`.

    Raises `InputError` for a line that asks for nothing; with `skip_errors` it is `Refused` in its place.
    """
    if file is None:
        return []
    name = f"--prompts-file {file!r}"
    lines = _lines(file, name)
    if not any(line.strip() for line in lines):
        raise InputError(f"{name} must have at least one prompt")
    first, is_json = next((i, line.lstrip()[0] == "{") for i, line in enumerate(lines, 1) if line.strip())
    if not is_json:
        _check_all_text(lines, name, first)
    params = SamplingParams(**sampling)
    asked: list[PromptLine | Refused] = []
    for number, line in enumerate(lines, start=1):
        if is_json and not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            request = of_row(line, sampling) if is_json else _text_line(line, params)
            asked.append(dataclasses.replace(request, where=where))
        except InputError as error:
            if not skip_errors:
                raise InputError(f"{where}: {error}") from error
            asked.append(Refused(f"{where}: {error}", _id(line), line))
    return asked


@dataclasses.dataclass(frozen=True)
class Answering:
    """Prompts that have been asked, each by its place among those that were given."""

    refused: Mapping[int, Refused]
    finished: Iterator[tuple[int, Any]]  # places and outputs, as they finish
    stop: Callable[[], object]  # lets `finished` end after what has finished; a signal handler may call it


def ask(
    asked: Sequence[PromptLine | Refused],
    generate_as_finished: Callable[..., Any],
    render_chat: Callable[..., dict[str, Any]],
    *,
    chat: bool,
    skip_errors: bool,
    skip: Collection[int] = (),
) -> Answering:
    """Ask all prompts but those at the places of `skip`.

    `generate_as_finished` and `render_chat`: those of `LLM`.
    Raises `InputError`, before anything runs, for the first that cannot be asked; with `skip_errors` it is
    among those refused.
    """
    left = {place: each for place, each in enumerate(asked) if place not in skip}
    refused = {place: each for place, each in left.items() if isinstance(each, Refused)}
    lines = {place: each for place, each in left.items() if isinstance(each, PromptLine)}
    prompts: dict[int, dict[str, Any]] = {}

    def refuse(place: int, error: InputError) -> None:
        line = lines[place]
        refused[place] = Refused(f"{line.where}: {error}", line.id, line.title)
        if not skip_errors:
            raise InputError(f"{line.where}: {error}") from error

    for place, each in lines.items():
        try:
            prompts[place] = for_llm(each, render_chat, chat)
        except InputError as error:
            refuse(place, error)
    places = list(prompts)
    finished = generate_as_finished(
        list(prompts.values()),
        [lines[place].params for place in places],
        priority=[lines[place].priority for place in places],
        on_error=lambda i, error: refuse(places[i], error),
    )
    return Answering(refused, ((places[i], output) for i, output in finished), finished.stop)


def _id(line: str) -> Any:
    """Return the "id" of a line, if the line is a JSON object with one; None otherwise."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value.get("id") if isinstance(value, dict) else None


def for_llm(asked: PromptLine, render_chat: Callable[..., dict[str, Any]], chat: bool) -> dict[str, Any]:
    """Return the prompt for `LLM.generate` of a request; messages always go through the chat template.

    `render_chat`: `LLM.render_chat`.
    """
    prompt, cuts = dict(asked.prompt), asked.params.cuts
    if "messages" in prompt:
        prompt = render_chat(prompt["messages"], kwargs=asked.template_kwargs, cuts=cuts)
    elif chat and "prompt" in prompt:
        prompt = render_chat([{"role": "user", "content": prompt["prompt"]}], cuts=cuts)
    more = {name: getattr(asked, name) for name in ("cache_salt", "kv_cache_ttl")}
    return prompt | {name: value for name, value in more.items() if value is not None}


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


def _check_all_text(lines: Sequence[str], name: str, first: int) -> None:
    """Raise `InputError` for a line that asks in JSON, where the first one is text."""
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("{") and _is_request(line):
            raise InputError(
                f"{name} must have text on each line, or JSON on each: line {first} is text and line "
                f"{number} is JSON"
            )


def _is_request(line: str) -> bool:
    try:
        return any(kind in json.loads(line) for kind in PROMPTS)
    except (ValueError, RecursionError):
        return False


def _text_line(line: str, params: SamplingParams) -> PromptLine:
    if not line.strip():
        raise InputError("must not be empty")
    return PromptLine({"prompt": line}, params)


def of_row(row: str | bytes | dict[str, Any], sampling: Mapping[str, Any]) -> PromptLine:
    """Return the request in a line of JSON, given as text or already as a mapping. Raises `InputError`."""
    try:
        value = dict(row) if isinstance(row, dict) else read_finite_json(row)
    except (ValueError, RecursionError) as error:
        raise InputError(f"must be JSON: {error}") from error
    kinds = [kind for kind in PROMPTS if kind in value] if isinstance(value, dict) else []
    if len(kinds) != 1:
        raise InputError(f"must be an object with one of {', '.join(map(repr, PROMPTS))}")
    [kind] = kinds
    prompt = value.pop(kind)
    if kind == "messages":
        prompt = read_messages(prompt)
    elif kind == "prompt" and (not isinstance(prompt, str) or not prompt):
        raise InputError(f"prompt={shown(prompt)} must be a non-empty string")
    elif kind == "prompt_token_ids" and (not isinstance(prompt, list) or not prompt):
        raise InputError(f"prompt_token_ids={shown(prompt)} must be a non-empty list of token ids")
    options = _sampling_options(value)
    if isinstance(bias := options.get("logit_bias"), dict):  # JSON turns all its keys into strings
        options["logit_bias"] = {token_id(key): added for key, added in bias.items()}
    others = {name: value.pop(name) for name in OTHERS if name in value}
    others = {name: given for name, given in others.items() if given is not None}
    if kind == "messages":
        variables = {name: given for name in TEMPLATE if (given := value.pop(name, None)) is not None}
        for name, given in variables.items():
            is_of, words = TEMPLATE[name]
            check(name, given, words, isinstance(given, is_of))
        others["template_kwargs"] = template_kwargs(
            variables.get("chat_template_kwargs"), variables.get("reasoning_effort")
        )
    for name, asks in value.items():
        if asks is None or passes(name, asks, SAMPLING_NAMES, options):
            continue
        raise unknown("option ", name, [*PROMPTS, *OTHERS, *TEMPLATE, *OPTIONS])
    return PromptLine({kind: prompt}, SamplingParams(**{**sampling, **options}), **others)


def _sampling_options(row: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling options out of a row; null stands for one that is not given, but for `max_tokens`."""
    if row.get("max_completion_tokens") is not None:
        row["max_tokens"] = row["max_completion_tokens"]
    row.pop("max_completion_tokens", None)
    options = {name: row.pop(name) for name in OPTIONS if name in row}
    return {name: value for name, value in options.items() if value is not None or name == "max_tokens"}
