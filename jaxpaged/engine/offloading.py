"""Offloading: the part of a driver that keeps prompts' blocks in tiers below the device, and fetches them.

The compiled loop knows nothing of tiers. Between two runs, blocks of prompts that have been computed are
copied into the tiers, before others can take their places. A request's blocks that lie below host memory are
read while other rows run. The request waits for them, but no longer than they would take to compute. When it
gets a row, what host memory has of its prompt behind the device's own hit is written to free blocks, as
blocks of a finished request: so the loop finds them. What fails is a miss.
"""

import dataclasses
import time
from collections.abc import Collection, Sequence

import jax
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.engine.pace import Pace
from jaxpaged.engine.passing import Passing
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.residence import KV_CACHE, MEMORY
from jaxpaged.handover import exchange
from jaxpaged.tiers import groups, keys, tiers
from jaxpaged.tiers.rule import Rule
from jaxpaged.tiers.tiers import HOST, Promotion, Tiers

IDLE_SECONDS = 0.002  # of a turn in which there is nothing to do but to wait for blocks


@dataclasses.dataclass
class Arrival:
    """Requests of one prompt that wait for its blocks."""

    promotion: Promotion
    waiting: list[tuple[Request, Sequence[int]]]


class Offloading(Passing):
    """The part of a driver that stores blocks in tiers and fetches them, where options name any."""

    pace: Pace
    tiers: Tiers | None = None

    def open_tiers(self) -> None:
        """Open what options name, once. Raises `InputError` for blocks that cannot travel."""
        size = self.config.kv_offloading_size
        self._unkept: dict[int, Request] = {}  # requests whose prompts have not been stored
        self._arrivals: dict[int, Arrival] = {}  # by the number of a prompt's first request
        self._promoted: dict[int, set[BlockKey]] = {}  # blocks that were read from below, by request
        self._fetched: dict[int, dict[str, int]] = {}  # tokens fetched from each tier, by request
        self._adapters: dict[int, bytes] = {}  # digests of adapters, by their numbers
        self._space = b""
        self.rule = Rule()
        if size is not None:
            self._space = keys.space_of(self.block_format)
            its = self.config.kv_offloading_backend, self.config.kv_offloading_disk_size
            self.tiers = tiers.opened(size, *its)
            self.stats = dataclasses.replace(self.stats, tiers=self.tiers.counts)
            self._compile_copies()

    def _compile_copies(self) -> None:
        """Compile what copies blocks, so that no measurement counts that; nothing is copied."""
        specs, size = self.step_config.grouping.specs, self.config.block_size
        nothing, present = np.zeros((0, size), np.int32), np.zeros((len(specs), 0), bool)
        exchange.locate(self._state, nothing.reshape(-1), 0, specs, self._mesh)
        reservation = exchange.reserve(self._state, nothing, present, 0, self._mesh)
        assert reservation is not None
        ids = np.zeros(exchange.chunk_size(self._state.kv_cache), np.int32)
        exchange.read_ids(self._state, ids, self._mesh)
        [chunk] = exchange.gathered([None], self._state.kv_cache, self._mesh)
        self._state = exchange.written(self._state, ids, chunk, self._mesh)

    def close_tiers(self) -> None:
        """Finish what is to be written. Nothing is stored or fetched from then on."""
        if self.tiers is not None:
            its, self.tiers = self.tiers, None
            its.close()

    @property
    def has_arrivals(self) -> bool:
        """Whether any request waits for blocks."""
        return bool(self._arrivals)

    def forget_tiers(self) -> None:
        """Forget what the tiers have of this engine's model."""
        if self.tiers is not None:
            self.tiers.clear(self._current_space())

    def arrives(self, request: Request, answer: Sequence[int]) -> bool:
        """Take a new request if it is to wait for blocks from below host memory; False: it is not."""
        if self.tiers is None:
            return False
        first = request.request_id - request.index
        if first in self._arrivals:  # the others of its prompt wait with it
            self._arrivals[first].waiting.append((request, answer))
            return True
        if request.index or not self._may_hit(request):
            return False
        wanted = self._keys(request, spare=1)
        for its in self.tiers.counts.values():
            its.num_queries += len(wanted)
        num_found = self.tiers.found(wanted)
        below = self.tiers.below_only(wanted[:num_found])
        if not below or KV_CACHE not in self.resident:
            return False
        num_here = len(self._locate(request).token_ids)
        below = [key for key in below if key in wanted[num_here:num_found]]
        seconds = self._compute_seconds(num_found - num_here)
        num_bytes = exchange.block_bytes(self._state.kv_cache)
        if not below or not self.rule.pays(
            seconds, (num_found - num_here) * num_bytes, len(below) * num_bytes
        ):
            return False
        promotion = self.tiers.promote(below, time.monotonic() + self.rule.wait(seconds))
        self._arrivals[first] = Arrival(promotion, [(request, answer)])
        return True

    def release_arrivals(self, *, is_idle: bool) -> None:
        """Queue the requests whose blocks have come, or whose time is over. An idle driver waits a little."""
        if is_idle and self._arrivals:
            next(iter(self._arrivals.values())).promotion.done.wait(IDLE_SECONDS)
        for first in [first for first, its in self._arrivals.items() if its.promotion.is_over]:
            arrival = self._arrivals.pop(first)
            promotion, self._promoted[first] = arrival.promotion, set(arrival.promotion.promoted)
            if promotion.promoted:
                num_bytes = len(promotion.promoted) * exchange.block_bytes(self._state.kv_cache)
                self.rule.below.note(num_bytes, time.monotonic() - promotion.began)
            for request, answer in arrival.waiting:
                self.queue.add(request, answer)

    def drop_arrivals(self, request_ids: Collection[int]) -> list[Request]:
        """Forget the requests with these numbers, and return those that waited for blocks."""
        gone = []
        for first, arrival in [*self._arrivals.items()]:
            its = [request for request, _ in arrival.waiting if request.request_id in request_ids]
            arrival.waiting = [pair for pair in arrival.waiting if pair[0] not in its]
            gone += its
            if not arrival.waiting:
                del self._arrivals[first]
        return gone

    def fetch(self, request: Request) -> None:
        """Write to the device what host memory has of a request's prompt behind the device's own hit."""
        if self.tiers is None or request.index or KV_CACHE not in self.resident:
            return
        self._unkept[request.request_id] = request
        wanted = self._keys(request, spare=1) if self._may_hit(request) else []
        here = [self.tiers.get(key) for key in reversed(wanted)][::-1]
        if not any(here):
            return
        chain = self._locate(request)
        num_here = min(len(chain.token_ids), len(wanted))
        found: list[StoredBlock] = []
        for block in here[num_here:]:
            if block is None:
                break
            found.append(block)
        present, specs = [block.present for block in found], self.step_config.grouping.specs
        end = groups.served(present, specs, num_here, self.config.block_size)
        found = found[: end - num_here]
        num_bytes = sum(block.num_bytes for block in found)
        if not found or len(found) > self._num_spare_blocks:
            return
        if not self.rule.pays(self._compute_seconds(len(found)), num_bytes, 0):
            return
        if self._adopt(request, chain, num_here, found, wanted[:end]):
            promoted = self._promoted.pop(request.request_id, set())
            its = self._fetched.setdefault(request.request_id, {})
            for key, block in zip(wanted[num_here:end], found, strict=True):
                name = self.tiers.below_name if key in promoted else HOST
                its[name] = its.get(name, 0) + self.config.block_size
                self.tiers.counts[name].num_hits += 1
                self.tiers.counts[HOST].read_bytes += block.num_bytes

    @property
    def _num_spare_blocks(self) -> int:
        """Number of free blocks, but for those that were fetched for requests that have not run."""
        fetched = sum(sum(its.values()) for its in self._fetched.values())
        return self.stats.num_free_blocks - fetched // self.config.block_size

    def _adopt(
        self,
        request: Request,
        chain: exchange.Chain,
        num_here: int,
        found: Sequence[StoredBlock],
        wanted: Sequence[BlockKey],
    ) -> bool:
        """Write found blocks to free ones behind those that the device has; False if they do not fit."""
        size, num_groups = self.config.block_size, len(chain.lines)
        token_ids = request.prompt_token_ids[: len(wanted) * size].reshape(-1, size)
        present = np.zeros((num_groups, len(wanted)), bool)
        present[:, :num_here] = chain.present[:, :num_here]
        read = groups.blocks_read(self.step_config.grouping.specs, len(wanted), size)
        for i, block in enumerate(found, start=num_here):
            present[:, i] = block.present
            present[1:, i] &= read[1:, i]
        began = time.perf_counter()
        reservation = exchange.reserve(self._state, token_ids, present, request.salt, self._mesh)
        if reservation is None:
            return False
        blocks = [
            None if i < num_here else _of_group(found[i - num_here], group)
            for group, i in np.argwhere(present).tolist()
        ]
        chunks = exchange.gathered(blocks, self._state.kv_cache, self._mesh)
        for state in exchange.fill(self._state, reservation, chunks, self._mesh):
            self._state = state
        jax.block_until_ready(self._state.kv_cache)
        self.rule.upload.note(sum(block.num_bytes for block in found), time.perf_counter() - began)
        return True

    @property
    def must_keep(self) -> bool:
        """Whether a prompt is being computed whose blocks are to be stored."""
        return bool(self._unkept)

    def keep(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Store the blocks of prompts that have been computed, by the first tokens of their answers.

        Returns: the deltas; the first of a request tells how many of its tokens were fetched.
        """
        if self.tiers is None:
            return [*deltas]
        told = []
        for delta in deltas:
            request = self._unkept.get(delta.request_id)
            if request is not None and (delta.token_ids or delta.finish_reason):
                del self._unkept[delta.request_id]
                self._promoted.pop(delta.request_id, None)
                if delta.token_ids and KV_CACHE in self.resident:
                    self._store(request)
                    if request.kv_cache_ttl is not None:
                        self.tiers.keep(self._keys(request), request.kv_cache_ttl)
            if its := self._fetched.pop(delta.request_id, None):
                delta = dataclasses.replace(delta, num_fetched_tokens=its)
            told.append(delta)
        return told

    def _store(self, request: Request) -> None:
        """Copy the blocks of a prompt that are new to the tiers."""
        assert self.tiers is not None
        all_keys = self._keys(request)
        has_groups = len(self.step_config.grouping.specs) > 1
        new = [i for i in range(len(all_keys) - 1, -1, -1) if has_groups or not self.tiers.has(all_keys[i])]
        if not new:
            return
        chain = self._locate(request)
        new = [i for i in new if i < len(chain.token_ids)]
        if has_groups:
            new = [i for i in new if not self._has_all(all_keys[i], chain.present[:, i])]
        if not new:
            return
        places = sorted(new)
        part = exchange.Chain(chain.token_ids[places], chain.lines[:, places])
        arrays, present = exchange.on_host(self._state, part, self._mesh), part.present
        number = np.cumsum(present.reshape(-1)).reshape(present.shape) - 1  # of a block in the arrays
        for at in range(len(places) - 1, -1, -1):
            ids = number[present[:, at], at]
            block = StoredBlock(tuple(present[:, at].tolist()), {n: x[ids].copy() for n, x in arrays.items()})
            self.tiers.put(all_keys[places[at]], block)

    def _has_all(self, key: BlockKey, present: np.ndarray) -> bool:
        """Tell whether the tiers have a block with at least these groups' K and V."""
        assert self.tiers is not None
        stored = self.tiers.get(key)
        if stored is None:
            return self.tiers.has(key)
        return bool(np.all(~present | np.array(stored.present)))

    def _may_hit(self, request: Request) -> bool:
        """Tell whether a request looks for its prompt in caches at all."""
        return not request.params.tells_prompt

    def _locate(self, request: Request) -> exchange.Chain:
        its = request.salt, self.step_config.grouping.specs
        return exchange.locate(self._state, request.prompt_token_ids, *its, self._mesh)

    def _keys(self, request: Request, spare: int = 0) -> list[BlockKey]:
        """Return the keys of a prompt's full blocks, with `spare` tokens left to compute."""
        prompt, adapter = request.prompt_token_ids, request.adapter
        digest = b""
        if adapter is not None:
            if adapter.number not in self._adapters:
                self._adapters[adapter.number] = keys.adapter_digest(adapter.arrays)
            digest = self._adapters[adapter.number]
        prompt = prompt[: len(prompt) - spare]
        its = request.cache_salt, digest, prompt, self.config.block_size
        return keys.chain_keys(self._current_space(), *its)

    def _current_space(self) -> bytes:
        """Return what all keys have in common. Blocks of older weights leave host memory when it changes."""
        if "block_format" not in self.__dict__ and self.tiers is not None:
            self.require(*MEMORY)
            space = keys.space_of(self.block_format)
            if space != self._space:
                self.tiers.host.clear(self._space)
                self._space = space
        return self._space

    def _compute_seconds(self, num_blocks: int) -> float | None:
        """Return how long these blocks of a prompt would take to compute; None if that was never measured."""
        tiles = cdiv(num_blocks * self.config.block_size, PREFILL_TILE)
        per_pass = self.pace.seconds_per_pass
        return None if per_pass is None else cdiv(tiles, self.step_config.tiles_per_pass) * per_pass


def _of_group(block: StoredBlock, group: int) -> dict[str, np.ndarray]:
    """Return one group's part of a block."""
    at = sum(block.present[:group])
    return {name: array[at] for name, array in block.arrays.items()}
