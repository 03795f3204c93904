"""Plan of a step: tiles of prompts, and the decode slots of rows that generate."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory.entries import dealt, number_through
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Work of each row in this step."""

    num_tiles: Int[Array, " rows"]  # prompt tiles; 0 for a row that decodes or does not run
    num_new_tokens: Int[
        Array, " rows"
    ]  # prompt tokens of these tiles, or 1 for a row that decodes, and drafts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The work of one forward pass: tiles of `tile_len` neighbouring positions, each of one row.

    A tile computes the positions from `first` to `end`; an unused one has end = 0.
    """

    row: Int[Array, " num_tiles"]
    start: Int[Array, " num_tiles"]  # the tile's first position; a multiple of tile_len for prompt tiles
    first: Int[Array, " num_tiles"]
    end: Int[Array, " num_tiles"]
    tile_len: int = field(metadata={"static": True})

    def places(
        self,
    ) -> tuple[
        Int[Array, "num_tiles tile_len"], Int[Array, "num_tiles tile_len"], Bool[Array, "num_tiles tile_len"]
    ]:
        """Return the row and the position of each place in the tiles, and whether it is computed."""
        positions = self.start[:, None] + jnp.arange(self.tile_len, dtype=jnp.int32)
        row = jnp.broadcast_to(self.row[:, None], positions.shape)
        return row, positions, (positions >= self.first[:, None]) & (positions < self.end[:, None])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeSlots:
    """Assignment of running rows to the `max_num_seqs` slots of a decode pass."""

    row: Int[Array, " max_num_seqs"]  # row of each slot; past all rows for an unused slot
    of_row: Int[Array, " rows"]  # slot of each row; past all slots for a row that does not run
    # Drafts of the row before the slot's own, which is the row's newest token or a draft. None: no drafts.
    offset: Int[Array, " max_num_seqs"] | None = None


def plan(state: EngineState, config: StepConfig) -> Plan:
    """Deal out the step's tiles to the unfinished prompts, in order; every other running row decodes one
    token, unless it rests.
    """
    rows, computed = state.rows, state.tables.seq_lens
    in_prompt = rows.running & (computed < rows.prompt_lens)
    first = computed // PREFILL_TILE
    wants = jnp.where(in_prompt, (rows.prompt_lens - 1) // PREFILL_TILE - first + 1, 0)
    gets = jnp.zeros_like(wants).at[rows.order].set(dealt(wants[rows.order], config.num_tiles))
    end = jnp.minimum(rows.prompt_lens, (first + gets) * PREFILL_TILE)
    prompt_tokens = jnp.where(gets > 0, end - computed, 0)
    decodes = rows.running & ~rows.resting if rows.may_rest else rows.running
    return Plan(gets, jnp.where(in_prompt, prompt_tokens, decodes.astype(jnp.int32)))


def prompt_tiles(state: EngineState, plan: Plan, num_tiles: int) -> Tiles:
    """Return the plan's prompt tiles. The state's tables must have slots for their tokens already.

    A prompt may get several tiles at once. Each sees the ones before it, for all K and V are written first.
    """
    order = state.rows.order
    place, k, used = number_through(plan.num_tiles[order], num_tiles)
    row = order[place]
    end = state.tables.seq_lens[row]
    return wide_tiles(row, k, used, end - plan.num_new_tokens[row], end)


def wide_tiles(
    row: Int[Array, " num_tiles"],
    number: Int[Array, " num_tiles"],
    used: Bool[Array, " num_tiles"],
    first: Int[Array, " num_tiles"],
    end: Int[Array, " num_tiles"],
) -> Tiles:
    """Return prompt tiles: of each row's positions from `first` to `end` that of this number."""
    start = (first // PREFILL_TILE + number) * PREFILL_TILE
    return Tiles(
        row=row,
        start=jnp.where(used, start, 0),
        first=jnp.maximum(start, first),
        end=jnp.where(used, jnp.minimum(start + PREFILL_TILE, end), 0),
        tile_len=PREFILL_TILE,
    )


def decode_tiles(state: EngineState, plan: Plan, slots: DecodeSlots) -> Tiles:
    """Return tiles of one position for the rows that decode, one in each decode slot that is taken. The
    state's tables must have a slot for the token already.
    """
    max_seqs = state.tables.max_seqs
    row = jnp.minimum(slots.row, max_seqs - 1)
    end = state.tables.seq_lens[row]
    if slots.offset is not None:
        end += slots.offset - plan.num_new_tokens[row] + 1
    decodes = (slots.row < max_seqs) & (plan.num_tiles[row] == 0) & (plan.num_new_tokens[row] > 0)
    start = jnp.where(decodes, end - 1, 0)
    return Tiles(row=row, start=start, first=start, end=jnp.where(decodes, end, 0), tile_len=1)


def slots_of(running: Bool[Array, " rows"], max_num_seqs: int) -> DecodeSlots:
    """Assign the running rows to decode slots, in the order of the rows."""
    rank = jnp.cumsum(running, dtype=jnp.int32) - 1
    of_row = jnp.where(running, rank, max_num_seqs)
    index = jnp.arange(running.shape[0], dtype=jnp.int32)
    row = jnp.full(max_num_seqs, running.shape[0], jnp.int32).at[of_row].set(index, mode="drop")
    return DecodeSlots(row, of_row)
