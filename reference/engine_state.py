"""State of `reference.engine`: requests, the rows in which they run, and the report of a step."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .beam_search import BeamSearch, Hypothesis, LogProbs
from .speculation import AnyLookup, ByModel, Credit, DraftCost, Drafting, Past, SuffixLookup
from .v1.kv_cache_utils import BlockHash, KVCacheBlock

NextToken = Callable[[list[int]], int]  # the token after these, prompt and answer so far


@dataclass(frozen=True)
class Reach:
    """Tokens that a group of layers reads: all before, a window of them, or those of a chunk.

    With a window or chunks, the first tokens of the sequence may be read by all.
    """

    window: int | None = None  # positions a token attends to, its own included
    chunk: int | None = None  # a token attends to those from a multiple of it on
    first_tokens: int = 0  # a token attends to so many at the beginning, too

    @property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None

    def first_read(self, position: int) -> int:
        """Return the first position behind the first tokens that the token at this one attends to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(position + 1 - self.window, 0)

    def reads(self, first: int, end: int) -> list[int]:
        """Return the positions that the tokens from `first` to before `end` attend to, and their own."""
        behind = self.first_read(first)
        return [*range(min(self.first_tokens, behind)), *range(behind, end)]

    def skipped(self, position: int, block_size: int) -> range:
        """Return the blocks that the token at a position, and any behind it, does not attend to."""
        return range(-(-self.first_tokens // block_size), self.first_read(position) // block_size)

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the most neighbouring tokens that are needed while so many are computed; None: all."""
        if self.chunk is not None:
            return self.chunk - 1 + num_in_flight
        return None if self.window is None else self.window - 1 + num_in_flight


@dataclass(frozen=True)
class EngineConfig:
    """The engine's fixed sizes; both pools count their null block."""

    max_num_seqs: int  # rows that run together
    num_rows: int  # rows that requests may wait, run and lie finished in
    num_tiles: int  # prompt tiles in one step
    tile_len: int  # positions a tile
    block_size: int  # positions a block
    num_blocks: int
    max_blocks_per_seq: int  # blocks in a row's line
    num_host_blocks: int = 0  # 0: there is no host pool
    reaches: tuple[Reach, ...] = (Reach(),)  # of each group of layers
    watermark_blocks: int | tuple[int, ...] = 0  # left free when a request joins others; of each class
    # Size class of each group's blocks, each with a pool; the pools of classes behind the first.
    classes: tuple[int, ...] = ()
    more_blocks: tuple[int, ...] = ()
    more_host_blocks: tuple[int, ...] = ()
    prefix_caching: bool = True
    free_profile: Literal["classic", "split"] = "classic"  # where freed blocks go, in both pools
    reuse_answers: bool = False  # whether a later prompt may hit blocks with an answer's tokens
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    lookup: AnyLookup | None = None  # how tokens are drafted; None: they are not
    most_drafting: int | None = None  # rows that run while drafts are made; None: any number
    draft_cost: DraftCost | None = None  # what may be lost by drafts follows from it; None: all

    @property
    def class_of(self) -> tuple[int, ...]:
        return self.classes or (0,) * len(self.reaches)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each class, the null block included."""
        return self.num_blocks, *self.more_blocks

    def new_past(self) -> Past:
        """Return room for past answers, where drafts are looked up in them."""
        return Past(self.lookup.past_tokens if isinstance(self.lookup, SuffixLookup) else 0)

    def draft_slots(self, num_running: int) -> int:
        """Return how many drafts a step may have while so many rows run."""
        if self.most_drafting is not None and num_running > self.most_drafting:
            return 0
        return self.max_num_seqs - num_running


@dataclass(frozen=True)
class Search:
    """Beam search of a request, which has the arrivals from its own on, one for each of its rows."""

    width: int
    length_penalty: float
    logprobs_of: LogProbs


@dataclass(frozen=True)
class Request:
    """arrival: its name, higher than that of all requests before it.

    max_num_tokens: prompt and answer end at so many.
    salt: requests that differ in it share no blocks.
    leader: the arrival of an earlier request with the same prompt, priority and salt.
    next_token: its own, where its options change the engine's.
    next_draft: the same of the model that drafts.
    rests: whether it rests behind these tokens, until `Row.resume`; None: nowhere, and it may have drafts.
    forced: the tokens that must come behind these, by its grammar; None: there are none.
    """

    arrival: int
    prompt: Sequence[int]
    max_num_tokens: int
    stop_token_ids: Sequence[int] = ()
    priority: int = 0
    salt: int = 0
    leader: int | None = None
    next_token: NextToken | None = None
    next_draft: NextToken | None = None
    search: Search | None = None
    rests: Callable[[Sequence[int]], bool] | None = None
    forced: Callable[[Sequence[int]], Sequence[int]] | None = None

    @property
    def num_rows(self) -> int:
        return 1 if self.search is None else 2 * self.search.width

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.arrival


class Phase(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"
    SWAPPED = "swapped"  # its blocks are on the host
    FOLLOWING = "following"  # a beam whose head computes the prompt; holds no blocks
    HELD = "held"  # for what ends of a beam search
    FINISHED = "finished"  # holds no blocks; its tokens can be read until its row is used again


FinishReason = Literal["stop", "length", "abort"]
Preemption = Literal["recompute", "swap"]


def drafting_of(request: Request, config: EngineConfig, past: Past, credit: Credit) -> Drafting | None:
    """Return the record of a new row's drafts; None where there are none."""
    lookup = config.lookup
    if lookup is None or request.search is not None:
        return None
    if isinstance(lookup, ByModel) and request.next_draft is not None:
        lookup = replace(lookup, next_token=request.next_draft)
    return Drafting(lookup, past, request.salt, credit, len(request.prompt), config.tile_len)


@dataclass(eq=False)
class Row:
    """A request and how far it is.

    computed: tokens whose K and V are in the cache, the first ones.
    lines: for each group of layers the blocks of the computed tokens, in order; the null block stands for one
        that is out of reach. On the host while SWAPPED.
    names: of the content of the leading blocks, as far as it has been published or found; see `Engine`.
    forks_from: the row whose blocks it takes over in this step.
    """

    index: int
    request: Request
    tokens: list[int]
    phase: Phase = Phase.WAITING
    computed: int = 0
    lines: list[list[KVCacheBlock]] = field(default_factory=lambda: [[]])
    names: list[BlockHash] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    forks_from: "Row | None" = None
    group: "Group | None" = None
    drafting: Drafting | None = None
    drafts: list[int] = field(default_factory=list)  # of this step
    rests: bool = False  # keeps its blocks and its slot, and decodes nothing

    def resume(self) -> None:
        self.rests = False

    def leave(self) -> None:
        """Reset a drafting model's progress, because its blocks are gone."""
        if self.drafting is not None:
            self.drafting.has_begun = False

    def keep_answer(self) -> None:
        """Keep the answer for drafts of other requests."""
        if self.drafting is not None:
            self.drafting.past.keep(self.request.salt, self.tokens[self.prompt_len :])

    @property
    def forced(self) -> Sequence[int]:
        return () if self.request.forced is None else self.request.forced(self.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Number of slots that it takes together with the rows that run with it."""
        return 1 if self.group is None else self.group.search.width

    @property
    def num_findable(self) -> int:
        """Number of its tokens, the last left out, that are looked for in the prefix cache."""
        return self.num_tokens if self.group is None else self.prompt_len

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """The blocks of the first group."""
        return self.lines[0]

    @property
    def held(self) -> list[KVCacheBlock]:
        """The blocks of all groups that are within reach."""
        return [block for line in self.lines for block in line if not block.is_null]

    @property
    def marked_tokens(self) -> list[int]:
        """The tokens and drafts; those of the answer as `-1 - token`: they have another shape."""
        return [
            token if position < self.prompt_len else -1 - token
            for position, token in enumerate(self.tokens + self.drafts)
        ]


@dataclass(eq=False)
class Group:
    """A beam search and its rows; the first one is the head."""

    search: BeamSearch
    logprobs_of: LogProbs
    rows: list[Row]  # those of beams
    held: list[Row]  # for what has ended
    beam_rows: list[Row] = field(default_factory=list)  # of the search's beams, the best first
    ended_rows: dict[Hypothesis, Row] = field(default_factory=dict)


def draft_for(running: Sequence[Row], config: EngineConfig) -> None:
    """Draft tokens for running rows that decode their newest one, as many as there are empty slots.

    A model that drafts has a pass for each draft of a row, for which all rows wait. So it drafts alike for
    all, and only for at least half of those that run.
    """
    slots = config.draft_slots(len(running))
    by_model = isinstance(config.lookup, ByModel)
    each = -(-slots // max(len(running), 1)) if by_model else slots
    for row in running:
        is_at_end = row.forks_from is None and row.computed == row.num_tokens - 1 >= row.prompt_len
        if is_at_end and row.drafting is not None and row.request.rests is None:
            room = row.request.max_num_tokens - row.num_tokens - 1
            drafts = row.drafting.draft(row.tokens, room, row.prompt_len, row.forced, len(running))
            row.drafts = drafts[: min(each, slots)]
            slots -= len(row.drafts)
    if by_model and 2 * sum(bool(row.drafts) for row in running) < len(running):
        for row in running:
            row.drafts = []


@dataclass
class Step:
    """Report of one step, by row. Rows and requests without an event are left out."""

    num_new_tokens: dict[int, int] = field(default_factory=dict)  # computed in this step
    preempted: dict[int, Preemption] = field(default_factory=dict)  # in this order
    admitted: dict[int, int] = field(default_factory=dict)  # blocks hit; in this order, swapped ones too
    copies_out: list[tuple[int, int]] = field(default_factory=list)  # device block to host block
    copies_in: list[tuple[int, int]] = field(default_factory=list)  # host block to device block
    copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # of shared blocks, before they are written to
    forked: dict[int, int] = field(default_factory=dict)  # from which row
    new_tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    # Afterwards:
    block_tables: dict[int, list[int]] = field(default_factory=dict)
    host_block_tables: dict[int, list[int]] = field(default_factory=dict)
    free_block_ids: list[int] = field(default_factory=list)  # in the order in which they will be taken
    free_host_block_ids: list[int] = field(default_factory=list)
