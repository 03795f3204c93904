"""Fetches: blocks on their way from host memory to the device, for requests that wait for them."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxpaged.arithmetic import cdiv
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.engine.device import Device
from jaxpaged.engine.request_queue import Queued
from jaxpaged.handover import exchange, staging
from jaxpaged.tiers import groups
from jaxpaged.tiers.rule import Rule

MOST_STAGED = 8  # pieces that lie on the device until they are written


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbouring blocks of a chain that arrive together."""

    first: int
    end: int  # number of blocks that the chain has then
    places: tuple[np.ndarray, ...]  # of each size class
    blocks: Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(eq=False)
class Fetch:
    """Requests of one prompt that wait for its blocks."""

    together: list[Queued]
    keys: Sequence[BlockKey]
    found: Sequence[StoredBlock | None]  # what host memory had of them
    asked: exchange.Asked  # what the device has
    promoted: set[BlockKey]  # those that were read from below
    is_planned: bool = False
    num_blocks: int = 0  # that are fetched
    present: np.ndarray | None = None  # bool [num_groups, num_blocks], of the chain
    deadline: float = np.inf  # by `time.monotonic`
    waiting: collections.deque[Piece] = dataclasses.field(default_factory=collections.deque)
    staged: collections.deque[tuple[Piece, Future[Any]]] = dataclasses.field(
        default_factory=collections.deque
    )
    arrived: list[tuple[Piece, jax.Array]] = dataclasses.field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of the prompt's first request."""
        request = self.together[0].request
        return request.request_id - request.index

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        done = self.is_planned and not (self.waiting or self.staged)
        return done or time.monotonic() >= self.deadline

    def cancel(self) -> None:
        """Give up what has not come."""
        for _, future in self.staged:
            future.cancel()
        self.waiting.clear()
        self.staged.clear()

    def keys_arrived(self, num_hit_blocks: int) -> list[BlockKey]:
        """Return the keys of the blocks that came, and that the request found then. Call it after it ran."""
        return [
            self.keys[i]
            for piece, done in self.arrived
            if bool(np.asarray(done))
            for i in range(piece.first, min(piece.end, num_hit_blocks))
        ]


