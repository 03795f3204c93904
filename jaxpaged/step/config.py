"""Configuration of a step: what is fixed when the loop is compiled, beside the sizes of the state."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jax import Array

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import check
from jaxpaged.config import PREFILL_TILE, LogprobsMode
from jaxpaged.contracts.attentions import Attention
from jaxpaged.contracts.processors import Processor
from jaxpaged.contracts.samplers import Sampler
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.grouping import Grouping, one_group
from pallas_kernels.ops import TiledImplementation

# Maximum of steps in one run of the loop, and so of tokens per row in one report.
MAX_STEPS = 32


@dataclass(frozen=True)
class Lookup:
    """Drafts from a row's own tokens, prompt and answer: what followed the longest end that occurs before."""

    most: int  # drafts of a row in one step
    longest: int  # tokens of the longest end that is looked for
    shortest: int


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts from a row's own tokens: what mostly followed the longest end that occurs before."""

    most: int  # drafts of a row in one step
    depth: int  # tokens of an end and of `most` drafts behind it
    factor: float  # drafts for each token of the end
    min_prob: float  # least share of the end's occurrences in which all drafts up to one followed
    past_tokens: int = 0  # tokens of past answers that are looked into, too

    @property
    def longest(self) -> int:
        """Tokens of the longest end that is looked for."""
        return self.depth - self.most


@dataclass(frozen=True)
class ByModel:
    """Options of drafts that a second model makes."""

    most: int  # drafts of a row in one step
    # Tokens of a prompt, for each token that may still come, that it computes to draft; None: any number.
    most_prompt: int | None = None


@dataclass(frozen=True)
class ByGrammar:
    """Options of drafts of text that a row's automaton forces, and of no others."""

    most: int  # drafts of a row in one step


type AnyLookup = Lookup | SuffixLookup | ByModel | ByGrammar

PARTS = 64  # of a step, in which costs of drafts are counted


@dataclass(frozen=True)
class DraftCost:
    """Cost of drafts, in parts of a step in which one row decodes."""

    row: int  # the slot that verifies a draft
    passes: int = 0  # what a model that drafts computes for one
    tile: int = 0  # and for a tile of a prompt, when it begins with a row

    def of[T: (int, Array)](self, num_rows: T) -> T:
        """Return the cost of one draft while `num_rows` rows decode, in parts of a row's share of the step.

        A right draft saves its row a step, and that is worth less the more rows share the step.
        """
        return self.passes + PARTS * self.row * num_rows // (PARTS + self.row * (num_rows - 1))


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Made of an `EngineConfig` and a model on a machine; each is compiled for itself."""

    max_num_seqs: int  # rows that run together
    num_tiles: int  # prompt tiles computed in one step
    tiles_per_pass: int  # tiles in one forward pass; a step may make several passes
    attention: TiledImplementation | Attention
    sampler: Sampler | None = None  # None: ours
    processors: tuple[Processor, ...] = ()  # of logits, from outside
    # Blocks that stay free when a request is admitted beside running ones; with several size classes a number
    # for each.
    watermark_blocks: int | tuple[int, ...] | Array = 0
    grouping: Grouping = field(default_factory=one_group)  # layers that share a block table
    reuse_answers: bool = False  # whether a prompt may hit blocks that were computed as an answer
    decode_widths: tuple[int, ...] = ()  # rows of narrower decode passes, rising; the widest has max_num_seqs
    rows_at_once: int | None = None  # whose tokens are chosen together; None: all
    lookup: AnyLookup | None = None  # how tokens are drafted; None: they are not
    most_drafting: int | None = None  # rows that run while drafts are made; None: any number
    draft_cost: DraftCost | None = None  # what may be lost by drafts follows from it; None: all
    logprobs_mode: LogprobsMode = "raw_logprobs"  # see `EngineConfig.logprobs_mode`

    def __post_init__(self) -> None:
        """Accept lists, as JSON makes them."""
        object.__setattr__(self, "decode_widths", tuple(self.decode_widths))
        if isinstance(self.watermark_blocks, list | tuple):
            marks, num_classes = tuple(self.watermark_blocks), self.grouping.num_classes
            rule = f"a number, or one for each of {num_classes} size classes"
            check("watermark_blocks", marks, rule, len(marks) == num_classes > 1)
            object.__setattr__(self, "watermark_blocks", marks)

    @property
    def keeps_sequence(self) -> bool:
        """Whether the first group, which reads most, keeps all blocks of a sequence."""
        return self.grouping.specs[0].most_kept(1) is None

    def blocks_of[T: (int, Array)](self, num_tokens: T, block_size: int) -> T:
        """Return how many blocks a row of `num_tokens` tokens holds at most at any time, in all groups."""
        total, *others = self.blocks_by_class(num_tokens, block_size)
        for more in others:
            total = total + more
        return total

    def blocks_by_class[T: (int, Array)](self, num_tokens: T, block_size: int) -> tuple[T, ...]:
        """Return the bound of `blocks_of` for each size class."""
        sums = []
        for size_class in range(self.grouping.num_classes):
            specs = [self.grouping.specs[group] for group in self.grouping.groups_of_class(size_class)]
            total, *others = [self._blocks_of(spec, num_tokens, block_size) for spec in specs]
            for more in others:
                total = total + more
            sums.append(total)
        return tuple(sums)

    def _blocks_of[T: (int, Array)](self, spec: CacheSpec, num_tokens: T, block_size: int) -> T:
        """Return the bound for one group; vLLM 0.33 caps the admission of a whole prompt in the same way."""
        blocks, kept = cdiv(num_tokens, block_size), spec.most_kept(self.num_tiles * PREFILL_TILE)
        if kept is None:
            return blocks
        max_blocks = cdiv(kept, block_size) + 1 + spec.first_blocks(block_size)
        return min(blocks, max_blocks) if isinstance(blocks, int) else jnp.minimum(blocks, max_blocks)

    def blocks_shared[T: (int, Array)](self, num_tokens: T, block_size: int) -> T | int:
        """Return how many full blocks of a row's first `num_tokens` tokens are sure to be kept.

        In a group with a window none is sure: blocks may have left it.
        """
        total, *others = self.shared_by_class(num_tokens, block_size)
        for more in others:
            total = total + more
        return total

    def shared_by_class[T: (int, Array)](self, num_tokens: T, block_size: int) -> tuple[T | int, ...]:
        """Return the number of `blocks_shared` for each size class."""
        specs = self.grouping.specs
        return tuple(
            self._shared(
                sum(specs[group].most_kept(1) is None for group in self.grouping.groups_of_class(each)),
                num_tokens,
                block_size,
            )
            for each in range(self.grouping.num_classes)
        )

    def _shared[T: (int, Array)](self, num_groups: int, num_tokens: T, block_size: int) -> T | int:
        """Return the number of full blocks of `num_tokens` tokens in `num_groups` groups."""
        if num_groups == 0:
            return 0
        of_one = num_tokens // block_size
        return of_one if num_groups == 1 else of_one * num_groups

    @property
    def groups_by_class(self) -> tuple[int, ...]:
        """Number of groups of each size class."""
        return tuple(len(self.grouping.groups_of_class(each)) for each in range(self.grouping.num_classes))

    def max_blocks_touched(self, block_size: int) -> int:
        """Return the most blocks that a step begins or fills in one group: one for each decoding row, and
        those of the prompt tiles.
        """
        return self.max_num_seqs + self.num_tiles * (cdiv(PREFILL_TILE, block_size) + 1)
