"""EngineState: everything the compiled loop knows, as one immutable pytree."""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.config import MAX_STOP_TOKENS
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.sampling import SamplingState


class Phase(enum.IntEnum):
    """Where the request in a row stands."""

    EMPTY = 0  # no request
    WAITING = 1  # submitted, holds no block
    RUNNING = 2  # admitted: its prompt is being computed, or it decodes
    FINISHED = 3  # its tokens are ready to be read; holds no block


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1  # a stop token, which is the answer's last
    LENGTH = 2  # as many tokens as were asked for


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "phase", "arrival", "token_ids", "prompt_lens", "num_tokens", "max_num_tokens", "stop_token_ids",
        "finish_reason", "sampling",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Rows:
    """One request a row. All arrays are int32 but the sampling options."""

    phase: Int[Array, " max_num_seqs"]
    arrival: Int[Array, " max_num_seqs"]  # requests are admitted in this order
    token_ids: Int[Array, "max_num_seqs max_model_len"]  # the prompt, then the answer; 0 beyond num_tokens
    prompt_lens: Int[Array, " max_num_seqs"]
    num_tokens: Int[Array, " max_num_seqs"]  # prompt and answer so far
    max_num_tokens: Int[Array, " max_num_seqs"]  # the request ends when it has so many
    stop_token_ids: Int[Array, "max_num_seqs max_stop_tokens"]  # NO_TOKEN where there are fewer
    finish_reason: Int[Array, " max_num_seqs"]
    sampling: SamplingState

    @property
    def running(self) -> Bool[Array, " max_num_seqs"]:
        return self.phase == Phase.RUNNING


NO_TOKEN = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["num_steps", "num_prompt_tokens", "num_decode_tokens"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Counters:
    """What has been done since the state was made."""

    num_steps: Int[Array, ""]
    num_prompt_tokens: Int[Array, ""]  # prompt tokens computed
    num_decode_tokens: Int[Array, ""]  # answer tokens computed: each answer's first comes with its prompt


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "tables", "kv_cache", "counters", "status"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Row r of `rows` and row r of `tables` belong together; `tables.seq_lens` counts tokens in the cache."""

    rows: Rows
    tables: BlockTables
    kv_cache: KVCache
    counters: Counters
    status: Int[Array, ""]  # `Status` bits of all steps: anything but OK is a bug of the scheduler


def empty_rows(max_num_seqs: int, max_model_len: int) -> Rows:
    """Rows without requests, as NumPy arrays: what the host fills in to submit."""

    def zeros(*shape: int, dtype: type = np.int32) -> Any:
        return np.zeros((max_num_seqs, *shape), dtype)

    return Rows(
        phase=zeros(),
        arrival=zeros(),
        token_ids=zeros(max_model_len),
        prompt_lens=zeros(),
        num_tokens=zeros(),
        max_num_tokens=zeros(),
        stop_token_ids=zeros(MAX_STOP_TOKENS) + NO_TOKEN,
        finish_reason=zeros(),
        sampling=SamplingState(
            temperature=zeros(dtype=np.float32),
            top_k=zeros(),
            top_p=zeros(dtype=np.float32) + 1,
            min_p=zeros(dtype=np.float32),
            seed=zeros(dtype=np.uint32),
        ),
    )


def create(tables: BlockTables, kv_cache: KVCache, max_model_len: int) -> EngineState:
    """A state without requests over empty tables and an empty cache."""
    rows = jax.tree.map(jnp.asarray, empty_rows(tables.max_seqs, max_model_len))

    def zero() -> Int[Array, ""]:
        return jnp.zeros((), jnp.int32)  # each its own array: a donated one may not be there twice

    counters = Counters(num_steps=zero(), num_prompt_tokens=zero(), num_decode_tokens=zero())
    return EngineState(rows=rows, tables=tables, kv_cache=kv_cache, counters=counters, status=zero())


def submit(state: EngineState, requests: Rows, mask: Bool[Array, " max_num_seqs"]) -> EngineState:
    """Put the masked lines of `requests` into their rows, which must be EMPTY or FINISHED."""

    def place(new: Array, old: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return dataclasses.replace(state, rows=jax.tree.map(place, requests, state.rows))
