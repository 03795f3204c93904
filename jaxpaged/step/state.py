"""EngineState: everything the compiled loop knows, as one immutable pytree."""

import enum
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_pool import FreeInfo, StatusInfo
from jaxpaged.memory.block_table import AppendInfo, BlockTables
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import LRU, Policy, sized
from jaxpaged.sampling import Scores, no_scores
from jaxpaged.sampling_state import LogitRules, SamplingState, neutral_rows
from jaxpaged.step import features
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.feature_values import BEAMS, DRAFTS, Beams, DraftAccount, DraftRows
from jaxpaged.step.features import NO_FEATURES, Features


class Phase(enum.IntEnum):
    """Phases of the request in a row."""

    EMPTY = 0  # no request
    WAITING = 1  # submitted, or preempted to be computed again; holds no block
    RUNNING = 2  # its prompt is being computed, or it decodes
    SWAPPED = 3  # preempted, its blocks are in the host pool
    FINISHED = 4  # its tokens are ready to be read; holds no block
    FORKING = 5  # starts to run in this step, which completes its leader's prompt, with the leader's blocks
    FOLLOWING = 6  # a beam whose search runs; takes over the head's blocks when the prompt is done
    HELD = 7  # holds an ended sequence of a beam search, until the search has ended


class FinishReason(enum.IntEnum):
    """Reasons why an answer ended."""

    NONE = 0
    STOP = 1  # a stop token, which is the answer's last
    LENGTH = 2  # as many tokens as were asked for
    ABORT = 3  # ended by the host
    ERROR = 4  # its grammar cannot be followed any further


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """One request a row. There are more rows than run together: the others wait where the loop can reach."""

    order: Int[Array, " rows"]  # the rows by priority, then arrival: the order in which they are served
    phase: Int[Array, " rows"]
    arrival: Int[
        Array, " rows"
    ]  # the request's number on the device: it rises, wraps around, and is never 0; 0: none
    priority: Int[Array, " rows"]  # lower goes first
    salt: Int[Array, " rows"]  # requests share cached blocks only if their salts are equal
    leader: Int[Array, " rows"]  # arrival of the request whose prompt, priority and salt it shares; 0: none
    token_ids: Int[Array, "rows max_model_len"]  # the prompt, then the answer; beyond num_tokens anything
    prompt_lens: Int[Array, " rows"]
    num_tokens: Int[Array, " rows"]  # tokens of the prompt and of the answer so far
    max_num_tokens: Int[Array, " rows"]  # length at which the request ends
    finish_reason: Int[Array, " rows"]
    num_hit_tokens: Int[Array, " rows"]  # tokens found in the prefix cache when the request first ran
    num_prompt_logprobs: Int[Array, " rows"]  # likeliest tokens beside the prompt's own; -1: none
    sampling: SamplingState
    rules: LogitRules  # its `stop_tokens` end an answer
    features: dict[str, Any]  # values of features that are on, by name; see `step.features`
    # What requests give for places of their prompts, by channel: int32 [rows, max_model_len, *shape].
    given: dict[str, Array]

    @property
    def free(self) -> Bool[Array, " rows"]:
        """Rows that a new request may take."""
        return (self.phase == Phase.EMPTY) | (self.phase == Phase.FINISHED)

    @property
    def running(self) -> Bool[Array, " rows"]:
        return self.phase == Phase.RUNNING

    @property
    def beams(self) -> Beams:
        """Membership of each row in a beam search."""
        return self.features[BEAMS]

    @property
    def drafting(self) -> DraftRows:
        """Record of each row's drafts, where drafts are on."""
        return self.features[DRAFTS]

    @property
    def may_rest(self) -> bool:
        """Whether a feature is on for which rows may rest."""
        return features.may_rest(self.features)

    @property
    def resting(self) -> Bool[Array, " rows"]:
        """Rows that run, but sample nothing until the host has written what may come next."""
        if not self.may_rest:
            return jnp.zeros_like(self.phase, bool)
        return self.running & functools.reduce(operator.or_, features.rests(self.features))

    @property
    def forking(self) -> Bool[Array, " rows"]:
        return self.phase == Phase.FORKING

    @property
    def waiting(self) -> Bool[Array, " rows"]:
        """Rows that do not run but are to: new, or preempted."""
        return (self.phase == Phase.WAITING) | (self.phase == Phase.SWAPPED)

    @property
    def following(self) -> Bool[Array, " rows"]:
        return self.phase == Phase.FOLLOWING

    @property
    def held(self) -> Bool[Array, " rows"]:
        return self.phase == Phase.HELD

    @property
    def admitted(self) -> Bool[Array, " rows"]:
        """Mask of rows that hold a decode slot: they run, or will when a prompt is done."""
        return self.running | self.forking | self.following

    def in_group_of(self, row: Int[Array, ""]) -> Bool[Array, " rows"]:
        """Return the row, and all rows that are or were in a beam search with it."""
        width, head = self.beams.width, self.beams.head
        return ((width * width[row] > 0) & (head == head[row])) | (jnp.arange(head.shape[0]) == row)

    @property
    def num_findable(self) -> Int[Array, " rows"]:
        """Number of tokens that are looked up when a row is admitted; for beams the prompt, which they
        share.
        """
        return jnp.where(self.beams.width > 0, self.prompt_lens, self.num_tokens)

    @property
    def tells_prompt(self) -> Bool[Array, " rows"]:
        """Whether log-probabilities of the prompt are wanted still. So all of it is computed, hits or not."""
        return (self.num_prompt_logprobs >= 0) & (self.num_tokens == self.prompt_lens)