class Fetches:
    """The fetches of an engine, for its thread; copies to the device have a thread of their own.

    A piece is copied to the device while the loop runs. Between two runs a program, for which nobody waits,
    writes it into free blocks, and makes them findable as those of a finished request are.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._specs = device, device.step_config.grouping.specs
        self._sizes = staging.PieceSizes.of(device.state)
        self._target = staging.Target(device.state, self._sizes, device.mesh)
        self._under_way: dict[int, Fetch] = {}  # by the number of a prompt's first request
        self._thread = ThreadPoolExecutor(1, "jaxpaged-arrivals")
        self._compile()

    def __len__(self) -> int:
        """Return how many fetches are under way."""
        return len(self._under_way)

    def __iter__(self) -> Iterator[Fetch]:
        return iter([*self._under_way.values()])

    def num_bytes(self, num_blocks: int) -> int:
        """Return the bytes that are copied to the device for so many blocks of a chain: whole pieces."""
        sizes = self._sizes
        return cdiv(num_blocks, sizes.of_class[0] // sizes.classes.count(0)) * self._target.num_bytes

    @property
    def num_rows(self) -> int:
        """Number of rows that are held for requests that wait."""
        return sum(len(fetch.together) for fetch in self)

    def _compile(self) -> None:
        """Write a piece without blocks, so that all is compiled: no measurement counts that."""
        state = self._device.state
        line = staging.Line.of(state, np.zeros(0, np.int32), 0)
        places, present = self._sizes.places([]), np.zeros((len(self._specs), 0), bool)
        self._device.write_piece(line, present, places, self._target.gathered([]))

    def add(self, fetch: Fetch) -> None:
        """Begin a fetch; `plan` is next, when the device has told what it has."""
        self._under_way[fetch.number] = fetch

    def joins(self, together: Sequence[Queued]) -> bool:
        """Let requests wait with the first one of their prompt, if that waits; False: it does not."""
        request = together[0].request
        fetch = self._under_way.get(request.request_id - request.index)
        if fetch is None or not request.index:
            return False
        fetch.together += together
        return True

    def plan(self, fetch: Fetch, chain: exchange.Chain, stored: Sequence[StoredBlock]) -> None:
        """Cut what is to be fetched behind the chain that the device has into pieces."""
        num_here, num_groups = min(len(chain.token_ids), len(fetch.keys)), len(self._specs)
        state = self._device.state
        size = state.tables.block_size
        fetch.is_planned, fetch.num_blocks, end = True, len(stored), num_here + len(stored)
        present = np.zeros((num_groups, end), bool)
        present[:, :num_here] = chain.present[:, :num_here]
        read = groups.blocks_read(self._specs, end, size)
        for i, block in enumerate(stored, start=num_here):
            present[:, i] = block.present
            present[1:, i] &= read[1:, i]
        fetch.present = present
        of_places = [
            [(group, i) for group in range(num_groups) if present[group, i]] for i in range(num_here, end)
        ]
        for piece in self._sizes.cut(of_places):
            pairs = [pair for n in piece for pair in of_places[n]]
            blocks = [self._part(stored[i - num_here], group) for group, i in pairs]
            places = self._sizes.places(pairs)
            fetch.waiting.append(Piece(num_here + piece.start, num_here + piece.stop, places, blocks))

    def _part(self, block: StoredBlock, group: int) -> dict[str, np.ndarray]:
        """Return one group's part of a block."""
        classes, class_of = self._sizes.classes, self._device.state.kv_cache.class_of
        place = sum(block.present[other] for other in range(group) if classes[other] == classes[group])
        return {name: x[place] for name, x in block.arrays.items() if class_of(name) == classes[group]}

    def advance(self, rule: Rule) -> None:
        """Write what has come to the device, and let more come. Waits for nothing."""
        for fetch in self:
            while fetch.staged and fetch.staged[0][1].done():
                self._arrive(fetch, rule, *fetch.staged.popleft())
        num_staged = sum(len(fetch.staged) for fetch in self)
        for fetch in self:
            while fetch.waiting and num_staged < MOST_STAGED:
                piece = fetch.waiting.popleft()
                fetch.staged.append((piece, self._thread.submit(self._stage, piece)))
                num_staged += 1

    def over(self) -> list[Fetch]:
        """Forget the fetches that are over, and return them."""
        return [self._drop(fetch.number) for fetch in self if fetch.is_over]

    def dropped(self) -> list[Fetch]:
        """Forget all fetches, and return them."""
        return [self._drop(fetch.number) for fetch in self]

    def without(self, request_ids: Any) -> list[Queued]:
        """Forget the requests with these numbers, and return those that waited for blocks."""
        gone: list[Queued] = []
        for number, fetch in [*self._under_way.items()]:
            given_up = [queued for queued in fetch.together if queued.request.request_id in request_ids]
            fetch.together = [queued for queued in fetch.together if queued not in given_up]
            gone += given_up
            if not fetch.together:
                self._drop(number)
        return gone

    def wait(self, seconds: float) -> None:
        """Wait a little for what comes next. The device must be idle."""
        for fetch in self:
            if not fetch.is_planned:
                fetch.asked.chain()
            elif fetch.staged:
                wait([fetch.staged[0][1]], seconds)
            return

    def close(self) -> None:
        """End the thread."""
        self.dropped()
        self._thread.shutdown()

    def _drop(self, number: int) -> Fetch:
        fetch = self._under_way.pop(number)
        fetch.cancel()
        return fetch

    def _stage(self, piece: Piece) -> tuple[dict[str, jax.Array], float]:
        began = time.perf_counter()
        arrays = self._target.gathered(piece.blocks)
        return arrays, time.perf_counter() - began

    def _arrive(self, fetch: Fetch, rule: Rule, piece: Piece, future: Future[Any]) -> None:
        try:
            arrays, seconds = future.result()
        except Exception:  # no memory, say: the tokens are computed
            logging.exception("blocks cannot be copied to the device")
            fetch.cancel()
            return
        rule.upload.note(sum(array.nbytes for array in arrays.values()), seconds)
        request, end, state = fetch.together[0].request, piece.end, self._device.state
        tokens = request.prompt_token_ids[: end * state.tables.block_size]
        assert fetch.present is not None
        line = staging.Line.of(state, tokens, request.salt)
        done = self._device.write_piece(line, fetch.present[:, :end], piece.places, arrays)
        fetch.arrived.append((piece, done))
