"""Random mixes of kinds of layers through one compiled step, in lock-step with the engine's oracle.

Windows and chunks are data of the program, so a few programs serve all mixes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import kv_cache
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkedLocal, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.step import admission
from jaxpaged.step.step import step
from tests.step.lockstep import Event, LockStep, Request, Setting
from tests.step.sum_model import LOGITS, VOCAB
from tests.step.workloads import workloads

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.nightly]


class Bounded(CacheSpec):
    """Kind of layer whose size is a traced number: `kind` makes what it is a kind of."""

    def __init__(self, kind: Any, size: jax.Array) -> None:
        self.kind, self.size = kind, size

    def first_read(self, num_tokens: Any) -> Any:
        if self.kind is SlidingWindow:
            return jnp.maximum(num_tokens + 1 - self.size, 0)
        return num_tokens // self.size * self.size

    def most_kept(self, num_in_flight: int) -> Any:
        return self.size - 1 + num_in_flight


class SumOfAll(nnx.Module):
    """`SumModel` by an attention of its own, which takes bounds that are traced."""

    hidden_size = VOCAB
    dtype = jnp.dtype("float32")

    def __init__(self, specs: tuple[Any, ...]) -> None:
        self.specs = specs

    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any, batch: Any) -> Any:
        value = jnp.broadcast_to(token_ids[:, None, None], (token_ids.shape[0], 1, 2)).astype(jnp.float32)
        tile = jnp.arange(positions.shape[0]) // batch.tile_len
        total = jnp.zeros_like(positions)
        for group, spec in enumerate(self.specs):
            cache = kv_cache.write(cache, 0, value, value, batch.slot_mapping[group])
            lines = batch.block_tables[batch.rows_of(group)]
            seen = jax.vmap(lambda ids, cache=cache: cache.pool(0).read(ids, cache.dtype)[1][..., 0, 0])(
                lines
            )
            seen = seen.reshape(len(lines), -1)[tile]
            place = jnp.arange(seen.shape[1])
            is_read = (place >= spec.first_read(positions)[:, None]) & (place <= positions[:, None])
            total += jnp.sum(jnp.where(is_read, seen, 0), axis=1).astype(jnp.int32)
        return jax.nn.one_hot(total % VOCAB, VOCAB), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ jnp.asarray(LOGITS, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Mix(Setting):
    """Setting whose windows and chunks are data of the program."""

    @property
    def sizes(self) -> jax.Array:
        return jnp.array([getattr(s, "window", getattr(s, "chunk", 0)) for s in self.specs], jnp.int32)

    @property
    def program(self) -> "Mix":
        """The setting of a program: that with any other sizes has the same."""
        specs = tuple(spec if spec == FULL else type(spec)(1) for spec in self.specs)
        return dataclasses.replace(self, specs=specs)

    def advance(self, state: Any) -> Any:
        return programs(self.program)[0](state, self.sizes)

    def find(self, state: Any, row: jax.Array) -> Any:
        return programs(self.program)[1](state, row, self.sizes)


@functools.cache
def programs(mix: Mix) -> tuple[Any, Any]:
    """Return the compiled step, and the compiled search for what is cached."""

    def of(sizes: jax.Array) -> Any:
        kinds = [spec if spec == FULL else Bounded(type(spec), sizes[i]) for i, spec in enumerate(mix.specs)]
        grouping = Grouping(tuple(kinds), tuple((layer,) for layer in range(len(kinds))))
        return tuple(kinds), dataclasses.replace(mix.config, grouping=grouping)

    def advance(state: Any, sizes: jax.Array) -> Any:
        kinds, config = of(sizes)
        return step(SumOfAll(kinds), state, config)

    def find(state: Any, row: jax.Array, sizes: jax.Array) -> Any:
        return admission.find_prompt(state, row, of(sizes)[1]).block_ids

    return jax.jit(advance), jax.jit(find)


SIZES = st.one_of(st.integers(1, 12), st.integers(1, 60))
FULL_AND_TWO = Mix(
    "full, window, chunk", num_blocks=1 + 40, num_tiles=1, num_host_blocks=1 + 16, specs=(FULL,) * 3
)
BOUNDED = Mix("two windows", num_blocks=1 + 20, num_tiles=2, reuse_answers=True)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    if draw(st.booleans()):
        specs = FULL, SlidingWindow(draw(SIZES)), ChunkedLocal(draw(SIZES))
        return dataclasses.replace(FULL_AND_TWO, specs=specs)
    narrow, wide = sorted((draw(SIZES), draw(SIZES)))
    return dataclasses.replace(BOUNDED, specs=(SlidingWindow(wide), SlidingWindow(narrow)))


def work(request: Request) -> int:
    """Return the steps that a request takes alone."""
    prompt_len = len(request.prompt)
    return cdiv(prompt_len, PREFILL_TILE) + request.max_num_tokens - prompt_len - 1


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_is_the_oracles_and_nobody_waits_for_ever(data: st.DataObject) -> None:
    """The first prompt is as long as the door lets in: more than one table would hold."""
    mix = data.draw(mixes())
    priorities = data.draw(st.booleans())
    events = data.draw(workloads(mix, priorities=priorities))
    first = Request(0, tuple(i % VOCAB for i in range(mix.longest - 1)), mix.longest)
    lock = LockStep(mix)
    lock.run([Event((first,)), *events])
    asked = [first, *(request for event in events for request in event.requests)]
    if not priorities:
        assert lock.num_steps <= len(events) + 1 + sum(map(work, asked))
    row = next(row for row in lock.oracle.rows if row is not None)
    assert row.finish_reason is not None


@pytest.mark.parametrize("window", [3, 17])
def test_a_prompt_is_admitted_that_one_table_would_not_hold(window: int) -> None:
    mix = dataclasses.replace(FULL_AND_TWO, specs=(FULL, SlidingWindow(window), ChunkedLocal(8)))
    num_tokens = mix.longest - 1
    of_one_table = cdiv(num_tokens, mix.block_size) * len(mix.specs)
    assert of_one_table > mix.num_blocks - 1 >= mix.config.blocks_of(num_tokens, mix.block_size)
    lock = LockStep(mix)
    lock.happen(Event((Request(1, tuple(i % VOCAB for i in range(num_tokens)), mix.longest),)))
    lock.step()
    assert lock.num_computed > 0
    lock.run([])
    assert lock.num_computed == num_tokens
