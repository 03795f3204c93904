"""Residence: which of a driver's memory is there, and what takes its place. For the engine's thread only."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.checks import check
from jaxpaged.engine import drafted, start, updates
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver_calls import CALLS
from jaxpaged.engine.request import Delta
from jaxpaged.models.changes import Given
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names
from jaxpaged.step.state import EngineState

WEIGHTS, KV_CACHE = "weights", "kv_cache"
MEMORY = WEIGHTS, KV_CACHE


class Residence:
    """The part of a driver that takes new weights, and gives memory back and takes it again.

    What is under way then is put back into the queue, with its tokens: it is computed anew when it goes on.
    """

    params: nnx.State
    graphdef: nnx.GraphDef
    setup: Any
    rows: Any
    queue: Any
    cache_size: Any
    send_call: Any
    recall: Callable[[Sequence[int]], None]
    _state: EngineState
    _unread: Any
    _read: Callable[[Any], list[Delta]]
    _load_model: Callable[[LoadAs], Decoder]
    _names: Names | None
    _draft: Draft | None
    _forget_prefixes: Callable[[], None]
    forget_tiers: Callable[[], None]
    settle_blocks: Callable[[], None]

    weight_version = 0  # how often the weights have changed, or what the last update said
    resident: frozenset[str] = frozenset(MEMORY)  # what of `MEMORY` is there
    _asleep: Any = None  # weights in the host's memory while they are not on the device

    def settle(self) -> list[Delta]:
        """Read the report of the run under way, so that the device has no work left."""
        unread, self._unread = self._unread, None
        return [] if unread is None else self._read(unread)

    @property
    def is_fetching(self) -> bool:
        """Whether blocks are on their way to the device."""
        return False

    def clear_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while any request has a row."""
        self.settle()
        if self.rows.has_any or self.is_fetching or KV_CACHE not in self.resident:
            return False
        self.forget_tiers()
        self._forget_prefixes()
        return True

    def stand_down(self) -> list[Delta]:
        """Put all that has a row back into the queue, and forget all cached prefixes.

        Raises `InputError`, and changes nothing, while a beam search has rows.
        """
        searches = sum(entry.request.beams is not None for _, entry in self.rows.taken())
        check("rows of beam searches", searches, "0: end or abort them first", not searches)
        deltas, rows = self.settle(), []
        self.settle_blocks()
        for row, entry in self.rows.taken():
            if entry.is_aborted:
                self.rows.leave(row)
                deltas.append(Delta.aborted(entry.request))
            else:
                rows.append(row)
        self.recall(rows)
        self._forget_prefixes()
        return deltas

    def require(self, *what: str) -> None:
        """Raise `InputError` unless this memory is there."""
        for each in what:
            check("sleep", f"the {each} are away", f"over: wake_up(tags=[{each!r}])", each in self.resident)

    def read_names(self, pairs: Any) -> Given:
        """Check an update by names; see `Given`. Any thread may ask. Raises `InputError`."""
        check("weights", "an update", "for a model whose names are known", self._names is not None)
        assert self._names is not None
        updates.check_updatable(self.setup, self.params)
        return Given(self.setup.whole, self._names, pairs)

    def update_weights(self, weights: Given | nnx.State, version: int | None = None) -> list[Delta]:
        """Put new weights in the place of old ones, all or none. Raises `InputError`.

        version: the new `weight_version`, above the old one; None: the next.
        """
        new_version = self.weight_version + 1 if version is None else version
        rule = f"above the version of the present weights, {self.weight_version}"
        check("version", new_version, rule, new_version > self.weight_version)
        if isinstance(weights, nnx.State):
            check("num_processes", self.setup.config.num_processes, "1 for a pytree", self.send_call is None)
            adopted = updates.adopted(self._with_draft(), weights)
            deltas = self.stand_down() if KV_CACHE in self.resident else []
            self._take(adopted)
        else:
            if self._asleep is not None or weights.missing:
                self.require(WEIGHTS)
            update = self._update(weights)
            params = self._with_draft()
            deltas = self.stand_down() if KV_CACHE in self.resident else []
            if self.send_call is None:
                self.params = params
                self._put(update)
            else:
                self._put_weights({name: np.asarray(array) for name, array in weights.items()})
        self.weight_version = new_version
        return deltas

    def _with_draft(self) -> nnx.State:
        """Return the parameters with the weights of the model that drafts, which sleep may have taken."""
        if self._draft is None:
            return self.params
        if self._asleep is not None:
            return updates.with_draft(self.params, lambda: self._awake()[updates.DRAFT])
        return updates.with_draft(self.params, functools.partial(drafted.weights, self._draft, self.setup))

    def _awake(self) -> nnx.State:
        """Return the weights that sleep has put into the host's memory, on the device."""
        shapes = updates.without_adapters(self.params)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), self._asleep, shapes)

    def _update(self, given: Mapping[str, Any]) -> updates.Update:
        assert self._names is not None
        return updates.Update(self.setup, self._names, given)

    def _put(self, update: updates.Update) -> None:
        """Put in an update that is checked. Should memory not suffice, the weights are away, as after
        `sleep(2)`: none of an answer comes of a half of them.
        """
        params = jax.tree.map(lambda array: array, self.params)
        shapes = jax.tree.map(updates.shape_of, updates.own_weights(self.params))
        self.params = updates.with_weights(self.params, shapes)
        self.resident -= {WEIGHTS}
        self._take(update.into(params))

    def _take(self, params: nnx.State) -> None:
        self.params, self._asleep = params, None
        self.resident |= {WEIGHTS}
        self.__dict__.pop("block_format", None)  # it tells of the weights

    @CALLS.shared
    def _put_weights(self, arrays: Mapping[str, Any]) -> None:
        self._put(self._update(arrays))

    def sleep(self, level: int) -> list[Delta]:
        """Give back the cache's memory, and that of the weights: 1 keeps them in the host's, 2 nowhere."""
        if level == 0:
            return self.settle()
        deltas = self.stand_down() if KV_CACHE in self.resident else []
        self._release(level)
        return deltas

    def release_kv_cache(self) -> list[Delta]:
        """Give back the cache's memory alone. Raises `InputError` if any memory is away."""
        self.require(*MEMORY)
        deltas = self.stand_down()
        self._release(0)
        return deltas

    def wake_up(self, what: Sequence[str]) -> None:
        """Take memory again. Weights that were kept nowhere are read from the model's files."""
        self._restore([each for each in MEMORY if each in what and each not in self.resident])

    @CALLS.shared
    def _release(self, level: int) -> None:
        if KV_CACHE in self.resident:
            for array in jax.tree.leaves(self._state.kv_cache):
                array.delete()
        gone = {KV_CACHE}
        if level and WEIGHTS in self.resident:
            weights = updates.without_adapters(self.params)
            # On a CPU they are in the host's memory.
            keeps = jax.default_backend() == "cpu"
            if level == 1:
                self._asleep = weights if keeps else jax.device_put(weights, jax.memory.Space.Host)
            self.params = updates.with_weights(self.params, jax.tree.map(updates.shape_of, weights))
            gone.add(WEIGHTS)
        elif level == 2:
            self._asleep = None
        self.resident -= gone

    @CALLS.shared
    def _restore(self, what: Sequence[str]) -> None:
        if WEIGHTS in what:
            if self._asleep is not None:
                weights = self._awake()
            else:
                weights = updates.without_adapters(nnx.state(start.load(self.setup, self._load_model)))
                self.weight_version += 1
            self._take(updates.with_weights(self.params, weights))
        if KV_CACHE in what:
            model = nnx.merge(self.graphdef, self.params)
            made = start.create_state(self.setup, model, self.cache_size.num_blocks)
            self._state = dataclasses.replace(self._state, kv_cache=made.kv_cache)
            self.resident |= {KV_CACHE}