NO_ROW = -1


class Counter(enum.IntEnum):
    """Indices of the counters of the engine's work since the state was created. They wrap around: only
    differences mean anything.
    """

    NUM_STEPS = 0
    NUM_PROMPT_TOKENS = 1  # tokens computed in prompt tiles
    NUM_DECODE_TOKENS = 2  # tokens computed in decode slots, drafts included
    NUM_NEW_TOKENS = 3  # tokens sampled
    NUM_PREEMPTIONS = 4
    NUM_LOOKUP_TOKENS = 5  # tokens of admitted requests that were looked up in the prefix cache
    NUM_HIT_TOKENS = 6  # looked-up tokens that were found
    NUM_PROMPT_PASSES = 7  # passes of the model over prompt tiles; a step makes none, one or several
    NUM_DRAFTS = 8  # rows and steps with drafts
    NUM_DRAFT_TOKENS = 9
    NUM_ACCEPTED_TOKENS = 10  # drafts that were right


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostPool:
    """Pool that rows are swapped out to: tables with the device's rows, and K and V in host memory."""

    tables: BlockTables
    kv_cache: KVCache


type TableResult = tuple[BlockTables, AppendInfo | FreeInfo | StatusInfo]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything that the compiled loop knows.

    Row r of `rows` and row r of `tables` belong together. `tables.seq_lens` counts the tokens in the cache.
    """

    rows: Rows
    scores: Scores  # [rows, MAX_STEPS], where asked for: of the token at position p in column p % MAX_STEPS
    tables: BlockTables
    kv_cache: KVCache
    host: HostPool | None
    # The row that was looked up last and did not fit, or NO_ROW; and at most how many of the blocks that it
    # found other rows hold by now. It is looked up again only when it might fit: see `step.admission`.
    last_rejected: Int[Array, "2"]
    # Indexed by `Counter`; behind them, where tokens are drafted, right drafts by their place in a step.
    counters: Int[Array, " counters"]
    status: Int[Array, ""]  # `Status` bits of all steps: anything but OK is a bug of the scheduler
    channels: dict[str, Array] = field(default_factory=dict)  # values of tokens; see `step.channels`
    # Values that all rows share, of features that are on, by name; see `step.features`.
    features: dict[str, Any] = field(default_factory=dict)

    @property
    def drafts(self) -> DraftAccount:
        """Account of all rows' drafts, where drafts are on."""
        return self.features[DRAFTS]

    def on_tables[**P](
        self, verb: Callable[Concatenate[BlockTables, P], TableResult], *args: P.args, **options: P.kwargs
    ) -> "EngineState":
        """Return the state after a transition of its tables. The transition's status is kept, the rest of
        its info is dropped.
        """
        tables, info = verb(self.tables, *args, **options)
        return replace(self, tables=tables, status=self.status | info.status)

    def count(self, more: Mapping[Counter, int | Int[Array, ""]]) -> "EngineState":
        """Return the state with counters raised."""
        raised = [jnp.asarray(more.get(counter, 0), jnp.int32) for counter in Counter]
        counted = jnp.stack(raised)
        if self.counters.shape[0] == len(Counter):
            return replace(self, counters=self.counters + counted)
        return replace(self, counters=self.counters.at[: len(Counter)].add(counted))

    def count_places(self, num_right: Int[Array, " places"]) -> "EngineState":
        """Return the state with the counts of right drafts raised, by the drafts' places in a step."""
        return replace(self, counters=self.counters.at[len(Counter) :].add(num_right))


