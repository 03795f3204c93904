"""A dump's steps, one after the other: the engine's own, with a model or with a stand-in for one."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.request import since
from jaxpaged.engine.setup import Setup
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.cache_specs import together
from jaxpaged.memory.grouping import grouping_of, one_group
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import loading
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.research.replay.dump import Dump, kv_of, put_kv, without_layers
from jaxpaged.sampling_state import tokens_of
from jaxpaged.step import loop, scheduler
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import EngineState, Phase, Rows, without_kv


@dataclass(frozen=True)
class Step:
    """One step of a replay. States are as in `Dump`."""

    before: EngineState  # as the last step left it: what came since is not in it
    decision: Decision
    after: EngineState
    num_queued: int  # requests without a row


def replay(dump: Dump, model: Decoder | None = None) -> Iterator[Step]:
    """Step the state until all is done; without a `model` the stand-in answers.

    Raises `InputError` for a model where the state has computed tokens: their K and V are not there.
    """
    config, state = dump.step_config, dump.state
    if model is not None:
        _refuse_computed(state)
    state = jax.tree.map(jnp.array, without_layers(state))
    if model is not None:
        state = put_kv(state, *_zeros(dump.state))
    # What a step gives back is bound to its device: a state that is not would be another program's.
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
    before, queue = dump.state, list[Rows]()
    events = sorted(dump.events, key=lambda event: event.num_steps)
    for num_steps in itertools.count():
        free_rows = np.flatnonzero(state.rows.free)  # a row whose request is given up now is free later
        while events and events[0].num_steps <= num_steps:
            event = events.pop(0)
            if event.request is not None:
                queue.append(event.request)
            if event.abort is not None:
                queue = [line for line in queue if line.arrival[0] != event.abort]
                state = loop.abort(state, np.array([event.abort], np.int32))
        queue = _in_order(queue)
        for row in free_rows[: len(queue)]:
            line = _as_long_as(queue.pop(0), dump.state.rows.token_ids.shape[1])
            state = loop.submit(state, line, np.array([row], np.int32))
        if not (events or queue or scheduler.any_work(state.rows)):
            return
        answering = model or _stand_in(dump, state)
        state, decision = loop.step_once(*nnx.split(answering), state, config=config)
        # A copy, for the state is donated to the next step.
        after = put_kv(jax.device_get(without_kv(state)), *kv_of(dump.state))
        yield Step(before, jax.device_get(decision), after, len(queue))
        before = after


def _in_order(queue: list[Rows]) -> list[Rows]:
    """Sort requests by priority, then arrival: the order in which they take rows."""

    def order(line: Rows) -> tuple[int, int]:
        return int(line.priority[0]), since(int(line.arrival[0]), int(queue[0].arrival[0]))

    return sorted(queue, key=order)


def _as_long_as(line: Rows, max_model_len: int) -> Rows:
    token_ids = np.zeros((1, max_model_len), np.int32)
    token_ids[:, : line.num_tokens[0]] = line.token_ids[:, : line.num_tokens[0]]
    return replace(line, token_ids=token_ids)  # type: ignore[arg-type]


class StandIn(nnx.Module):
    """Answers slot i with `next_tokens[i]`, whatever it is shown and however it is sampled."""

    hidden_size = 1
    dtype = jnp.dtype("float32")

    def __init__(self, next_tokens: Int[Array, " max_num_seqs"], vocab_size: int) -> None:
        self.next_tokens = nnx.Variable(next_tokens)
        self.vocab_size = vocab_size

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens 1"], KVCache]:
        return jnp.zeros((token_ids.shape[0], 1)), cache

    def logits(self, hidden: Float[Array, "num_tokens 1"]) -> Float[Array, "num_tokens vocab"]:
        # Tokens behind a prompt's tile are never used.
        next_tokens = jnp.resize(self.next_tokens[...], (hidden.shape[0],))
        is_next = next_tokens[:, None] == jnp.arange(self.vocab_size)
        return jnp.where(is_next, 0.0, -jnp.inf)


def _stand_in(dump: Dump, state: EngineState) -> StandIn:
    """Return the stand-in model of the next step. It must know the sequence of each slot, so the step is
    decided twice. It has to know who will be in each slot: so the step is decided twice.
    """
    config = dump.step_config
    decision = jax.device_get(loop.schedule(state, config=config))
    rows = jax.device_get(state.rows)
    next_tokens = np.zeros(config.max_num_seqs, np.int32)
    runs = ((rows.phase == Phase.RUNNING) & ~decision.preempted) | decision.admitted
    for slot, row in enumerate(np.flatnonzero(runs)):
        answer = dump.answers.get(int(rows.arrival[row]), [])
        place = int(rows.num_tokens[row] - rows.prompt_lens[row])
        stop = tokens_of(rows.rules.stop_tokens[row])
        known = place < len(answer)
        next_tokens[slot] = answer[place] if known else min(set(range(len(stop) + 1)) - stop)
    return StandIn(jnp.asarray(next_tokens), dump.vocab_size)


def with_model(name: str, dump: Dump) -> tuple[Dump, Decoder]:
    """Return the dump with the attention that serves the model on this machine, and the model (a name as
    `LLM` takes it).
    """
    _refuse_computed(dump.state)
    checkpoint = loading.open_checkpoint(name)
    c, kv, grouping = checkpoint.config, dump.state.kv_cache, dump.step_config.grouping
    shape = (grouping.num_layers or kv.num_layers, kv.num_kv_heads, kv.head_dim)
    rule = "the one that was served, of {} layers, KV heads and head_dim, vocabulary {} and {}"
    heads, widest = (kv.num_kv_heads, kv.head_dim), (c.num_kv_heads, c.head_dim)
    weights = c.kv_weights if heads != widest else ()
    fits = (c.num_kv_layers, c.vocab_size) == (shape[0], dump.vocab_size)
    fits &= heads in (widest, c.heads_by_size[0])
    one_table = one_group(together(c.cache_specs), c.num_kv_layers, weights)
    fits &= grouping in (grouping_of(c.cache_specs, weights).of_step, one_table.of_step)
    check("model", name, rule.format(shape, dump.vocab_size, grouping.specs), fits)
    dtype: Any = str(kv.dtype)
    config = EngineConfig(dtype=dtype, block_size=dump.state.tables.block_size, kv_layout=kv.layout)
    step_config = dump.step_config
    if isinstance(step_config.attention, str):
        step_config = replace(step_config, attention=Setup(config, c).attention)
    model = checkpoint.model(LoadAs(kv.dtype))
    return replace(dump, step_config=step_config), model


def _refuse_computed(state: EngineState) -> None:
    cache = state.tables.pool.prefix_cache
    cached = cache is not None and np.any(cache.last)
    if cached or any(np.any(tables.seq_lens) for tables in tables_of(state).values()):
        raise InputError(
            "model: the state must have no computed tokens, nor any in the prefix cache, for their K and V "
            "are not in the file; replay it without a model"
        )


def _zeros(state: EngineState) -> tuple[KVCache, KVCache | None]:
    """Create zeros for K and V, on the device and on the host."""

    device, host = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), kv_of(state))
    return device, host and jax.device_put(host, jax.memory.Space.Host)


def tables_of(state: EngineState) -> dict[str, BlockTables]:
    """Return the device's tables, and the host's if there are any, by a prefix for their blocks' names."""
    return {"": state.tables} | ({} if state.host is None else {"host ": state.host.tables})
