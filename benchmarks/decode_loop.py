"""The engine's loop with all rows decoding, ready to be timed.

The state is made, not computed: every row's prompt counts as being in the cache, its blocks taken and, with
prefix caching, findable. So a benchmark of long sequences begins at once.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE, EngineConfig
from jaxpaged.engine import gpu_flags
from jaxpaged.engine.setup import WATERMARK
from jaxpaged.memory import block_table
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.grouping import Grouping, one_group
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.status import raise_if_error
from jaxpaged.step import admission, loop
from jaxpaged.step.config import MAX_STEPS, StepConfig
from jaxpaged.step.features import NO_FEATURES, Features
from jaxpaged.step.model import Model
from jaxpaged.step.state import (
    Counter,
    EngineState,
    Phase,
    Rows,
    create_state,
    create_tables,
    empty_rows,
)
from pallas_kernels.ops import TiledImplementation

BLOCK_SIZE = 16
PREFILL_TOKENS = 512  # a step's budget for prompts, of which these rows have none left


def has_flags() -> bool:
    """Return whether XLA_FLAGS has what the package sets on a GPU."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return all(f"--{name}={value}" in flags for name, value in gpu_flags.FLAGS.items())


@dataclasses.dataclass
class DecodeLoop:
    """Owns a state whose rows decode, `seq_lens[i]` tokens of each in the cache at first."""

    model: Model
    state: EngineState
    config: StepConfig
    num_seqs: int
    vocab_size: int

    def __post_init__(self) -> None:
        self.graphdef, self.params = nnx.split(self.model)
        self.rng = np.random.default_rng(1)

    def submit(self, num_requests: int) -> None:
        """Let so many requests wait, for the slots that are left: one step each, from admission to freeing.

        Their first 64 tokens are in the prefix cache when one of them has been computed; 32 are new.
        """
        number = np.arange(num_requests)
        token_ids = np.tile(np.arange(1, 64 + 32 + 1), (num_requests, 1))
        token_ids[:, 64:] = self.rng.integers(1, 100, (num_requests, 32))
        fields: dict[str, Any] = {
            "phase": np.full(num_requests, Phase.WAITING),
            "arrival": self.state.tables.max_seqs + number,
            "token_ids": token_ids,
            "prompt_lens": np.full(num_requests, 64 + 32),
            "num_tokens": np.full(num_requests, 64 + 32),
            "max_num_tokens": np.full(num_requests, 64 + 32 + 1),
        }
        fields = {name: value.astype(np.int32) for name, value in fields.items()}
        requests = dataclasses.replace(empty_rows(num_requests, 0, self.vocab_size), **fields)
        self.state = loop.submit(self.state, requests, (self.num_seqs + number).astype(np.int32))

    def seconds_per_step(self, num_steps: int = MAX_STEPS, num_requests: int = 0) -> float:
        """Run so many steps and wait for them.

        Raises if a row did anything but decode one token in each, and so many requests were answered.
        """
        before = jax.device_get(self.state.counters)
        start = time.perf_counter()
        self.state, report = loop.run(
            self.graphdef,
            self.params,
            self.state,
            loop.limits(num_steps),
            np.bool_(False),
            config=self.config,
        )
        jax.block_until_ready(report)
        seconds = time.perf_counter() - start
        raise_if_error(int(report.status))
        counted = np.asarray(report.counters) - before
        done = {counter.name: n for counter, n in zip(Counter, counted.tolist(), strict=True) if n}
        tokens = num_steps * self.num_seqs
        wanted = {
            "NUM_STEPS": num_steps,
            "NUM_DECODE_TOKENS": tokens,
            "NUM_NEW_TOKENS": tokens + num_requests,
        }
        if num_requests:
            done = {name: n for name, n in done.items() if name in wanted}
        if done != wanted:
            raise RuntimeError(f"the loop made {done}, must make {wanted}")
        return seconds / num_steps


def create(
    model: Model,
    kv_cache: KVCache,
    *,
    num_blocks: int,
    seq_lens: Sequence[int],
    max_model_len: int,
    prefix_caching: bool,
    attention: TiledImplementation,
    free_slots: int = 0,
    grouping: Grouping | None = None,
    features: Features = NO_FEATURES,
) -> DecodeLoop:
    """Create a row for each of `seq_lens`, in a pool with blocks for `max_model_len` tokens each.

    `free_slots` more could run beside them. Without a grouping all layers are one group.
    """
    grouping = grouping or one_group()
    num_seqs = len(seq_lens)
    max_num_seqs = num_seqs + free_slots
    hidden = jax.ShapeDtypeStruct((max_num_seqs, model.hidden_size), model.dtype)
    vocab_size = jax.eval_shape(model.logits, hidden).shape[1]
    num_rows = EngineConfig(max_num_seqs=max_num_seqs).num_rows
    tables = create_tables(
        num_blocks,
        num_rows,
        cdiv(max_model_len, BLOCK_SIZE),
        BLOCK_SIZE,
        prefix_caching=prefix_caching,
        num_groups=grouping.num_groups,
    )

    rng = np.random.default_rng(0)
    lens = np.zeros(num_rows, np.int32)
    lens[:num_seqs] = seq_lens
    rows = empty_rows(num_rows, max_model_len, vocab_size, features)
    fields: dict[str, Any] = {
        "phase": np.where(lens > 0, Phase.RUNNING, Phase.EMPTY),
        "arrival": np.arange(num_rows),
        "token_ids": np.where(
            np.arange(max_model_len) <= lens[:, None], rng.integers(1, 100, (num_rows, max_model_len)), 0
        ),
        "prompt_lens": lens,
        "num_tokens": lens + 1,  # with the answer's first, whose K and V are not in the cache yet
        "max_num_tokens": np.full(num_rows, max_model_len),
    }
    rows = dataclasses.replace(rows, **{name: value.astype(np.int32) for name, value in fields.items()})
    state = create_state(tables, kv_cache, max_model_len, vocab_size, on=features)
    state = loop.submit(state, rows, np.arange(num_rows, dtype=np.int32))
    num_tiles = PREFILL_TOKENS // PREFILL_TILE
    config = StepConfig(
        max_num_seqs=max_num_seqs,
        num_tiles=num_tiles,
        tiles_per_pass=num_tiles,
        attention=attention,
        watermark_blocks=int(WATERMARK * num_blocks),
        grouping=grouping,
    )
    max_blocks = sum(cdiv(n, BLOCK_SIZE) for n in seq_lens)
    tables = _fill(state.tables, state.rows, lens, config=config, max_blocks=max_blocks)
    return DecodeLoop(model, dataclasses.replace(state, tables=tables), config, num_seqs, vocab_size)


@functools.partial(jax.jit, static_argnames=("config", "max_blocks"))
def _fill(
    tables: BlockTables, rows: Rows, seq_lens: jax.Array, *, config: StepConfig, max_blocks: int
) -> BlockTables:
    """Let every row have its tokens in the cache, and its full blocks findable."""
    most = max_blocks * tables.num_groups
    tables, _ = block_table.append(tables, seq_lens, max_new_blocks=most)
    if tables.pool.prefix_cache is None:
        return tables
    keys = functools.partial(admission.cache_keys, rows, config=config)
    tables, _ = block_table.cache_full_blocks(tables, keys, seq_lens, max_blocks=max_blocks)
    return tables
