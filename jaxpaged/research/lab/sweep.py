"""Hit rates of caches of several sizes, under several policies, with blocks of several sizes."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import next_power_of_two
from jaxpaged.checks import INT32_MAX, InputError
from jaxpaged.memory.cache_specs import FULL, CacheSpec
from jaxpaged.memory.entries import CHUNK
from jaxpaged.memory.greedy_dual import ATTENTION_TOKENS
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.policies import Policy, sized
from jaxpaged.research.lab import belady, loop
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.decoders import LLAMA_8B, Decoder, InBlocks, blocks_in
from jaxpaged.research.lab.threads import Programs, side_by_side
from jaxpaged.research.lab.traces import Blocks, Trace, blocks
from jaxpaged.status import Status, raise_if_error

LIFETIME_EDGES_S = 2.0 ** np.arange(loop.LIFETIMES) / 1000
STEP_TOKENS = 2048  # of a prompt that are computed at once, where layers read different tokens
REQUESTS_A_CALL = 256  # requests in one compiled call; progress is reported between calls
NUM_WAITING = 16  # requests that wait while one is served, for a policy that asks


@dataclass(frozen=True)
class Result:
    """Result of one combination."""

    combination: Combination
    num_usable: int  # blocks of the cache
    hit_tokens: np.ndarray  # [requests]
    input_tokens: np.ndarray  # [requests]
    num_counted: int  # requests after the warm-up: the last so many
    lifetimes: np.ndarray  # evicted blocks whose content was there for less than each of LIFETIME_EDGES_S
    num_oversized: int  # requests whose prompt is larger than the cache: only its beginning is kept

    @property
    def counted(self) -> tuple[int, int]:
        """Hit tokens and input tokens of the requests after the warm-up."""
        first = len(self.hit_tokens) - self.num_counted
        return int(self.hit_tokens[first:].sum()), int(self.input_tokens[first:].sum())

    @property
    def hit_rate(self) -> float:
        hit_tokens, input_tokens = self.counted
        return hit_tokens / input_tokens

    @property
    def saved_compute(self) -> float:
        """Share of the prompts' computation that the hits save: a later token costs more than an earlier one.

        Attention over `ATTENTION_TOKENS` tokens counts as much as all else that a token costs: that is a
        model of Llama 3.1 8B's shape.
        """
        counted = slice(len(self.hit_tokens) - self.num_counted, None)
        saved, all = (
            (tokens + tokens.astype(np.float64) ** 2 / (2 * ATTENTION_TOKENS)).sum()
            for tokens in (self.hit_tokens[counted], self.input_tokens[counted])
        )
        return float(saved / all)

    def line(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        hit_tokens, input_tokens = self.counted
        return {
            **asdict(self.combination),
            "hit_rate": self.hit_rate,
            "saved_compute": self.saved_compute,
            "num_requests": self.num_counted,
            "num_warmup_requests": len(self.hit_tokens) - self.num_counted,
            "hit_tokens": hit_tokens,
            "input_tokens": input_tokens,
            "num_blocks": self.num_usable,
            "num_oversized_requests": self.num_oversized,
        }


def sweep(
    trace: Trace,
    combinations: Sequence[Combination],
    *,
    warmup: float = 0.5,
    partial: bool = False,
    resident: int = 1,
    decoder: Decoder = LLAMA_8B,
    progress: Callable[[int], object] = lambda num_requests: None,
) -> Iterator[Result]:
    """Send the trace through each cache, several at a time, and give the results in order.

    `warmup` is the share of the requests, the first ones, that fill the cache and are not counted; `partial`
    as in `traces.blocks`; the last `resident` requests hold their blocks at the same time; `progress` gets
    how many requests have gone through, from several threads. Of the decoder only what its layers read
    counts: where they differ, each kind has a block table, but in combinations with `one_table`.
    Raises `InputError`.
    """
    num_counted = trace.num_requests - int(trace.num_requests * warmup)
    if num_counted == 0:
        raise InputError(f"warmup={warmup} must leave some of the {trace.num_requests} requests to count")
    belady.trace_anew(each.policy for each in combinations)
    for block_size, group in itertools.groupby(combinations, lambda each: each.block_size):
        cut = BlockTrace(trace, blocks(trace, block_size, partial=partial), [*group], resident, decoder)
        send = functools.partial(cut.send, num_counted=num_counted, progress=progress)
        yield from side_by_side(send, cut.group)


class BlockTrace:
    """Trace divided into blocks of one size, on the device: its caches have one program for each policy."""

    def __init__(
        self,
        trace: Trace,
        blocks: Blocks,
        group: Sequence[Combination],
        resident: int,
        decoder: Decoder = LLAMA_8B,
    ) -> None:
        self.trace, self.blocks, self.group, self.resident = trace, blocks, group, resident
        self.decoder, self.programs = decoder, Programs()
        # No more than this is ever held or findable: as good as without end. It is of one group.
        self.enough = blocks.num_distinct + resident * int(blocks.num_held.max())
        # Sizes are rounded up, so that few programs serve all traces and block sizes.
        self.num_blocks = next_power_of_two(1 + max(self.usable(each) for each in group))
        self.max_blocks = next_power_of_two(int(blocks.num_held.max()))
        if self.num_blocks > INT32_MAX // 4:
            raise InputError(f"block_size={blocks.block_size} must be larger: {self.num_blocks:,} blocks")
        padding = next_power_of_two(len(blocks.symbols)) - len(blocks.symbols)
        self.symbols = jnp.asarray(np.pad(blocks.symbols, (0, padding)))
        self.next_use = None
        if any(each.policy == belady.BELADY.name for each in group):
            self.next_use = jnp.asarray(np.pad(belady.next_use(blocks), (0, padding)))

    def grouping(self, combination: Combination) -> Grouping:
        return self.decoder.grouping(one_table=combination.one_table)

    def kinds(self, combination: Combination) -> tuple[CacheSpec, ...]:
        """Return the cache spec of each group of layers, in blocks; empty if all layers read everything."""
        specs = self.grouping(combination).specs
        return () if specs == (FULL,) else tuple(InBlocks(spec, self.blocks.block_size) for spec in specs)

    def usable(self, combination: Combination) -> int:
        grouping, size = self.grouping(combination), self.blocks.block_size
        enough = self.enough * grouping.num_groups
        if combination.cache_tokens is None:
            return enough
        return min(blocks_in(combination.cache_tokens, size, self.decoder, grouping), enough)

    def holds(self, combination: Combination) -> int:
        """Return how many blocks a prompt may have for the cache to hold what its groups need at once."""
        usable, kinds = self.usable(combination), self.kinds(combination)
        if not kinds:
            return usable
        count = np.arange(int(self.blocks.num_held.max()) + 1)
        need = loop.most_held(count, kinds, self.step_blocks)
        return int(np.searchsorted(need, usable, side="right")) - 1

    @property
    def step_blocks(self) -> int:
        """Blocks of a prompt that are computed at once."""
        return min(max(STEP_TOKENS // self.blocks.block_size, 1), CHUNK)

    def policy(self, combination: Combination) -> Policy:
        """Return a combination's policy, for blocks of this size."""
        return sized(belady.named(combination.policy), self.blocks.block_size)

    def create(self, combination: Combination) -> loop.Cache:
        """Create an empty cache for a combination."""
        return loop.create(
            self.usable(combination),
            policy=self.policy(combination),
            num_blocks=self.num_blocks,
            max_blocks=self.max_blocks,
            num_rows=self.resident,
            kinds=self.kinds(combination),
        )

    def send(self, combination: Combination, num_counted: int, progress: Callable[[int], object]) -> Result:
        usable, cache = self.usable(combination), self.create(combination)
        next_use = self.next_use if combination.policy == belady.BELADY.name else None
        hits = []
        asks, kinds = self.policy(combination).note_waiting is not None, self.kinds(combination)
        if kinds and next_use is not None:
            raise InputError("policy='belady' must be of one block table, for layers that read everything")
        held = self.holds(combination)
        for requests, count in self.calls(held, num_waiting=NUM_WAITING if asks else 0):
            if kinds:
                name = combination.policy, "kinds"
                cache, hit = self.programs.call(
                    name,
                    loop.replay,
                    cache,
                    self.symbols,
                    next_use,
                    requests,
                    kinds=kinds,
                    step_blocks=self.step_blocks,
                )
            else:
                cache, hit = self.programs.call(
                    combination.policy, loop.replay, cache, self.symbols, next_use, requests
                )
            hits.append(np.asarray(hit)[:count])
            progress(count)
        raise_if_error(Status(int(cache.status)))
        hit_tokens = self.blocks.hit_tokens(np.concatenate(hits), self.trace.input_lens)
        oversized = int((self.blocks.num_held > held).sum())
        lifetimes = np.asarray(cache.lifetimes)
        return Result(
            combination, usable, hit_tokens, self.trace.input_lens, num_counted, lifetimes, oversized
        )

    def calls(self, usable: int, num_waiting: int = 0) -> Iterator[tuple[loop.Requests, int]]:
        """Yield the requests of each call; the last call is filled up with requests that hold nothing.

        With each request come the `num_waiting` after it.
        """
        held = np.minimum(self.blocks.num_held, usable)  # a larger prompt holds its beginning only
        findable, lookup = (
            np.minimum(each, held) for each in (self.blocks.num_findable, self.blocks.num_lookup)
        )
        arrival = np.minimum(1000 * self.trace.arrival_s, INT32_MAX - 1)
        lines = np.stack([self.blocks.starts, findable, lookup, held, arrival]).astype(np.int32)
        for first in range(0, self.trace.num_requests, REQUESTS_A_CALL):
            some = lines[:, first : first + REQUESTS_A_CALL]
            padded = np.pad(some, ((0, 0), (0, REQUESTS_A_CALL - some.shape[1])))
            waiting = None
            if num_waiting:
                ahead = first + 1 + np.arange(REQUESTS_A_CALL)[:, None] + np.arange(num_waiting)
                later = np.pad(lines[[0, 2]], ((0, 0), (0, int(ahead.max()) + 1)))
                waiting = jnp.asarray(np.moveaxis(later[:, ahead], 0, -1))
            yield replace(loop.Requests(*jax.device_put(padded)), waiting=waiting), some.shape[1]
