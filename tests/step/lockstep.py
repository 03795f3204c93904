"""The compiled step and its oracle side by side: one random workload, compared after every step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_pool, features, kv_cache, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.cache_specs import FULL, CacheSpec
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.invariants import check_invariants, free_block_ids
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import LRU, Policy
from jaxpaged.research.verify.generations import FREE_PROFILES
from jaxpaged.sampling_state import token_bits
from jaxpaged.status import Status
from jaxpaged.step import admission, automata, scheduler
from jaxpaged.step.config import ByModel, DraftCost, Lookup, StepConfig, SuffixLookup
from jaxpaged.step.feature_values import DRAFTS, GRAMMARS, DraftSizes
from jaxpaged.step.features import Features, with_values
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import (
    Counter,
    EngineState,
    FinishReason,
    HostPool,
    Phase,
    create_state,
    create_tables,
    empty_rows,
    place_requests,
)
from jaxpaged.step.step import step
from reference import engine_state as reference
from reference import speculation
from reference.engine import Engine
from reference.sampler import TokenAutomaton
from tests.step.automata_of_tests import AUTOMATA, arena, written
from tests.step.followed import check_followed, check_record
from tests.step.sum_model import VOCAB, SumDraft, SumHead, SumModel, next_token

VOCAB_ROOM = 97  # of sets of tokens: that of `tests.tiny`, for one state's steps to be another's
STOP = 0
MAX_MODEL_LEN = 112
MAX_NUM_SEQS = 3
NUM_ROWS = 6


@dataclasses.dataclass(frozen=True)
class Request(reference.Request):
    """Request with changes of its logits: numbers of which float32 and float64 make the same."""

    rules: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_followed(self) -> bool:
        """Whether the host follows its automaton."""
        return self.rests is not None


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting of a workload. There are few of them: each is a program to compile."""

    name: str
    num_blocks: int
    block_size: int = 4
    num_tiles: int = 3
    num_host_blocks: int = 0
    specs: tuple[CacheSpec, ...] = (FULL,)  # of the groups of layers
    classes: tuple[int, ...] = ()  # size class of each group
    more_blocks: tuple[int, ...] = ()  # of the classes behind the first
    more_host_blocks: tuple[int, ...] = ()
    watermark_blocks: int | tuple[int, ...] = 0
    prefix_caching: bool = True
    policy: Policy = LRU
    reuse_answers: bool = False
    has_arena: bool = False  # whether answers may have automata
    most_drafts: int = 0
    by_suffix: bool = False  # whether drafts are what mostly followed
    past_tokens: int = 0  # of past answers that are looked into
    most_drafting: int | None = None  # rows that run while drafts are made
    by_model: bool = False  # whether a second model drafts, or a head
    by_head: bool = False
    most_prompt: int | None = None  # see `ByModel`
    cost: tuple[int, ...] = ()  # see `DraftCost`; empty: nothing is limited

    @property
    def reaches(self) -> tuple[reference.Reach, ...]:
        """The groups as the oracle has them."""
        return tuple(
            reference.Reach(getattr(spec, "window", None), getattr(spec, "chunk", None), spec.first_tokens)
            for spec in self.specs
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request that comes through the door."""
        return max(n for n in range(MAX_MODEL_LEN) if self.has_room_for(1, 0, n + 1)) + 1

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each size class."""
        return self.num_blocks, *self.more_blocks

    def has_room_for(self, width: int, prompt_len: int, num_tokens: int) -> bool:
        """Return whether a beam search is admitted by the door."""
        needs = self.config.blocks_by_class(num_tokens - 1, self.block_size)
        shares = self.config.shared_by_class(prompt_len, self.block_size)
        return all(
            need + (width - 1) * (need - shared) < size
            for need, shared, size in zip(needs, shares, self.pool_sizes, strict=True)
        )

    @property
    def config(self) -> StepConfig:
        return StepConfig(
            max_num_seqs=MAX_NUM_SEQS,
            num_tiles=self.num_tiles,
            tiles_per_pass=min(2, self.num_tiles),
            attention="xla",
            watermark_blocks=self.watermark_blocks,
            grouping=Grouping(
                self.specs, tuple((layer,) for layer in range(len(self.specs))), classes=self.classes
            ).of_step,
            reuse_answers=self.reuse_answers,
            rows_at_once=3 if self.most_drafts else None,
            lookup=ByModel(self.most_drafts, self.most_prompt)
            if self.by_model
            else self.lookup(Lookup, SuffixLookup),
            most_drafting=self.most_drafting,
            draft_cost=DraftCost(*self.cost) if self.cost else None,
        )

    def lookup(self, by_end: Callable[..., Any], by_suffix: Callable[..., Any]) -> Any:
        """Make the settings of drafts, if there are any, of the classes of one side."""
        if not self.most_drafts:
            return None
        if self.by_suffix:
            sizes = {"most": self.most_drafts, "depth": self.most_drafts + 3, "past_tokens": self.past_tokens}
            return by_suffix(**sizes, factor=1.5, min_prob=0.6)
        return by_end(most=self.most_drafts, longest=3, shortest=1)

    def advance(self, state: EngineState) -> Any:
        """Make a step: the next state and what was decided."""
        return compiled_step(self)(state)

    def find(self, state: EngineState, row: jax.Array) -> jax.Array:
        """Look up what is cached of a row's tokens: the blocks of each group."""
        return compiled_find(self)(state, row)

    def oracle(self) -> Engine:
        return Engine(
            reference.EngineConfig(
                max_num_seqs=MAX_NUM_SEQS,
                num_rows=NUM_ROWS,
                num_tiles=self.num_tiles,
                tile_len=PREFILL_TILE,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                max_blocks_per_seq=cdiv(MAX_MODEL_LEN, self.block_size),
                num_host_blocks=self.num_host_blocks,
                reaches=self.reaches,
                classes=self.classes,
                more_blocks=self.more_blocks,
                more_host_blocks=self.more_host_blocks,
                watermark_blocks=self.watermark_blocks,
                prefix_caching=self.prefix_caching,
                free_profile=FREE_PROFILES[self.policy.name],
                reuse_answers=self.reuse_answers,
                preemption_mode="swap" if self.num_host_blocks else "recompute",
                lookup=speculation.ByModel(
                    self.most_drafts,
                    functools.partial(next_token, self.reaches, drafts=True),
                    self.most_prompt,
                )
                if self.by_model
                else self.lookup(speculation.Lookup, speculation.SuffixLookup),
                most_drafting=self.most_drafting,
                draft_cost=speculation.DraftCost(*self.cost) if self.cost else None,
            ),
            functools.partial(next_token, self.reaches),
        )

    @property
    def features(self) -> Features:
        sizes: dict[str, Any] = {}
        if self.has_arena:
            sizes[GRAMMARS] = automata.BLOCK_WORDS * (1 + len(AUTOMATA) + NUM_ROWS)
        if self.most_drafts:
            sizes[DRAFTS] = DraftSizes(self.most_drafts, self.past_tokens)
        return Features.on(**sizes)

    def state(self) -> EngineState:
        def tables(num_blocks: int, more_blocks: tuple[int, ...], *, cached: bool) -> BlockTables:
            max_blocks_per_seq = cdiv(MAX_MODEL_LEN, self.block_size)
            return create_tables(
                num_blocks,
                NUM_ROWS,
                max_blocks_per_seq,
                self.block_size,
                prefix_caching=cached,
                policy=self.policy,
                num_groups=len(self.specs),
                first_blocks=self.config.grouping.first_blocks(self.block_size),
                classes=self.classes,
                more_blocks=more_blocks,
            )

        def arrays(num_blocks: int) -> KVCache:
            def of(num_layers: int) -> KVCache:
                return kv_cache.create(num_layers, num_blocks, self.block_size, 1, 2, jnp.dtype("float32"))

            if self.by_head:
                return kv_cache.joined(of(1), features.beside(of(1), VOCAB))
            return kv_cache.joined(of(1), of(len(self.specs))) if self.by_model else of(1)

        host = None
        if self.num_host_blocks:
            on_host = tables(self.num_host_blocks, self.more_host_blocks, cached=False)
            host = HostPool(on_host, arrays(on_host.pool.num_blocks))
        device = tables(self.num_blocks, self.more_blocks, cached=self.prefix_caching)
        sizes = MAX_MODEL_LEN, VOCAB_ROOM
        state = create_state(device, arrays(device.pool.num_blocks), *sizes, host, self.features)
        state = with_values(state, {GRAMMARS: arena(NUM_ROWS)}) if self.has_arena else state
        # Bound to its device, as what a step gives back is: else the second step would be another program.
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)


