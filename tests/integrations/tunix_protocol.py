"""Tunix's protocol of rollout workers, as its version 0.1.7 has it: what a worker is made of, and gives.

It stands in where Tunix is not installed.
"""

import abc
import dataclasses
import importlib.util
import sys
import types
from typing import Any


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: Any  # arrays of token ids, one for each prompt
    left_padded_prompt_tokens: Any  # [prompts, length]
    logprobs: Any  # None, or arrays like `tokens`


@dataclasses.dataclass
class RolloutConfig:
    """The fields that are not another worker's own."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    return_logprobs: bool = False


class BaseRollout(abc.ABC):
    @abc.abstractmethod
    def __init__(self, **kwargs): ...

    @abc.abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abc.abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


def stand_in() -> Any:
    """Return Tunix's module of rollouts: the installed one, or else this protocol under its name."""
    if importlib.util.find_spec("tunix") is None:
        for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
            sys.modules[name] = types.ModuleType(name)
        its: Any = sys.modules["tunix.rl.rollout"]
        its.base_rollout = sys.modules[__name__]
    from tunix.rl.rollout import base_rollout

    return base_rollout
