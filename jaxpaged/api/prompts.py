"""Prompts in all their forms, and what is one for all of them or a list with one each."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_bool, is_int, shown
from jaxpaged.inputs import check_prompt_keys
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import SamplingParams

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
# One for all prompts, or a list with one each.
Loras = LoRARequest | None | Sequence[LoRARequest | None]
Priority = int | Sequence[int] | None
# Fields of `SamplingParams` that vLLM has in `tokenization_kwargs`.
CUTS = ("truncate_prompt_tokens", "truncation_side")


def as_many(prompts: Any) -> Sequence[Any]:
    """Return the prompts as a sequence, whether one was given or several. Raises `InputError`."""
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    rule = "a prompt or a list of prompts"
    check("prompts", prompts, rule, is_list(prompts))
    is_one = len(prompts) > 0 and (
        is_int(prompts[0]) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1)
    )
    return [prompts] if is_one else prompts


def template_text(template: Any) -> str:
    """Return the text of a chat template: a file's content, or the given text if it can be one."""
    name = str(template) if isinstance(template, str | os.PathLike) else ""
    rule = "a file, or the text of a chat template"
    try:
        if name and "\0" not in name and len(name) < 4096 and Path(name).is_file():
            return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"chat_template={shown(template)} cannot be read: {error}") from error
    check("chat_template", template, rule, isinstance(template, str) and "{" in template)
    return name


def tokenization(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments for a tokenizer's `encode` from vLLM's `tokenization_kwargs`. Raises
    `InputError` for others.
    """
    known = ("add_special_tokens", *CUTS)
    rule = f"None or a mapping with nothing but {', '.join(map(repr, known))}"
    ok = kwargs is None or (isinstance(kwargs, Mapping) and not {*kwargs} - {*known})
    check("tokenization_kwargs", kwargs, rule, ok)
    return {name: checked_bool(name, value) for name, value in (kwargs or {}).items() if name not in CUTS}


def with_cut(params: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """Return sampling parameters with the truncation options of `tokenization_kwargs`. Raises `InputError`.

    What is no `SamplingParams` is left as it is, to be refused.
    """
    tokenization(kwargs)
    cut = {name: value for name, value in (kwargs or {}).items() if name in CUTS}
    return dataclasses.replace(params, **cut) if cut and isinstance(params, SamplingParams) else params


def split_prompt(prompt: Any) -> tuple[str | None, Any, Any]:
    """Return the text, the token ids and the cache salt of a prompt; what it lacks is None.

    Raises `InputError` for what is no prompt.
    """
    text, token_ids, salt = prompt, None, None
    if isinstance(prompt, Mapping):
        check_prompt_keys(prompt)
        text, token_ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    elif is_list(prompt):
        text, token_ids = None, prompt
    if not isinstance(text, str) and not (text is None and token_ids is not None):
        raise InputError(
            f"prompt={shown(prompt)} must be a string, a list of token ids, or a mapping with 'prompt' "
            "or 'prompt_token_ids'"
        )
    return text, token_ids, salt


def is_list(value: Any) -> bool:
    """Return whether a value has members that count: of an array, a dimension; a text is one thing."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """Return a list with one for each prompt; one value that is no list is everybody's."""
    if not is_list(value):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InputError(f"{name} has {len(value)} entries, must have one for each of {num_prompts} prompts")
    return list(value)


def naming_prompt[T](i: int, num_prompts: int, read: Callable[..., T], *args: Any) -> T:
    """Return the result of `read`; its `InputError` names the faulty prompt, if there are several."""
    try:
        return read(*args)
    except InputError as error:
        raise of_prompt(i, num_prompts, error) from error


def of_prompt(i: int, num_prompts: int, error: InputError) -> InputError:
    """Return an error that says which of several prompts is at fault."""
    return error if num_prompts == 1 else InputError(f"prompt {i}: {error}")
