"""Small worlds: a few requests, a few blocks, and a model that repeats what it reads from the cache."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import kv_cache
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.step import scheduler
from jaxpaged.step.config import Lookup, StepConfig
from jaxpaged.step.feature_values import DraftSizes
from jaxpaged.step.features import NO_FEATURES, Features
from jaxpaged.step.state import (
    EngineState,
    HostPool,
    Phase,
    create_state,
    create_tables,
    empty_rows,
    place_requests,
)
from jaxpaged.step.step import step

VOCAB = 5


@dataclass(frozen=True)
class Ask:
    """Request of a world; it arrives at any time, once."""

    prompt: tuple[int, ...]
    max_num_tokens: int  # length at which it ends
    priority: int = 0
    salt: int = 0


@dataclass(frozen=True)
class World:
    """World to explore. Blocks are those that can be held: the null block comes in addition."""

    asks: tuple[Ask, ...]
    num_blocks: int
    num_host_blocks: int = 0  # 0: preempted rows are recomputed
    max_num_seqs: int = 2
    block_size: int = 2
    prefix_caching: bool = True
    aborts: bool = True  # whether the host may abort a request at any time
    most_drafts: int = 0  # drafts of a row in one step, from what followed its last token before

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(ask.max_num_tokens for ask in self.asks)

    @property
    def config(self) -> StepConfig:
        """Return the static configuration of the step."""
        lookup = Lookup(most=self.most_drafts, longest=1, shortest=1) if self.most_drafts else None
        return StepConfig(
            max_num_seqs=self.max_num_seqs, num_tiles=1, tiles_per_pass=1, attention="xla", lookup=lookup
        )

    @property
    def features(self) -> Features:
        """Return the optional features of rows: drafts, if the world has them."""
        return Features.on(drafts=DraftSizes(self.most_drafts)) if self.most_drafts else NO_FEATURES

    def state(self) -> EngineState:
        """Return the state before the first event."""

        def parts(num_blocks: int, *, caches: bool) -> tuple[Any, KVCache]:
            line = cdiv(self.max_model_len, self.block_size)
            tables = create_tables(
                num_blocks + 1, len(self.asks), line, self.block_size, prefix_caching=caches
            )
            return tables, kv_cache.create(1, num_blocks + 1, self.block_size, 1, 2, jnp.dtype("float32"))

        host = None
        if self.num_host_blocks:
            host = HostPool(*parts(self.num_host_blocks, caches=False))
        tables, cache = parts(self.num_blocks, caches=self.prefix_caching)
        return create_state(tables, cache, self.max_model_len, VOCAB, host, self.features)

    def answer(self, ask: Ask) -> list[int]:
        """Return a request's tokens to the end, as it gets them alone."""
        tokens = list(ask.prompt)
        while len(tokens) < ask.max_num_tokens:
            tokens.append(next_token(tokens))
        return tokens


