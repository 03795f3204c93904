"""One step: schedule, take blocks, run the model, sample, append, publish, free. Pure."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.config import PREFILL_TILE
from jaxpaged.engine import scheduler
from jaxpaged.engine.scheduler import Decision, Limits, Plan, Tiles
from jaxpaged.engine.state import EngineState, FinishReason, Phase, Rows
from jaxpaged.memory import block_table
from jaxpaged.memory.block_table import BlockTables, cdiv
from jaxpaged.memory.kv_cache import AttentionBatch, KVCache
from jaxpaged.sampling import logprobs_of, sample
from jaxpaged.status import Status
from pallas_kernels.ops import TiledImplementation

Hidden = Float[Array, "max_num_seqs hidden"]


@runtime_checkable
class Model(Protocol):
    """What a step needs of a model; `models.llama.Llama` is one."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> jnp.dtype: ...

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: AttentionBatch,
        /,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]: ...

    def logits(self, hidden: Hidden, /) -> Float[Array, "max_num_seqs vocab"]: ...


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What is fixed when the loop is compiled, beside the sizes of the state."""

    limits: Limits
    tiles_per_pass: int  # prompt tiles computed in one forward pass; a step may make several passes
    decode_attention: TiledImplementation

    @property
    def prompt_attention(self) -> TiledImplementation:
        """The kernel for GPUs takes tiles of one token only."""
        return "xla" if self.decode_attention == "mosaic_gpu" else self.decode_attention


def step(model: Model, state: EngineState, config: StepConfig) -> tuple[EngineState, Decision]:
    """Advance every running row: some by tiles of their prompt, the others by one token.

    Prompts are computed in passes of one shape, decoding rows in one of another, and logits in a third,
    whatever else is in the step. So a token's bits do not depend on its company.
    """
    state, decision = scheduler.schedule(state, config.limits)
    plan, limits = decision.plan, config.limits
    ran = plan.num_new_tokens > 0
    tables, appended = block_table.append(
        state.tables, plan.num_new_tokens, max_new_blocks=max_blocks_touched(limits, state.tables.block_size)
    )
    state = dataclasses.replace(state, tables=tables, status=state.status | appended.status)
    slots = scheduler.slots_of(state.rows.running, limits.max_num_seqs)

    state, hidden = forward(model, state, plan, slots, config)
    # A row whose every token is in the cache has its newest token's hidden state, and is due for the next.
    due = ran & (state.tables.seq_lens == state.rows.num_tokens)
    state = answer(model, state, hidden, slots, due)

    in_prompt = plan.num_tiles > 0
    state = state.count(
        num_steps=jnp.int32(1),
        num_prompt_tokens=jnp.sum(jnp.where(in_prompt, plan.num_new_tokens, 0)),
        num_decode_tokens=jnp.sum(jnp.where(in_prompt, 0, plan.num_new_tokens)),
        num_new_tokens=jnp.sum(due, dtype=jnp.int32),
    )
    return clean_up(publish(state, jnp.any(in_prompt), limits), limits), decision


def max_blocks_touched(limits: Limits, block_size: int) -> int:
    """Blocks that a step can begin, or fill, over all rows: one for each that decodes, and those of tiles."""
    return limits.max_num_seqs + limits.num_tiles * (cdiv(PREFILL_TILE, block_size) + 1)


def forward(
    model: Model, state: EngineState, plan: Plan, slots: Int[Array, " max_num_seqs"], config: StepConfig
) -> tuple[EngineState, Hidden]:
    """Compute the plan's tokens: the prompts' in passes of a few tiles, then the decoding rows' in one.

    Never both in one pass: there the decoding rows would have another shape in every mix, and other bits.
    Returns the hidden state of each slot's newest token, where it was among the computed.
    """
    rows, tables = state.rows, state.tables
    width = config.tiles_per_pass
    num_passes = cdiv(jnp.sum(plan.num_tiles), width)
    all_tiles = scheduler.prompt_tiles(state, plan, cdiv(config.limits.num_tiles, width) * width)
    type Pass = tuple[KVCache, Hidden]

    def prefill(i: Int[Array, ""], carry: Pass) -> Pass:
        tiles = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * width, width), all_tiles)
        return compute(model, rows, tables, *carry, tiles, slots, config.prompt_attention)

    def decode(carry: Pass) -> Pass:
        tiles = scheduler.decode_tiles(state, plan, slots)
        return compute(model, rows, tables, *carry, tiles, slots, config.decode_attention)

    carry = state.kv_cache, jnp.zeros((slots.shape[0], model.hidden_size), model.dtype)
    carry = lax.fori_loop(0, num_passes, prefill, carry)
    decodes = jnp.any((plan.num_tiles == 0) & (plan.num_new_tokens > 0))
    kv_cache, hidden = lax.cond(decodes, decode, lambda carry: carry, carry)
    return dataclasses.replace(state, kv_cache=kv_cache), hidden


def compute(
    model: Model,
    rows: Rows,
    tables: BlockTables,
    kv_cache: KVCache,
    hidden: Hidden,
    tiles: Tiles,
    slots: Int[Array, " max_num_seqs"],
    attention: TiledImplementation,
) -> tuple[KVCache, Hidden]:
    """Run the model over tiles whose tokens have places already; each row's newest goes to `hidden`."""
    positions = tiles.start[:, None] + jnp.arange(tiles.tile_len, dtype=jnp.int32)
    row = jnp.broadcast_to(tiles.row[:, None], positions.shape)
    valid = (positions >= tiles.first[:, None]) & (positions < tiles.end[:, None])
    batch = AttentionBatch(
        slot_mapping=block_table.slot_mapping(tables, row, positions, valid).reshape(-1),
        block_tables=tables.block_tables[tiles.row],
        query_starts=tiles.start,
        seq_lens=tiles.end,
        implementation=attention,
    )
    token_ids = jnp.where(valid, rows.token_ids.at[row, positions].get(mode="clip"), 0)
    out, kv_cache = model(token_ids.reshape(-1), jnp.where(valid, positions, 0).reshape(-1), kv_cache, batch)
    is_newest = (tiles.end > 0) & (tiles.end == rows.num_tokens[tiles.row])
    last = out.reshape(*positions.shape, -1)[jnp.arange(positions.shape[0]), tiles.end - 1 - tiles.start]
    slot_of = jnp.zeros(tables.max_seqs, jnp.int32).at[slots].set(jnp.arange(slots.shape[0]), mode="drop")
    slot = jnp.where(is_newest, slot_of[tiles.row], slots.shape[0])
    return kv_cache, hidden.at[slot].set(last, mode="drop")