@functools.cache
def compiled_step(setting: Setting):
    """Return the compiled step of a setting."""
    drafter = SumHead() if setting.by_head else SumDraft(setting.specs) if setting.by_model else None
    model = SumModel(setting.specs, drafter)
    return jax.jit(lambda state: step(model, state, setting.config))


@functools.cache
def compiled_find(setting: Setting):
    """Return the compiled search for what is cached of a row's tokens."""
    return jax.jit(lambda state, row: admission.find_prompt(state, row, setting.config).block_ids)


compiled_submit = jax.jit(place_requests)
compiled_abort = jax.jit(scheduler.abort)


@dataclasses.dataclass(frozen=True)
class Event:
    """Event before a step: requests come, and one may be aborted."""

    requests: tuple[reference.Request, ...] = ()
    abort: int | None = None  # an arrival


class LockStep:
    """Feeds both sides the same, and compares all that can be seen."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.oracle = setting.oracle()
        self.state = setting.state()
        self.num_steps = self.num_computed = 0
        self.queue: list[reference.Request] = []  # those without a row
        kinds = "preempted swapped hits forked copied constrained drafted accepted rested marked"
        self.seen = dict.fromkeys(kinds.split(), 0)

    @property
    def unfinished(self) -> bool:
        rows = self.oracle.rows
        return bool(self.queue) or any(r is not None and r.finish_reason is None for r in rows)

    def run(self, events: list[Event]) -> None:
        for event in events:
            self.happen(event)
            self.step()
        while self.unfinished:
            self.happen(Event())
            self.step()
        self.check_invariants()
        pool = self.state.tables.pool
        assert int(pool.num_free_in_all) == pool.num_blocks - 1

    def happen(self, event: Event) -> None:
        self.queue += event.requests
        free = [i for i, old in enumerate(self.oracle.rows) if old is None or old.finish_reason is not None]
        while self.queue and self.queue[0].num_rows <= len(free):
            request = self.queue.pop(0)
            rows, free = free[: request.num_rows], free[request.num_rows :]
            self.oracle.submit(request, *rows)
            for i, row in enumerate(rows):
                self.submit(request, row, i, rows[0])
        if event.abort is not None:
            self.abort(event.abort)
        self.resume_some()

    def abort(self, arrival: int) -> None:
        """Give up the request with this arrival; of a beam search all."""
        its = [r for r in self.queue if r.arrival <= arrival < r.arrival + r.num_rows]
        self.queue = [request for request in self.queue if request not in its]
        self.oracle.abort(arrival)
        rows = [row for row in self.oracle.rows if row is not None and row.request.arrival == arrival]
        groups = [row.group.rows + row.group.held for row in rows if row.group is not None]
        arrivals = {arrival, *(row.request.arrival for group in groups for row in group)}
        padded = [*arrivals, *[-1] * (NUM_ROWS - len(arrivals))]
        self.state = compiled_abort(self.state, jnp.array(padded, jnp.int32))
        self.compare_rows()

    def evict_free(self) -> None:
        """Forget the content of all free blocks."""
        free = free_block_ids(self.state.tables.pool)
        for pool in self.oracle.blocks.pools:
            its = [place for place, block in enumerate(pool.blocks) if block.block_id in free]
            pool.evict_blocks(its)
        pool = self.state.tables.pool
        pool, _ = block_pool.evict(pool, jnp.arange(pool.num_blocks), pool.ref_count == 0)
        self.state = dataclasses.replace(self.state, tables=dataclasses.replace(self.state.tables, pool=pool))

    def submit(self, request: reference.Request, row: int, index: int, head: int) -> None:
        line = empty_rows(1, MAX_MODEL_LEN, VOCAB_ROOM, self.setting.features)
        for array, value in (
            (line.phase, Phase.HELD if request.search and index >= request.search.width else Phase.WAITING),
            (line.arrival, request.arrival + index),
            (line.priority, request.priority),
            (line.salt, request.salt),
            (line.leader, request.leader or 0),
            (line.prompt_lens, len(request.prompt)),
            (line.num_tokens, len(request.prompt)),
            (line.max_num_tokens, request.max_num_tokens),
        ):
            np.asarray(array)[0] = value
        if request.search is not None:
            for array, value in (
                (line.beams.width, request.search.width),
                (line.beams.head, head),
                (line.beams.length_penalty, request.search.length_penalty),
                (line.beams.cum_logprob, -np.inf if index else 0),
                (line.beams.rank, index % request.search.width),
                (line.sampling.num_logprobs, 2 * request.search.width),
            ):
                np.asarray(array)[0] = value
        np.asarray(line.token_ids)[0, : len(request.prompt)] = request.prompt
        rules = request.rules if isinstance(request, Request) else {}
        for name, value in rules.items():
            if name == "min_tokens":
                np.asarray(line.rules.least_num_tokens)[0] = len(request.prompt) + value
            elif name == "automaton":
                opens = value.opens
                block = len(AUTOMATA) + row if request.is_followed else AUTOMATA.index(value)
                grammars = line.features[GRAMMARS]
                grammars.first[0] = automata.BLOCK_WORDS * (1 + block)
                grammars.state[0] = 0 if opens is None else automata.WAITS
                grammars.opens[0] = automata.WAITS if opens is None else opens
            else:
                np.asarray(getattr(line.rules, name))[0] = value
        np.asarray(line.sampling.has_rules)[0] = bool(rules.keys() - {"automaton"})
        np.asarray(line.rules.stop_tokens)[0] = token_bits(request.stop_token_ids, VOCAB_ROOM)
        self.state = compiled_submit(self.state, line, jnp.array([row], jnp.int32))
        if isinstance(request, Request) and request.is_followed and rules["automaton"].opens is None:
            self.write_mask(row, rules["automaton"], [])

    def resume_some(self) -> None:
        """Let some of the rows that rest go on: each step others, so that each rests for a while."""
        for row in self.oracle.rows:
            if row is not None and row.rests and (self.num_steps + row.index) % 3 != 1:
                self.seen["rested"] += 1
                request = row.request
                assert isinstance(request, Request)
                self.write_mask(row.index, request.rules["automaton"], row.tokens[row.prompt_len :])
                row.resume()

    def write_mask(self, row: int, automaton: TokenAutomaton, answer: list[int]) -> None:
        """Write what may come behind an answer, as the host does."""
        block, may = 1 + len(AUTOMATA) + row, automaton.allowed(answer)
        words, grammars = self.state.features[GRAMMARS], self.state.rows.features[GRAMMARS]
        first, state = automata.BLOCK_WORDS * block, automata.FREE if may is None else 0
        words, states = written((words, grammars.state), may, first, row, state)
        rows = with_values(self.state.rows, {GRAMMARS: dataclasses.replace(grammars, state=states)})
        self.state = with_values(dataclasses.replace(self.state, rows=rows), {GRAMMARS: words})

    def step(self) -> None:
        want = self.oracle.step()
        self.state, decision = self.setting.advance(self.state)
        got: Decision = jax.device_get(decision)
        assert Status(int(self.state.status)) == Status.OK
        self.num_steps += 1
        self.num_computed += sum(want.num_new_tokens.values())

        def of(array: np.ndarray, mask: np.ndarray) -> dict[int, int]:
            return {int(row): int(array[row]) for row in np.flatnonzero(mask)}

        num_new = got.plan.num_new_tokens
        assert of(num_new, num_new > 0) == want.num_new_tokens
        assert of(got.num_hit_blocks, got.admitted) == want.admitted
        modes = {
            row: "swap" if swaps else "recompute" for row, swaps in of(got.swapped, got.preempted).items()
        }
        assert modes == want.preempted
        assert of(got.leader_row, got.leader_row != np.arange(NUM_ROWS)) == want.forked
        self.compare_rows()
        if self.setting.by_model and not self.setting.by_head:
            self.seen["marked"] += check_followed(self.state, self.oracle.rows)
        assert free_block_ids(self.state.tables.pool) == want.free_block_ids
        pools = self.oracle.blocks.pools
        assert self.findable() == [b.block_id for p in pools for b in p.blocks if b.block_hash is not None]
        if self.num_steps % 8 == 0:  # it takes longer than the step
            self.check_invariants()
        self.check_rejected()
        self.seen["preempted"] += len(modes)
        self.seen["swapped"] += list(modes.values()).count("swap")
        self.seen["hits"] += sum(want.admitted.values())
        self.seen["forked"] += len(want.forked)
        self.seen["copied"] += len(want.copies)
        self.seen["drafted"] = int(self.state.counters[Counter.NUM_DRAFT_TOKENS])
        self.seen["accepted"] = int(self.state.counters[Counter.NUM_ACCEPTED_TOKENS])
        assert int(jnp.sum(self.state.counters[len(Counter) :])) == self.seen["accepted"]

    def tables_after_step(self) -> dict[int, list[int]]:
        self.step()
        return {row.index: [b.block_id for b in row.blocks] for row in self.oracle.rows if row and row.blocks}

    def findable(self) -> list[int]:
        """Return the blocks whose content is published."""
        cache = self.state.tables.pool.prefix_cache
        if cache is None:
            return []
        return np.flatnonzero(prefix_cache.has_content(cache, jnp.arange(cache.num_blocks))).tolist()

    def check_invariants(self) -> None:
        check_invariants(self.state.tables)
        if self.state.host is not None:
            check_invariants(self.state.host.tables)

    def check_rejected(self) -> None:
        """Check that no more blocks of a rejected request's hit are held than the state remembers."""
        row, most = map(int, self.state.last_rejected)
        if row < 0 or int(self.state.rows.phase[row]) != Phase.WAITING or not self.setting.prefix_caching:
            return
        found = np.asarray(self.setting.find(self.state, jnp.int32(row)))
        num_held = np.count_nonzero(np.asarray(self.state.tables.pool.ref_count)[found])
        assert num_held <= most, f"{row=}: {num_held} are held of {found}"

    def compare_rows(self) -> None:
        state = jax.device_get(dataclasses.replace(self.state, kv_cache=None))
        for index, row in enumerate(self.oracle.rows):
            if row is None:
                assert state.rows.phase[index] == Phase.EMPTY
                continue
            assert Phase(state.rows.phase[index]).name.lower() == row.phase.value
            num_tokens = int(state.rows.num_tokens[index])
            assert state.rows.token_ids[index, :num_tokens].tolist() == row.tokens
            rules = row.request.rules if isinstance(row.request, Request) else {}
            if (automaton := rules.get("automaton")) is not None:
                behind = automaton.state(row.tokens[row.prompt_len :])
                self.seen["constrained"] += behind is not None and behind >= 0
                want = {None: automata.WAITS, -1: automata.LOST}.get(behind, behind)
                if row.request.is_followed:
                    want = automata.RESTS if row.rests else min(want, 0)
                assert state.rows.features[GRAMMARS].state[index] == want
            if row.drafting is not None and row.finish_reason is None:
                check_record(state, index, row.drafting)
            reason = FinishReason(state.rows.finish_reason[index]).name.lower()
            assert reason == (row.finish_reason or "none")
            swapped = row.phase is reference.Phase.SWAPPED
            for tables, mine in ((state.tables, not swapped), (state.host and state.host.tables, swapped)):
                if tables is None:
                    continue
                first = index * tables.num_groups
                for line, its in zip(tables.block_tables[first:], row.lines, strict=False):
                    blocks = [block.block_id for block in its] if mine else []
                    assert line[: len(blocks)].tolist() == blocks
                    assert not np.any(line[len(blocks) :])
                assert tables.seq_lens[index] == (row.computed if mine and row.blocks else 0)
