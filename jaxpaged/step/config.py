"""Configuration of a step: what is fixed when the loop is compiled, beside the sizes of the state."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.contracts.attentions import Attention
from jaxpaged.contracts.samplers import Sampler
from pallas_kernels.ops import TiledImplementation


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Made of an `EngineConfig` and a model on a machine; each is compiled for itself."""

    max_num_seqs: int  # rows that run together
    num_tiles: int  # prompt tiles computed in one step
    tiles_per_pass: int  # tiles in one forward pass; a step may make several passes
    attention: TiledImplementation | Attention
    sampler: Sampler | None = None  # None: ours
    watermark_blocks: int | Array = 0  # blocks that stay free when a request is admitted beside running ones
    sliding_window: int | None = None  # tokens
    reuse_answers: bool = False  # whether a prompt may hit blocks that were computed as an answer
    decode_widths: tuple[int, ...] = ()  # rows of narrower decode passes, rising; the widest has max_num_seqs

    def __post_init__(self) -> None:
        """Accept a list of widths, as JSON makes it."""
        object.__setattr__(self, "decode_widths", tuple(self.decode_widths))

    def blocks_of[T: (int, Array)](self, num_tokens: T, block_size: int) -> T:
        """Return how many blocks a row of `num_tokens` tokens holds at most at any time."""
        blocks = cdiv(num_tokens, block_size)
        if self.sliding_window is None:
            return blocks
        most = cdiv(self.sliding_window - 1 + self.num_tiles * PREFILL_TILE, block_size) + 1
        return min(blocks, most) if isinstance(blocks, int) else jnp.minimum(blocks, most)

    def max_blocks_touched(self, block_size: int) -> int:
        """Return how many blocks a step can begin or fill over all rows: one for each that decodes, and
        those of the prompt tiles.
        """
        return self.max_num_seqs + self.num_tiles * (cdiv(PREFILL_TILE, block_size) + 1)
