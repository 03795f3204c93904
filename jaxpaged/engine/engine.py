"""The host side: hands requests to the compiled loop and reads its answers. The only object that changes."""

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import MAX_STOP_TOKENS, EngineConfig, InputError, SamplingParams, check, is_int
from jaxpaged.engine import loop, state
from jaxpaged.engine.plan import cache_plan, max_model_len, resolve_dtype
from jaxpaged.engine.state import FinishReason, Phase
from jaxpaged.memory import block_pool, block_table, kv_cache
from jaxpaged.memory.block_table import cdiv
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama, Weights
from jaxpaged.status import raise_if_error

logger = logging.getLogger("jaxpaged")

# Steps of one dispatch of the loop: reading back then costs nothing, and progress still shows.
STEPS_PER_RUN = 32


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request, ready for a row."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Answer:
    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the engine has done since it was made."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed
    num_new_tokens: int = 0  # answer tokens made


class Engine:
    """Owns the model, the current `EngineState`, and the requests that do not have a row yet."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.model_config = model_config
        self.max_model_len = max_model_len(config, model_config)
        self.plan = cache_plan(config, model_config)
        dtype = resolve_dtype(config)
        self._graphdef, self._params = nnx.split(Llama(model_config, weights, dtype))
        max_blocks_per_seq = cdiv(self.max_model_len, config.block_size)
        self._state = state.create(
            block_table.create(
                block_pool.create(self.plan.num_blocks),
                config.max_num_seqs,
                max_blocks_per_seq,
                config.block_size,
            ),
            kv_cache.create(
                model_config.num_layers,
                self.plan.num_blocks,
                config.block_size,
                model_config.num_kv_heads,
                model_config.head_dim,
                dtype,
            ),
            self.max_model_len,
        )
        self.progress = Progress()
        self._queue: collections.deque[Request] = collections.deque()
        self._in_row: list[Request | None] = [None] * config.max_num_seqs
        self._num_requests = 0
        self._num_read_tokens = 0  # answer tokens of requests that have left their row
        logger.info("cache: %s", self.plan)
        self._compile()

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or any(request is not None for request in self._in_row)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request and return its id; `InputError`, and no change, if it could never run."""
        prompt = list(prompt_token_ids)
        self.check_request(prompt, params)
        request_id = self._num_requests
        self._num_requests += 1
        self._queue.append(Request(request_id, prompt, params))
        return request_id

    def check_request(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise `InputError` if this request could never run."""
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
        need = cdiv(self._max_num_tokens(prompt, params) - 1, self.config.block_size)
        if need > self.plan.num_blocks - 1:
            raise InputError(
                f"the prompt of {len(prompt)} tokens with max_tokens={params.max_tokens} needs {need} blocks "
                f"of {self.config.block_size} tokens, but num_blocks={self.plan.num_blocks} leaves "
                f"{self.plan.num_blocks - 1} for use"
            )
        num_stop = len(self._stop_token_ids(params))
        check("number of stop tokens", num_stop, f"at most {MAX_STOP_TOKENS}", num_stop <= MAX_STOP_TOKENS)

    def run(self, max_steps: int = STEPS_PER_RUN) -> tuple[list[Answer], Progress]:
        """Fill free rows from the queue, step until one is free or `max_steps` are done, read the answers."""
        self._fill_rows()
        self._run_loop(max_steps)
        return self._read()

    def _compile(self) -> None:
        """Compile the loop (or read it from JAX's cache on disk) by running none of its steps."""
        start = time.perf_counter()
        rows = state.empty_rows(self.config.max_num_seqs, self.max_model_len)
        self._state = loop.submit(self._state, rows, np.zeros(self.config.max_num_seqs, bool))
        self._run_loop(max_steps=0)
        jax.block_until_ready(self._state)
        logger.info("compiled in %.1f s", time.perf_counter() - start)

    def _run_loop(self, max_steps: int) -> None:
        self._state = loop.run(
            self._graphdef,
            self._params,
            self._state,
            np.int32(max_steps),
            np.bool_(bool(self._queue)),
            max_prefill_tokens=self.config.max_prefill_tokens,
        )

    def _fill_rows(self) -> None:
        free_rows = [row for row, request in enumerate(self._in_row) if request is None]
        if not free_rows or not self._queue:
            return
        mask = np.zeros(self.config.max_num_seqs, bool)
        requests = state.empty_rows(self.config.max_num_seqs, self.max_model_len)
        for row in free_rows[: len(self._queue)]:
            request = self._queue.popleft()
            self._in_row[row] = request
            mask[row] = True
            self._write_row(requests, row, request)
        self._state = loop.submit(self._state, requests, mask)

    def _write_row(self, rows: state.Rows, row: int, request: Request) -> None:
        """Fill one line of NumPy rows."""
        prompt, params = request.prompt_token_ids, request.params
        seed = params.seed
        if seed is None:  # one of its own, the same whenever the same requests come in the same order
            seed = int(np.random.SeedSequence((self.config.seed, request.request_id)).generate_state(1)[0])
        for array, value in (
            (rows.phase, Phase.WAITING),
            (rows.arrival, request.request_id),
            (rows.prompt_lens, len(prompt)),
            (rows.num_tokens, len(prompt)),
            (rows.max_num_tokens, self._max_num_tokens(prompt, params)),
            (rows.sampling.temperature, params.temperature),
            (rows.sampling.top_k, min(params.top_k, self.model_config.vocab_size)),
            (rows.sampling.top_p, params.top_p),
            (rows.sampling.min_p, params.min_p),
            (rows.sampling.seed, seed),
        ):
            np.asarray(array)[row] = value
        stop = self._stop_token_ids(params)
        np.asarray(rows.token_ids)[row, : len(prompt)] = prompt
        np.asarray(rows.stop_token_ids)[row, : len(stop)] = stop

    def _stop_token_ids(self, params: SamplingParams) -> list[int]:
        eos = () if params.ignore_eos else self.model_config.eos_token_ids
        return sorted({*eos, *params.stop_token_ids})

    def _max_num_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        return min(len(prompt) + params.max_tokens, self.max_model_len)

    def _read(self) -> tuple[list[Answer], Progress]:
        """Read what the last run did: a copy of the small arrays, and one of the tokens if a row finished."""
        rows = self._state.rows
        phase, num_tokens, reason, status, counters = jax.device_get(
            (rows.phase, rows.num_tokens, rows.finish_reason, self._state.status, self._state.counters)
        )
        raise_if_error(int(status))
        answers = []
        token_ids: np.ndarray | None = None
        num_new_tokens = 0
        for row, request in enumerate(self._in_row):
            if request is None:
                continue
            num_prompt = len(request.prompt_token_ids)
            num_new_tokens += int(num_tokens[row]) - num_prompt
            if phase[row] == Phase.FINISHED:
                token_ids = jax.device_get(rows.token_ids) if token_ids is None else token_ids
                answer = token_ids[row, num_prompt : num_tokens[row]].tolist()
                answers.append(Answer(request.request_id, answer, FinishReason(int(reason[row]))))
                self._in_row[row] = None
        self.progress = Progress(
            num_steps=int(counters.num_steps),
            num_prompt_tokens=int(counters.num_prompt_tokens),
            num_new_tokens=self._num_read_tokens + num_new_tokens,
        )
        self._num_read_tokens += sum(len(answer.token_ids) for answer in answers)
        return answers, self.progress
