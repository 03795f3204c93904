"""A request: checked at the door, then a line of `Rows`; and what comes back of it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpaged.config import MAX_STOP_TOKENS, EngineConfig, InputError, SamplingParams, check, is_int
from jaxpaged.engine.scheduler import Limits
from jaxpaged.engine.state import FinishReason, Phase, Rows
from jaxpaged.memory.sizing import CacheSize
from jaxpaged.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request. Build it with `Door.admit`."""

    request_id: int  # rises from request to request
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    salt: int
    seed: int
    stop_token_ids: tuple[int, ...]
    max_num_tokens: int  # prompt and answer together

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first."""
        return self.priority, self.request_id


@dataclasses.dataclass(frozen=True)
class Delta:
    """The next tokens of a request's answer; the last delta has a reason."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float] | None  # natural logarithms, where they were asked for
    num_hit_tokens: int  # prompt tokens that were found in the prefix cache
    finish_reason: FinishReason = FinishReason.NONE


@dataclasses.dataclass(frozen=True)
class Door:
    """Who may come in: knows the engine's fixed sizes, and refuses what could never run."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    cache_size: CacheSize
    limits: Limits

    def admit(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        salt: int = 0,
    ) -> Request:
        """The request, ready for a row. Raises `InputError`."""
        check("sampling_params", params, "a SamplingParams", isinstance(params, SamplingParams))
        prompt = tuple(prompt_token_ids)
        self._check(prompt, params, priority, salt)
        seed = params.seed
        if seed is None:  # one of its own, the same whenever the same requests come in the same order
            seed = int(np.random.SeedSequence((self.config.seed, request_id)).generate_state(1)[0])
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            priority=priority,
            salt=salt,
            seed=seed,
            stop_token_ids=self._stop_token_ids(params),
            max_num_tokens=self._max_num_tokens(prompt, params),
        )

    def write(self, rows: Rows, line: int, request: Request) -> None:
        """Fill one line of NumPy rows."""
        prompt, params, stop = request.prompt_token_ids, request.params, request.stop_token_ids
        options = rows.sampling
        for array, value in (
            (rows.phase, Phase.WAITING),
            (rows.arrival, request.request_id),
            (rows.priority, request.priority),
            (rows.salt, request.salt),
            (rows.prompt_lens, len(prompt)),
            (rows.num_tokens, len(prompt)),
            (rows.max_num_tokens, request.max_num_tokens),
            (options.temperature, params.temperature),
            (options.top_k, min(params.top_k, self.model_config.vocab_size)),
            (options.top_p, params.top_p),
            (options.min_p, params.min_p),
            (options.seed, request.seed),
            (options.wants_logprobs, params.logprobs is not None),
        ):
            np.asarray(array)[line] = value
        np.asarray(rows.token_ids)[line, : len(prompt)] = prompt
        np.asarray(rows.stop_token_ids)[line, : len(stop)] = stop

    def _check(self, prompt: tuple[int, ...], params: SamplingParams, priority: int, salt: int) -> None:
        if not prompt:
            raise InputError("the prompt must have at least one token")
        vocab_size = self.model_config.vocab_size
        for token in prompt:
            rule = f"a token id, an int in [0, {vocab_size})"
            check("prompt token", token, rule, is_int(token) and 0 <= token < vocab_size)
        if len(prompt) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, must have less than max_model_len={self.max_model_len}"
            )
        # An answer's last token is never written to the cache.
        block_size = self.config.block_size
        need = self.limits.blocks_of(self._max_num_tokens(prompt, params) - 1, block_size)
        if need > self.cache_size.num_blocks - 1:
            raise InputError(
                f"the prompt of {len(prompt)} tokens with max_tokens={params.max_tokens} needs {need} blocks "
                f"of {block_size} tokens, but num_blocks={self.cache_size.num_blocks} leaves "
                f"{self.cache_size.num_blocks - 1} for use"
            )
        num_stop = len(self._stop_token_ids(params))
        check("number of stop tokens", num_stop, f"at most {MAX_STOP_TOKENS}", num_stop <= MAX_STOP_TOKENS)
        for name, value in (("priority", priority), ("salt", salt)):
            rule = "an int in [-2**31, 2**31)"
            check(name, value, rule, is_int(value) and -(2**31) <= value < 2**31)
        if self.config.scheduling_policy == "fcfs":
            check("priority", priority, "0 unless scheduling_policy is 'priority'", priority == 0)

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        return tuple(sorted({*eos, *params.stop_token_ids}))

    def _max_num_tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        return min(len(prompt) + params.max_tokens, self.max_model_len)
