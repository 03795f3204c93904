"""A request: checked at the door by the thread that asks, then a line of `Rows`; and what comes back."""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_int, is_int, is_int_type, shown
from jaxpaged.config import EngineConfig
from jaxpaged.engine.state import FinishReason, Phase, Rows
from jaxpaged.engine.step_config import StepConfig
from jaxpaged.memory.sizing import CacheSize
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling_params import MAX_STOP_TOKENS, SamplingParams

INT32_RULE = "an int in [-2**31, 2**31)"
# A temperature below float32's normal numbers would count as 0 in a compiled program, and 0 cannot divide.
LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request that came through the door: nothing that is done with it can fail.

    Build it with `Door.admit`.
    """

    prompt_token_ids: np.ndarray  # int32
    params: SamplingParams
    priority: int
    salt: int
    stop_token_ids: tuple[int, ...]
    max_num_tokens: int  # prompt and answer together
    request_id: int = 0  # rises from request to request, from 1 on; given to it when it is queued

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first."""
        return self.priority, self.request_id


@dataclasses.dataclass(frozen=True)
class Delta:
    """The next tokens of a request's answer, or all of them; the last delta has a reason."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float] | None  # natural logarithms, where they were asked for
    num_hit_tokens: int  # prompt tokens that were found in the prefix cache
    finish_reason: FinishReason = FinishReason.NONE
    # Of these tokens and those held back before: characters that are whole. None from an engine without a
    # tokenizer, and in a sink.
    text: str | None = None


class Salts:
    """Numbers for the salts of the prefix cache: the same for the same salt, and no two for different ones.

    Of very many salts only the last ones used are remembered. One that comes back gets another number: what
    was cached under it is not found any more.
    """

    MOST = 2**16

    def __init__(self) -> None:
        self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._last = 0  # of 2**32 - 1; by then what was cached under the first ones is long forgotten
        self._lock = threading.Lock()

    def number(self, salt: str | None) -> int:
        """An int32; 0 for no salt."""
        if salt is None:
            return 0
        with self._lock:
            number = self._numbers.pop(salt, None)
            if number is None:
                self._last = self._last % (2**32 - 1) + 1
                number = (self._last + 2**31) % 2**32 - 2**31
            self._numbers[salt] = number
            if len(self._numbers) > self.MOST:
                self._numbers.popitem(last=False)
        return number


@dataclasses.dataclass(frozen=True)
class Door:
    """Who may come in: knows the engine's fixed sizes, and refuses what could never run. For any thread."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    cache_size: CacheSize
    step_config: StepConfig
    salts: Salts = dataclasses.field(default_factory=Salts)

    def admit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """The request, ready to be queued. Raises `InputError`."""
        check("sampling_params", params, "a SamplingParams", isinstance(params, SamplingParams))
        prompt = self._prompt(prompt_token_ids)
        max_num_tokens = self.max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(len(prompt) + params.max_tokens, max_num_tokens)
        self._check_blocks(len(prompt), max_num_tokens, params)
        priority = checked_int("priority", priority, INT32_RULE, -(2**31))
        if self.config.scheduling_policy == "fcfs":
            check("priority", priority, "0 unless scheduling_policy is 'priority'", priority == 0)
        rule = "None or a string that is not empty"
        check(
            "cache_salt",
            cache_salt,
            rule,
            cache_salt is None or (isinstance(cache_salt, str) and cache_salt != ""),
        )
        return Request(
            prompt_token_ids=prompt,
            params=params,
            priority=priority,
            salt=self.salts.number(cache_salt),
            stop_token_ids=self._stop_token_ids(params),
            max_num_tokens=max_num_tokens,
        )

    def write(self, rows: Rows, line: int, request: Request, num_tokens: int) -> None:
        """Fill one line of NumPy rows, but for the tokens. Their number may be more than the prompt's, if a
        part of the answer is known already.
        """
        params, stop = request.params, request.stop_token_ids
        options = rows.sampling
        temperature = params.temperature
        for array, value in (
            (rows.phase, Phase.WAITING),
            (rows.arrival, arrival_of(request.request_id)),
            (rows.priority, request.priority),
            (rows.salt, request.salt),
            (rows.prompt_lens, len(request.prompt_token_ids)),
            (rows.num_tokens, num_tokens),
            (rows.max_num_tokens, request.max_num_tokens),
            (options.temperature, max(temperature, LEAST_TEMPERATURE) if temperature else 0),
            (options.top_k, min(params.top_k, self.model_config.vocab_size)),
            (options.top_p, params.top_p),
            (options.min_p, params.min_p),
            (options.seed, self._seed(request)),
            (options.wants_logprobs, params.logprobs is not None),
        ):
            np.asarray(array)[line] = value
        np.asarray(rows.stop_token_ids)[line, : len(stop)] = stop

    def _prompt(self, token_ids: Any) -> np.ndarray:
        """The prompt as int32. One pass over its types and one over its values: it may be long."""
        if isinstance(token_ids, np.ndarray):
            ok = token_ids.ndim == 1 and np.issubdtype(token_ids.dtype, np.integer)
            check("prompt_token_ids", token_ids, "a list of token ids", bool(ok))
        else:
            ok = isinstance(token_ids, Sequence) and not isinstance(
                token_ids, str | bytes | bytearray | memoryview
            )
            check("prompt_token_ids", token_ids, "a list of token ids", ok)
        if len(token_ids) == 0:
            raise InputError("the prompt must have at least one token")
        if len(token_ids) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(token_ids)} tokens, must have less than "
                f"max_model_len={self.max_model_len}"
            )
        rule = f"a token id, an int in [0, {self.model_config.vocab_size})"
        if not isinstance(token_ids, np.ndarray) and not all(map(is_int_type, set(map(type, token_ids)))):
            wrong = next(token for token in token_ids if not is_int(token))
            raise InputError(f"prompt token={shown(wrong)} must be {rule}")
        for token in (min(token_ids), max(token_ids)):
            checked_int("prompt token", token, rule, 0, self.model_config.vocab_size - 1)
        return np.array(token_ids, np.int32)

    def _check_blocks(self, prompt_len: int, max_num_tokens: int, params: SamplingParams) -> None:
        # An answer's last token is never written to the cache.
        block_size = self.config.block_size
        need = self.step_config.blocks_of(max_num_tokens - 1, block_size)
        if need > self.cache_size.num_blocks - 1:
            raise InputError(
                f"the prompt of {prompt_len} tokens with max_tokens={params.max_tokens} needs {need} blocks "
                f"of {block_size} tokens, but num_blocks={self.cache_size.num_blocks} leaves "
                f"{self.cache_size.num_blocks - 1} for use"
            )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        vocab_size = self.model_config.vocab_size
        for token in params.stop_token_ids or ():
            checked_int(
                "stop_token_ids: token", token, f"a token id, an int in [0, {vocab_size})", 0, vocab_size - 1
            )
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        stop = tuple(sorted({*eos, *(params.stop_token_ids or ())}))
        check("number of stop tokens", len(stop), f"at most {MAX_STOP_TOKENS}", len(stop) <= MAX_STOP_TOKENS)
        return stop

    def _seed(self, request: Request) -> int:
        """The request's own: the same whenever the same requests come in the same order."""
        if request.params.seed is not None:
            return request.params.seed
        return int(np.random.SeedSequence((self.config.seed, request.request_id)).generate_state(1)[0])


def arrival_of(request_id: int) -> int:
    """What the device calls a request: an int32, never 0, in which ids of any size go round.

    Of two requests on the device at the same time it tells them apart, and by the sign of their difference,
    taken as an int32, who came first: for they are less than 2**31 requests apart.
    """
    return ((request_id - 1) % (2**32 - 1) + 1 + 2**31) % 2**32 - 2**31


def since(arrival: int, other: int) -> int:
    """How many requests after `other` one came, by what the device calls them; negative if it was before."""
    return (int(arrival) - int(other) + 2**31) % 2**32 - 2**31