def empty_rows(
    num_rows: int,
    max_model_len: int,
    vocab_size: int,
    on: Features = NO_FEATURES,
) -> Rows:
    """Return rows without requests as NumPy arrays, which the host fills in to submit requests."""

    def zeros(*shape: int, dtype: type = np.int32) -> Any:
        return np.zeros((num_rows, *shape), dtype)

    return Rows(
        order=np.arange(num_rows, dtype=np.int32),  # type: ignore[arg-type]
        phase=zeros(),
        arrival=zeros(),
        priority=zeros(),
        salt=zeros(),
        leader=zeros(),
        token_ids=zeros(max_model_len),
        prompt_lens=zeros(),
        num_tokens=zeros(),
        max_num_tokens=zeros(),
        finish_reason=zeros(),
        num_hit_tokens=zeros(),
        num_prompt_logprobs=zeros() - 1,
        sampling=neutral_rows(SamplingState, num_rows, vocab_size),
        rules=neutral_rows(LogitRules, num_rows, vocab_size),
        **on.row_fields(num_rows, max_model_len),
    )


def create_tables(
    num_blocks: int,
    num_rows: int,
    max_blocks_per_seq: int,
    block_size: int,
    *,
    prefix_caching: bool,
    policy: Policy = LRU,
    num_groups: int = 1,
    first_blocks: tuple[int, ...] = (),
    classes: tuple[int, ...] = (),
    more_blocks: tuple[int, ...] = (),
) -> BlockTables:
    """Create empty tables over a block pool of their own, as an engine schedules them.

    num_blocks: of the first size class; `more_blocks`: of each further one, its null block included.
    """
    total = block_pool.total_blocks(num_blocks, more_blocks)
    cache = prefix_cache.create(total, block_size) if prefix_caching else None
    policy = sized(policy, block_size)
    pool = block_pool.create(num_blocks, policy, prefix_cache=cache, more_blocks=more_blocks)
    return block_table.create(
        pool,
        max_seqs=num_rows,
        max_blocks_per_seq=max_blocks_per_seq,
        block_size=block_size,
        num_groups=num_groups,
        first_blocks=first_blocks,
        classes=classes,
    )


def create_state(
    tables: BlockTables,
    kv_cache: KVCache,
    max_model_len: int,
    vocab_size: int,
    host: HostPool | None = None,
    on: Features = NO_FEATURES,
) -> EngineState:
    """Create a state without requests over empty tables and an empty cache."""
    num_rows = tables.max_seqs
    return EngineState(
        rows=jax.tree.map(jnp.asarray, empty_rows(num_rows, max_model_len, vocab_size, on)),
        scores=no_scores(num_rows, MAX_STEPS),
        tables=tables,
        kv_cache=kv_cache,
        host=host,
        last_rejected=no_rejection(),
        counters=jnp.zeros(len(Counter) + on.max_drafts, jnp.int32),
        status=jnp.zeros((), jnp.int32),
        **on.state_fields(num_rows, max_model_len),
    )


def no_rejection() -> Int[Array, "2"]:
    """Return the value of `EngineState.last_rejected` when no row was rejected."""
    return jnp.array([NO_ROW, 0], jnp.int32)


def without_kv(state: EngineState) -> EngineState:
    """Return the state with shapes and types in place of the arrays of K and V."""

    def shapes(kv_cache: KVCache) -> KVCache:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), kv_cache)

    host = state.host and replace(state.host, kv_cache=shapes(state.host.kv_cache))
    return replace(state, kv_cache=shapes(state.kv_cache), host=host)


def place_requests(state: EngineState, requests: Rows, rows: Int[Array, " n"]) -> EngineState:
    """Put line i of `requests` into row `rows[i]`, which must be EMPTY or FINISHED; a row beyond all
    drops the line.

    A line may be shorter than a row: the rest of its tokens are written by `loop.write_tokens`.
    `requests.order` is ignored. Arrivals wrap around: only their differences tell which request came first.
    """

    def put(new: Array, old: Array) -> Array:
        return (old.at[rows, : new.shape[1]] if new.ndim > 1 else old.at[rows]).set(new, mode="drop")

    placed = jax.tree.map(put, requests, state.rows)
    index = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)
    since = placed.arrival - requests.arrival[0]
    *_, order = lax.sort([placed.priority, since, index], num_keys=2)
    return replace(state, rows=replace(placed, order=order), last_rejected=no_rejection())
