"""Offloading: prompts' blocks in tiers below the device, which are kept there and fetched from there.

The compiled loop knows nothing of tiers. Blocks of prompts that have been computed leave for the tiers beside
the next runs (`departures`). A request's blocks that lie below host memory are read while other rows run.
When there is a row for it, what host memory has of its prompt behind the device's own hit is copied to the
device beside the runs, and written to free blocks between two of them (`fetches`): as blocks of a finished
request, so the loop finds them. The request waits for both, but no longer than computing would take. What
fails is a miss.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.engine.adapters import Adapter
from jaxpaged.engine.device import KV_CACHE, Device
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.request_queue import Queued, RequestQueue
from jaxpaged.engine.run_length import RunLengthController
from jaxpaged.engine.services.block_exchange import BlockExchange
from jaxpaged.engine.services.departures import Departures
from jaxpaged.engine.services.events import Events, label_of
from jaxpaged.engine.services.fetches import Fetch, Fetches
from jaxpaged.engine.services.service import Service
from jaxpaged.handover import exchange
from jaxpaged.kv_events import messages
from jaxpaged.kv_events.tier_mirror import TierMirror
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.tiers import groups, keys, tiers
from jaxpaged.tiers.rule import Rule
from jaxpaged.tiers.tiers import DISK, HOST, Promotion, Tiers

MEDIA = {HOST: messages.HOST, DISK: messages.STORAGE}  # of the tiers that tell of themselves
IDLE_SECONDS = 0.002  # of a turn in which there is nothing to do but to wait for blocks


@dataclasses.dataclass
class Arrival:
    """Requests of one prompt that wait for its blocks from below host memory."""

    wanted: list[BlockKey]  # that some tier has
    asked: exchange.Asked  # what the device has
    waiting: list[tuple[Request, Sequence[int]]]
    promotion: Promotion | None = None


class Offloading(Service):
    """The tiers of an engine, and the blocks that move between them and the device. For its thread.

    num_free_blocks: returns how many blocks the last report has told to be free.

    Raises `InputError` for blocks that cannot travel.
    """

    def __init__(
        self,
        device: Device,
        exchange_: BlockExchange,
        queue: RequestQueue,
        run_length: RunLengthController,
        num_free_blocks: Callable[[], int],
        events: Events | None,
    ) -> None:
        self._device, self._exchange, self._queue = device, exchange_, queue
        self._run_length, self._num_free_blocks, self._events = run_length, num_free_blocks, events
        self._config, self._specs = device.setup.config, device.step_config.grouping.specs
        self._unkept: dict[int, Request] = {}  # requests whose prompts have not been stored
        self._answers: dict[int, tuple[Request, list[int]]] = {}  # that prompts may find, of requests in rows
        self._arrivals: dict[int, Arrival] = {}  # by the number of a prompt's first request
        self._promoted: dict[int, set[BlockKey]] = {}  # blocks that were read from below, by request
        self._tried: dict[int, Fetch] = {}  # fetches of requests that have not run, by their numbers
        self._adapters = weakref.WeakKeyDictionary[Adapter, bytes]()  # digests of adapters in use
        self.rule = Rule()
        self._space, self._space_of = keys.space_of(exchange_.block_format), device.num_updates
        size = self._config.kv_offloading_size
        assert size is not None
        self.tiers: Tiers = tiers.opened(
            size, self._config.kv_offloading_backend, self._config.kv_offloading_disk_size
        )
        # They compile what copies blocks, so that no measurement counts that.
        exchange.locate(device.state, np.zeros(0, np.int32), 0, self._specs, device.mesh)
        self.departures = Departures(self.tiers, device)
        self.fetches = Fetches(device)
        if events is not None:
            self._observe(events)

    def _observe(self, events: Events) -> None:
        """Let events tell of the tiers that tell of themselves."""
        media = {name: MEDIA[name] for name in self.tiers.stores if name in MEDIA}
        events.tiers = TierMirror(self._config.block_size, [*media.values()])
        for name, medium in media.items():
            store: Any = self.tiers.stores[name]
            store.observe = events.tiers.observer(medium)

    @property
    def _mirror(self) -> TierMirror | None:
        return None if self._events is None else self._events.tiers

    def _note_keys(self, request: Request, tokens: np.ndarray, block_keys: Sequence[BlockKey]) -> None:
        """Note what the keys of a request's blocks stand for, for who follows events."""
        if self._mirror is not None:
            self._mirror.note([key.digest for key in block_keys], tokens, label_of(request))

    @property
    def has_work(self) -> bool:
        """Whether any request waits for blocks, or blocks wait to leave."""
        return bool(self._arrivals) or self.is_fetching or self.departures.has_any

    @property
    def is_fetching(self) -> bool:
        """Whether blocks are on their way to the device."""
        return len(self.fetches) > 0

    @property
    def waits_for_run(self) -> bool:
        return self.is_fetching

    @property
    def num_held_rows(self) -> int:
        return self.fetches.num_rows

    @property
    def _has_cache(self) -> bool:
        return KV_CACHE in self._device.resident

    def finish(self) -> None:
        """Wait until all that leaves for the tiers is there."""
        if self._has_cache:
            self.departures.finish()

    def forget(self) -> None:
        """Forget what the tiers have of this engine's model."""
        self.finish()
        self.tiers.clear(self._current_space())

    def settle(self) -> None:
        """Let no block be on its way: what leaves is finished; requests that wait are computed."""
        self.finish()
        self._answers.clear()  # they are noted again when their requests go on
        for fetch in self.fetches.dropped():
            fetch.arrived = []
            self._enqueue(fetch)

    def close(self) -> None:
        """Finish what is to be written."""
        self.fetches.close()
        self.departures.close()
        self.tiers.close()

    def takes_new(self, request: Request, answer: Sequence[int]) -> bool:
        """Take a new request if it is to wait for blocks from below host memory; False: it is not."""
        first = request.request_id - request.index
        if first in self._arrivals:  # the others of its prompt wait with it
            self._arrivals[first].waiting.append((request, answer))
            return True
        if request.index or not self._may_hit(request):
            return False
        wanted = self._keys(request, request.prompt_token_ids[:-1])  # one is left to compute
        for counts in self.tiers.counts.values():
            counts.num_queries += len(wanted)
        wanted = wanted[: self.tiers.num_cached(wanted)]
        self._note_found(request, wanted)
        if not self._has_cache or not self.tiers.below_only(wanted):
            return False
        self._arrivals[first] = Arrival(wanted, self._ask(request), [(request, answer)])
        return True

    def _note_found(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """Let events tell what tiers had before anybody asked for it."""
        if self._mirror is None:
            return
        self._note_keys(request, request.prompt_token_ids, keys)
        for name, store in self.tiers.stores.items():
            if name in MEDIA:
                tell = self._mirror.observer(MEDIA[name])
                for key in reversed(keys):
                    tell(key.digest, store.contains(key))

    def before_fill(self, *, is_idle: bool) -> None:
        """Let blocks move on, and queue the requests for which that is over. If idle, wait a little."""
        if not self._has_cache:
            return
        if is_idle:
            self._wait()
        self.departures.begin()
        self._release_arrivals()
        for fetch in self.fetches:
            if not fetch.is_planned and fetch.asked.is_ready:
                self._plan(fetch)
        self.fetches.advance(self.rule)
        for fetch in self.fetches.over():
            self._enqueue(fetch)
        if self._events is not None:
            self._events.tell_tiers()

    def _wait(self) -> None:
        """Wait a little for what comes next. The device is idle."""
        for arrival in self._arrivals.values():
            if arrival.promotion is not None:
                arrival.promotion.done.wait(IDLE_SECONDS)
            return
        if len(self.fetches):
            self.fetches.wait(IDLE_SECONDS)
        else:
            self.departures.wait()

    def _release_arrivals(self) -> None:
        """Begin to read what the device lacks, and queue the requests for which that is over."""
        for first, arrival in [*self._arrivals.items()]:
            if arrival.promotion is None:
                if not arrival.asked.is_ready:
                    continue
                arrival.promotion = self._promotion(arrival)
            promotion = arrival.promotion
            if promotion is not None and not promotion.is_over:
                continue
            del self._arrivals[first]
            if promotion is not None:
                if arrival.waiting[0][0].request_id == first:  # no other takes it, and it may be aborted
                    self._promoted[first] = set(promotion.promoted)
                num_bytes = self._chain_bytes(len(promotion.promoted))
                self.rule.below.note(num_bytes, time.monotonic() - promotion.began)
            for request, answer in arrival.waiting:
                self._queue.add(request, answer)

    def _promotion(self, arrival: Arrival) -> Promotion | None:
        """Begin to read blocks from below host memory that the device lacks, if that pays."""
        wanted = arrival.wanted[len(arrival.asked.chain().token_ids) :]
        below = self.tiers.below_only(wanted)
        seconds = self._compute_seconds(len(wanted))
        if not below or not self.rule.pays(
            seconds, self.fetches.num_bytes(len(wanted)), self._chain_bytes(len(below))
        ):
            return None
        return self.tiers.promote(below, time.monotonic() + self.rule.wait(seconds))

    def _chain_bytes(self, num_blocks: int) -> int:
        return exchange.chain_bytes(self._device.state.kv_cache, num_blocks)

    def drop(self, request_ids: Collection[int]) -> list[Request]:
        """Forget the requests with these numbers, and return those that waited for blocks."""
        gone = [queued.request for queued in self.fetches.without(request_ids)]
        for first, arrival in [*self._arrivals.items()]:
            dropped = [request for request, _ in arrival.waiting if request.request_id in request_ids]
            arrival.waiting = [pair for pair in arrival.waiting if pair[0] not in dropped]
            gone += dropped
            if not arrival.waiting:
                del self._arrivals[first]
        for request_id in request_ids:
            self._forget_request(request_id)
        return gone

    def takes_for_row(self, together: Sequence[Queued]) -> bool:
        """Take requests for which there are rows if they are to wait for blocks from host memory."""
        request = together[0].request
        if not self._has_cache:
            return False
        if self.fetches.joins(together):
            return True
        fetch = None if request.index else self._fetch_for(together)
        if fetch is None:
            self._note_begun(together[0])
            return False
        self._tried[request.request_id] = fetch
        self.fetches.add(fetch)
        return True

    def _fetch_for(self, together: Sequence[Queued]) -> Fetch | None:
        """Return a fetch of what host memory has of a prompt; None if it has nothing or was asked before."""
        request = together[0].request
        if request.request_id in self._tried or not self._may_hit(request):
            return None
        wanted = self._keys(request, request.prompt_token_ids[:-1])  # one is left to compute
        stored = [self.tiers.get(key) for key in reversed(wanted)][::-1]
        promoted = self._promoted.pop(request.request_id, set())
        return Fetch([*together], wanted, stored, self._ask(request), promoted) if any(stored) else None

    def _note_begun(self, queued: Queued) -> None:
        """Note that a request gets a row now, for what is to be stored of it."""
        request = queued.request
        if not request.index:
            self._unkept[request.request_id] = request
        if self._config.reuse_answers and request.beams is None:
            self._answers[request.request_id] = request, [*queued.answer]

    def _plan(self, fetch: Fetch) -> None:
        """Decide what to fetch, now that the device has told what it has."""
        chain, size = fetch.asked.chain(), self._config.block_size
        num_here = min(len(chain.token_ids), len(fetch.keys))
        stored: list[StoredBlock] = []
        for block in fetch.found[num_here:]:
            if block is None:
                break
            stored.append(block)
        present = [block.present for block in stored]
        stored = stored[: groups.served(present, self._specs, num_here, size) - num_here]
        fetch.found, seconds = (), self._compute_seconds(len(stored))
        if len(stored) > self._num_spare_blocks or not self.rule.pays(
            seconds, self.fetches.num_bytes(len(stored)), 0
        ):
            stored = []
        fetch.deadline = time.monotonic() + self.rule.wait(seconds)
        self.fetches.plan(fetch, chain, stored)

    def _enqueue(self, fetch: Fetch) -> None:
        for queued in fetch.together:
            self._queue.add(queued.request, queued.answer)

    @property
    def _num_spare_blocks(self) -> int:
        """Number of free blocks, but for those that were fetched for requests that have not run."""
        return self._num_free_blocks() - sum(fetch.num_blocks for fetch in self._tried.values())

    @property
    def must_read_first(self) -> bool:
        """Whether a prompt is being computed whose blocks others may take before the host looks again."""
        return any(
            request.max_num_tokens - len(request.prompt_token_ids) <= MAX_STEPS
            for request in self._unkept.values()
        )

    def on_deltas(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Let the blocks of prompts leave that have been computed, by the first tokens of their answers.

        Returns: the deltas; the first of a request tells how many of its tokens were fetched.
        """
        noted = []
        for delta in deltas:
            self._note_answer(delta)
            request = self._unkept.get(delta.request_id)
            if request is not None and (delta.token_ids or delta.finish_reason):
                num_fetched = self._count_fetched(delta)
                self._forget_request(delta.request_id)
                if delta.token_ids and self._has_cache:
                    self._store(request)
                if num_fetched:
                    delta = dataclasses.replace(delta, num_fetched_tokens=num_fetched)
            noted.append(delta)
        return noted

    def _note_answer(self, delta: Delta) -> None:
        """Take over an answer that prompts may find, and let its blocks leave when it has ended."""
        if delta.request_id not in self._answers:
            return
        request, answer = self._answers[delta.request_id]
        answer += delta.token_ids
        if delta.finish_reason:
            del self._answers[delta.request_id]
            # K and V of the last token were not computed.
            tokens = np.concatenate([request.prompt_token_ids, np.array(answer[:-1], np.int32)])
            if self._has_cache:
                self._leave(request, tokens)

    def _forget_request(self, request_id: int) -> None:
        for known in (self._unkept, self._promoted, self._tried):
            known.pop(request_id, None)

    def _count_fetched(self, delta: Delta) -> dict[str, int]:
        """Count what a request found because it was fetched, and return its tokens by tier."""
        fetch, num_tokens = self._tried.get(delta.request_id), dict[str, int]()
        if fetch is None:
            return num_tokens
        size, pieces = self._config.block_size, [piece for piece, _ in fetch.arrived]
        self.tiers.counts[HOST].read_bytes += sum(
            array.nbytes for piece in pieces for block in piece.blocks for array in block.values()
        )
        for key in fetch.keys_arrived(delta.num_hit_tokens // size):
            name = self.tiers.below_name if key in fetch.promoted else HOST
            num_tokens[name] = num_tokens.get(name, 0) + size
            self.tiers.counts[name].num_hits += 1
        return num_tokens

    def _store(self, request: Request) -> None:
        """Let the blocks of a prompt leave that are new to the tiers."""
        all_keys = self._leave(request, request.prompt_token_ids)
        if request.kv_cache_ttl is not None:
            for num_tokens, seconds in request.kv_cache_ttl:
                self.departures.keep(all_keys[: num_tokens // self._config.block_size], seconds)
            self.departures.begin()

    def _leave(self, request: Request, tokens: np.ndarray) -> list[BlockKey]:
        """Let the blocks of a request's tokens leave that are new to the tiers. Return the keys of all."""
        block_keys = self._keys(request, tokens)
        self._note_keys(request, tokens, block_keys)
        self.departures.add(tokens, request.salt, block_keys)
        return block_keys

    def _may_hit(self, request: Request) -> bool:
        """Tell whether a request looks for its prompt in caches at all."""
        return not request.params.tells_prompt

    def _ask(self, request: Request) -> exchange.Asked:
        device, prompt = self._device, request.prompt_token_ids
        return exchange.ask(device.state, prompt, request.salt, self._specs, device.mesh)

    def _keys(self, request: Request, tokens: np.ndarray) -> list[BlockKey]:
        """Return the keys of the full blocks of a request's tokens."""
        adapter, digest = request.adapter, b""
        if adapter is not None:
            if adapter not in self._adapters:
                self._adapters[adapter] = keys.adapter_digest(adapter.arrays)
            digest = self._adapters[adapter]
        return keys.chain_keys(
            self._current_space(), request.cache_salt, digest, tokens, self._config.block_size
        )

    def _current_space(self) -> bytes:
        """Return what all keys have in common. Blocks of older weights leave host memory when it changes."""
        if self._space_of != self._device.num_updates:
            space = keys.space_of(self._exchange.block_format)
            self._space_of = self._device.num_updates
            if space != self._space:
                self.finish()
                self.tiers.host.clear(self._space)
                self._space = space
                if self._mirror is not None:
                    self._mirror.lose_all()
        return self._space

    def _compute_seconds(self, num_blocks: int) -> float | None:
        """Return how long these blocks of a prompt would take to compute; None if that was never measured."""
        tiles = cdiv(num_blocks * self._config.block_size, PREFILL_TILE)
        per_pass = self._run_length.seconds_per_pass
        return None if per_pass is None else cdiv(tiles, self._device.step_config.tiles_per_pass) * per_pass