def next_token(tokens: list[int]) -> int:
    """Return the token behind these: their sum, each times its place counted from 1, modulo VOCAB."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) % VOCAB


class Reader:
    """Model whose next token follows from the slots that a row's block table names, and from nothing else.

    A slot keeps a token and its position, each counted from 1, in the place of K and V: 0 was never written.
    """

    hidden_size = VOCAB
    dtype = jnp.dtype("float32")

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, cache: KVCache, batch: PassBatch
    ) -> tuple[jax.Array, KVCache]:
        name = slots_name(cache)
        array = cache.blocks[name]
        slots = array.reshape(-1, array.shape[-1])
        new = jnp.stack([token_ids + 1, positions + 1], axis=1).astype(slots.dtype)
        slots = slots.at[batch.slot_mapping].set(new)
        tables = batch.block_tables if batch.table_rows is None else batch.block_tables[batch.table_rows]
        each = jnp.arange(cache.block_size)
        at = (tables[:, :, None] * cache.block_size + each).reshape(tables.shape[0], -1)
        read = slots[at].astype(jnp.int32)  # [num_tiles, places, 2]
        terms = jnp.cumsum((read[..., 0] - 1) * read[..., 1], axis=1)
        of_tile = jnp.repeat(terms, token_ids.shape[0] // tables.shape[0], axis=0)
        total = of_tile[jnp.arange(token_ids.shape[0]), positions]
        return jax.nn.one_hot(total % VOCAB, VOCAB), replace(
            cache, blocks=cache.blocks | {name: slots.reshape(array.shape)}
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden


def slots_name(cache: KVCache) -> str:
    """Return the name of the array that serves as slots: the last one, of shape [blocks, ..., 2]."""
    return sorted(cache.blocks)[-1]


FIXED = (".scores", ".rows.sampling", ".rows.rules", ".rows.features", ".counters")
# A step under `vmap` is large, and compiling it with all passes takes a minute.
QUICK_TO_COMPILE: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass
class Programs:
    """Compiled events of a world, each over a batch of states. States are lists of the leaves that vary."""

    world: World
    start: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        world, state = self.world, self.world.state()
        paths, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self._leaves = [np.asarray(leaf) for _, leaf in paths]
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        self._varying = [i for i, name in enumerate(names) if not name.startswith(FIXED)]
        self.start = [self._leaves[i] for i in self._varying]
        lines = empty_rows(len(world.asks), world.max_model_len, VOCAB, world.features)
        for i, ask in enumerate(world.asks):
            for array, value in (
                (lines.phase, Phase.WAITING),
                (lines.priority, ask.priority),
                (lines.salt, ask.salt),
                (lines.prompt_lens, len(ask.prompt)),
                (lines.num_tokens, len(ask.prompt)),
                (lines.max_num_tokens, ask.max_num_tokens),
            ):
                np.asarray(array)[i] = value
            np.asarray(lines.token_ids)[i, : len(ask.prompt)] = ask.prompt

        def arrive(leaves: list[jax.Array], row: jax.Array) -> list[jax.Array]:
            state = self.state(leaves)
            line = jax.tree.map(lambda x: jnp.asarray(x)[row][None], lines)
            line = replace(line, arrival=jnp.max(state.rows.arrival)[None] + 1)
            return self._part(place_requests(state, line, row[None]))

        def abort(leaves: list[jax.Array], row: jax.Array) -> list[jax.Array]:
            state = self.state(leaves)
            return self._part(scheduler.abort(state, state.rows.arrival[row][None]))

        def advance(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            state, decision = step(Reader(), self.state(leaves), world.config)
            plan = decision.plan.num_new_tokens
            reported = [
                decision.admitted,
                decision.preempted,
                decision.swapped,
                plan,
                decision.num_hit_blocks,
            ]
            return self._part(state), reported

        self.arrive, self.abort = jax.jit(jax.vmap(arrive)), jax.jit(jax.vmap(abort))
        self.advance = jax.jit(jax.vmap(advance), compiler_options=QUICK_TO_COMPILE)

    def state(self, leaves: list[Any]) -> EngineState:
        """Return the state with these varying leaves."""
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        every: list[Any] = [jnp.asarray(leaf) if is_traced else leaf for leaf in self._leaves]
        for i, leaf in zip(self._varying, leaves, strict=True):
            every[i] = leaf
        return jax.tree_util.tree_unflatten(self._tree, every)

    def _part(self, state: EngineState) -> list[jax.Array]:
        leaves = jax.tree.leaves(state)
        return [leaves[i] for i in self._varying]


_SHARED = Ask((1, 2, 3), 5), Ask((1, 2, 4, 1), 6)
WORLDS = {
    "two": World(_SHARED, 4),
    "three": World((*_SHARED, Ask((2,), 4)), 4),
    "side by side": World((*_SHARED, Ask((2,), 4)), 5, max_num_seqs=3),
    "priorities": World((Ask((1, 2, 3), 5, priority=1), Ask((1, 2, 4, 1), 6), Ask((2,), 4, priority=1)), 4),
    "swap": World((*_SHARED, Ask((2,), 4)), 4, num_host_blocks=3),
    "four": World((*_SHARED, Ask((2,), 4), Ask((1, 2, 3, 1, 1), 8)), 5, max_num_seqs=3),
    "drafts": World((Ask((1, 4, 2, 3), 9), Ask((1, 4, 2), 7)), 6, most_drafts=2),
    "twins": World((Ask((1, 2, 3), 6), Ask((1, 2, 3), 6), Ask((2,), 4)), 4),
    "salts": World((Ask((1, 2, 3), 5), Ask((1, 2, 3), 5, salt=1), Ask((1, 2, 3, 1, 1), 7)), 4),
}
