"""Encoding of requests: what the device's rows hold of each, as arrays of the host."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged import sampling_state
from jaxpaged.config import EngineConfig
from jaxpaged.engine.request import Request, device_request_id
from jaxpaged.sampling_params import seed_bits
from jaxpaged.sampling_state import LogitRules, RowOptions, SamplingState
from jaxpaged.step import features
from jaxpaged.step.state import Phase


def row_values(request: Request, config: EngineConfig, vocab_size: int, num_tokens: int) -> dict[str, Any]:
    """Return what `Rows` holds of a request, by its fields, but for its tokens, the row of the first that
    comes with it, and what services add.

    `num_tokens` is more than the prompt's where a part of the answer is known already.
    """
    params, prompt_len = request.params, len(request.prompt_token_ids)
    options = RowOptions(
        params=params,
        prompt_len=prompt_len,
        vocab_size=vocab_size,
        seed=_seed(request, config),
        stop_token_ids=request.stop_token_ids,
        edits=request.edits,
    )
    sampling = sampling_state.row_values(SamplingState, options)
    if request.arguments:  # what processors change counts as a rule
        sampling["has_rules"] = True
    width = request.beams.beam_width if request.beams else 0
    return {
        "phase": Phase.HELD if request.index >= width > 0 else Phase.WAITING,
        "arrival": device_request_id(request.request_id),
        "priority": request.priority,
        "salt": request.salt,
        "leader": device_request_id(request.leader_id) if request.leader_id else 0,
        "prompt_lens": prompt_len,
        "num_tokens": num_tokens,
        "max_num_tokens": request.max_num_tokens,
        "num_prompt_logprobs": params.prompt_logprobs or 0 if params.tells_prompt else -1,
        "sampling": sampling,
        "rules": sampling_state.row_values(LogitRules, options),
        "features": features.encoded(config, request, num_tokens),
    }


def _seed(request: Request, config: EngineConfig) -> int:
    """Return a request's seed. Without one of its own it depends on the order of requests alone."""
    if request.params.seed is not None:
        return seed_bits(request.params.seed)
    seeds = config.seed % 2**64, request.request_id
    return int(np.random.SeedSequence(seeds).generate_state(1)[0])


def filled[T](template: T, lines: Sequence[Mapping[str, Any]]) -> T:
    """Return a record of NumPy arrays with the values of some lines in place of the first of a template.

    template: a dataclass or a mapping of arrays [num_lines, ...], or of such; `empty_rows` gives one.
    lines: values by field, a mapping of them where the field is no array. Values shorter than an array's
        line leave the rest of it as it is.
    """
    changed: dict[str, Any] = {}
    fields = template if isinstance(template, Mapping) else vars(template)
    for name in lines[0] if lines else ():
        values = [line[name] for line in lines]
        if isinstance(values[0], dict):
            changed[name] = filled(fields[name], values)
            continue
        changed[name] = array = fields[name].copy()
        if array.ndim == 1:
            array[: len(values)] = values
            continue
        for line, value in enumerate(values):
            array[line, : len(value)] = value
    if isinstance(template, Mapping):
        return {**template, **changed}  # type: ignore[return-value]  # as the template
    return dataclasses.replace(template, **changed)  # type: ignore[type-var]  # a dataclass