def answer(
    model: Model,
    state: EngineState,
    hidden: Hidden,
    slots: Int[Array, " max_num_seqs"],
    due: Bool[Array, " rows"],
) -> EngineState:
    """Sample a token for each row that is due, append it, and finish the rows that end with it."""
    rows = state.rows
    num_rows = rows.phase.shape[0]
    row = jnp.minimum(slots, num_rows - 1)
    is_due = due[row] & (slots < num_rows)
    position = rows.num_tokens[row]
    options = rows.sampling.take(row, is_due)

    def choose() -> tuple[Int[Array, " max_num_seqs"], Float[Array, " max_num_seqs"]]:
        logits = model.logits(hidden)
        token_ids = sample(logits, options, position)
        logprobs = lax.cond(
            jnp.any(options.wants_logprobs),
            lambda: logprobs_of(logits, token_ids),
            lambda: jnp.zeros(token_ids.shape),
        )
        return token_ids, logprobs

    nothing = jnp.zeros_like(position), jnp.zeros(position.shape)
    token_ids, logprobs = lax.cond(jnp.any(is_due), choose, lambda: nothing)
    num_tokens = position + 1
    stops = jnp.any(token_ids[:, None] == rows.stop_token_ids[row], axis=1)
    ends = num_tokens == rows.max_num_tokens[row]
    reason = jnp.where(stops, FinishReason.STOP, FinishReason.LENGTH)
    at = jnp.where(is_due, row, num_rows)
    finished = jnp.where(is_due & (stops | ends), row, num_rows)
    rows = dataclasses.replace(
        rows,
        token_ids=rows.token_ids.at[at, position].set(token_ids, mode="drop"),
        num_tokens=rows.num_tokens.at[at].set(num_tokens, mode="drop"),
        phase=rows.phase.at[finished].set(Phase.FINISHED, mode="drop"),
        finish_reason=rows.finish_reason.at[finished].set(reason, mode="drop"),
    )
    logprobs = state.logprobs.at[at, position].set(logprobs, mode="drop")
    return dataclasses.replace(state, rows=rows, logprobs=logprobs)


def publish(state: EngineState, computes_prompt: Bool[Array, ""], limits: Limits) -> EngineState:
    """Make full blocks findable: their K and V are written.

    Those that only decoding has filled can wait. Under their own names (`scheduler.cache_keys`) an answer's
    blocks are of use to their own request alone, if it is preempted and computed again; so they are published
    beside a prompt's, or when blocks are so few that the next step may preempt.
    """
    if state.tables.pool.prefix_cache is None:
        return state
    rows, block_size = state.rows, state.tables.block_size
    is_tight = state.tables.pool.num_free < jnp.sum(rows.running)
    is_eager = limits.reuse_answers or limits.sliding_window is not None  # blocks must not leave the window
    wanted = computes_prompt | is_tight | is_eager
    max_blocks = max_blocks_touched(limits, block_size)
    type Carry = tuple[BlockTables, Int[Array, ""]]

    def num_full(tables: BlockTables) -> Int[Array, " rows"]:
        return jnp.maximum(tables.seq_lens // block_size - tables.chains.num_blocks, 0)

    def insert(carry: Carry) -> Carry:
        tables, status = carry
        row, position = jnp.indices(rows.token_ids.shape, jnp.int32)
        keys = scheduler.cache_keys(rows, row, position, limits)
        full = num_full(tables)
        fits = jnp.clip(max_blocks - (jnp.cumsum(full, dtype=jnp.int32) - full), 0, full)
        num_tokens = (tables.chains.num_blocks + fits) * block_size
        tables, info = block_table.cache_full_blocks(tables, keys, num_tokens, max_blocks=max_blocks)
        return tables, status | info.status

    def more(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return wanted & jnp.any(num_full(tables) > 0) & (status == Status.OK)

    tables, status = lax.while_loop(more, insert, (state.tables, jnp.int32(Status.OK)))
    return dataclasses.replace(state, tables=tables, status=state.status | status)


def clean_up(state: EngineState, limits: Limits) -> EngineState:
    """Take back the blocks of rows that have finished, and those that running rows' windows have left."""
    tables, status = scheduler.free_rows(state.tables, state.rows.phase == Phase.FINISHED)
    max_blocks = max_blocks_touched(limits, tables.block_size)
    tables, slid = scheduler.slide_windows(tables, state.rows.running, limits, max_blocks=max_blocks)
    return dataclasses.replace(state, tables=tables, status=state.status | status | slid)
