"""Device: the model and the state of an engine, with the calls that all of its processes make together.

Nobody else assigns the state or the parameters. What changes them is a method here: a shared call, which
process 0 makes in all processes; or, for what one process does alone, a step that hands in its result.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged.checks import check
from jaxpaged.engine import capacity, drafted, machine, start, updates
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.setup import Setup
from jaxpaged.engine.start import Run
from jaxpaged.handover import exchange, staging
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.lora import Arrays
from jaxpaged.models.names import Names
from jaxpaged.parallel.calls import SendCall, SharedCalls
from jaxpaged.parallel.mesh import BY_SHARD, from_host
from jaxpaged.parallel.processes import Processes
from jaxpaged.sampling_state import LogitRules, SamplingState
from jaxpaged.step import loop, recent
from jaxpaged.step.automata import GrammarRows
from jaxpaged.step.feature_values import GRAMMARS, Beams, DraftRows
from jaxpaged.step.features import with_values
from jaxpaged.step.report import Report
from jaxpaged.step.state import EngineState, Rows

# What of a device's memory may be away.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
MEMORY = WEIGHTS, KV_CACHE

# The dataclasses that calls to other processes have among their arrays.
CALL_CLASSES = Rows, SamplingState, LogitRules, Beams, DraftRows, GrammarRows
# Calls that all processes of a model make; their arguments are host arrays and plain values.
CALLS = SharedCalls(
    "run",
    "abort",
    "place",
    "write_tokens",
    "write_given",
    "write_automaton",
    "write_masks",
    "put_adapter",
    "put_weights",
    "release",
    "restore",
    "read_values",
    "look",
    "forget_prefixes",
)


class CacheObserver(Protocol):
    """Observer of the prefix cache: all processes let their devices look for it."""

    def look(self, state: EngineState) -> None:
        """Let the devices report what has changed up to this state. Waits for nothing."""

    def forget_all(self, state: EngineState) -> None:
        """Tell that nothing is cached any more: of this state, that is so."""


class Device:
    """Owner of model and state. For the engine's thread only.

    `send_call` makes each shared call in the other processes first; None: there are none. `observer` is told
    of each run.
    """

    def __init__(
        self,
        setup: Setup,
        model: Decoder,
        num_blocks: int,
        load_model: Callable[[LoadAs], Decoder],
        names: Names | None = None,
        kept_run: Run | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.setup, self.mesh = setup, setup.mesh
        self.num_blocks = num_blocks
        self.step_config = setup.step_config(num_blocks, capacity.more_blocks(setup, num_blocks))
        self.names = names  # of the model's weights; None: unknown, and no update can name them
        self._load_model, self._draft = load_model, draft
        self.graphdef, self.params = nnx.split(model)
        self._state = start.create_state(setup, model, num_blocks)
        self.kept_run = kept_run  # the compiled loop; None: `loop.run` compiles it when it is called
        self.by_host = False  # whether the host launches each step
        self.send_call: SendCall | None = None
        self.observer: CacheObserver | None = None
        self.weight_version = 0  # how often the weights have changed, or what the last update said
        self.num_updates = 0  # how often weights were put in: what was computed of former ones is void
        self.resident = frozenset(MEMORY)  # what of `MEMORY` is there
        self.asleep: nnx.State | None = None  # weights in the host's memory while the device has none

    @property
    def state(self) -> EngineState:
        """State after all runs that were dispatched: arrays on the device, valid until the next change."""
        return self._state

    def follow(self, name: str, arrays: Sequence[Any]) -> None:
        """Make a call that process 0 makes to its devices. Raises `InputError` for any other name."""
        CALLS.make(self, name, arrays)

    def require(self, *memory: str) -> None:
        """Raise `InputError` unless this memory is there."""
        for name in memory:
            check("sleep", f"the {name} are away", f"over: wake_up(tags=[{name!r}])", name in self.resident)

    # The loop.

    def compile(self, run_nothing: Callable[[], None], processes: Processes | None) -> None:
        """Compile the loop, or read it from disk, so that all is ready.

        Where a GPU fails to run the loop as one program, the host launches each step, if the options allow
        it. `run_nothing` makes each call that the engine will make, without an effect.
        """
        began = time.perf_counter()
        by_host = self.by_host = self.setup.config.loop == "host"
        if self.kept_run is None:
            self.kept_run = self._compiled(by_host=by_host)
        if processes is not None:  # none may wait in a collective while another still compiles
            processes.agree({"num_blocks": str(self.num_blocks)})
        try:
            run_nothing()
        except jax.errors.JaxRuntimeError as error:
            if self.setup.config.loop != "auto" or not machine.may_fail_to_launch(error):
                raise
            logging.warning("this device does not run the serving loop as one program: %s", error)
            by_host = self.by_host = True
            del self._state  # it was donated, and two would not fit
            self._state = self._new_state()
            self.kept_run = self._compiled(by_host=True)
            run_nothing()
        where = "the host, a step at a time" if by_host else "the device"
        logging.info("compiled in %.1f s; the loop runs on %s", time.perf_counter() - began, where)

    def _compiled(self, *, by_host: bool) -> Run | None:
        return start.run_of(self.setup, self.graphdef, self.params, self._state, by_host=by_host)

    def _new_state(self) -> EngineState:
        model = nnx.merge(self.graphdef, self.params)
        return start.create_state(self.setup, model, self.num_blocks)

    @CALLS.shared
    def run(self, limits: np.ndarray, wants_a_row: bool, wants_scores: bool) -> Report:
        """Dispatch a run of the loop, and return its report, which nobody has waited for."""
        arrays = self.params, self._state, limits, np.bool_(wants_a_row)
        if self.kept_run is not None:
            self._state, report = self.kept_run(*arrays)
        else:
            self._state, report = loop.run(self.graphdef, *arrays, config=self.step_config, mesh=self.mesh)
        self._look()
        return recent.with_optional_outputs(report, self._state, wants_scores, mesh=self.mesh)

    # Rows.

    @CALLS.shared
    def abort(self, arrivals: np.ndarray) -> None:
        """End the requests with these numbers; 0 stands for none."""
        self._state = loop.abort(self._state, arrivals, mesh=self.mesh)

    @CALLS.shared
    def place(self, requests: Rows, rows: np.ndarray) -> None:
        """Put requests into rows."""
        self._state = loop.submit(self._state, requests, rows, mesh=self.mesh)

    @CALLS.shared
    def write_tokens(self, chunk: np.ndarray) -> None:
        """Write tokens, each under its row and position."""
        token_ids = loop.write_tokens(self._state.rows.token_ids, chunk, mesh=self.mesh)
        self._set_rows(token_ids=token_ids)

    @CALLS.shared
    def write_given(self, channel: str, chunk: np.ndarray) -> None:
        """Write what requests give for places of their prompts, each under its row and number."""
        given = self._state.rows.given
        self._set_rows(given=given | {channel: loop.write_given(given[channel], chunk, mesh=self.mesh)})

    @CALLS.shared
    def read_values(self, channel: str, rows: np.ndarray) -> jax.Array:
        """Return a channel's values of all positions of rows. Waits for nothing."""
        return recent.of_rows(self._state, rows, channel, mesh=self.mesh)

    def _set_rows(self, **arrays: Any) -> None:
        self._state = dataclasses.replace(self._state, rows=dataclasses.replace(self._state.rows, **arrays))

    # Grammars and adapters.

    def run_with(self, setup: Setup) -> Run:
        """Compile the loop over a state with what another setup's has, or read it from disk. For any thread.

        The state stays as it is until `take_arena`.
        """
        params = jax.tree.map(updates.shape_of, self.params)
        shapes = start.state_shapes(setup, nnx.merge(self.graphdef, params), self.num_blocks)
        # All else is described by the present arrays, as at the start: shapes of a pool in the host's memory
        # let XLA return it in the device's. Whether the arrays were donated meanwhile does not matter.
        rows = with_values(self._state.rows, {GRAMMARS: shapes.rows.features[GRAMMARS]})
        state = dataclasses.replace(self._state, rows=rows)
        state = with_values(state, {GRAMMARS: shapes.features[GRAMMARS]})
        source = start.Source(setup, self.graphdef, params, state, by_host=self.by_host)
        return source.run(source.kept() or source.compiled())

    def take_arena(self, setup: Setup, run: Run) -> None:
        """Take memory for automata, by a setup that has them, and run this loop from now on.

        Rows keep their requests. No run is under way.
        """
        rows, arena = loop.with_arena(self._state.rows, num_words=setup.config.arena_words, mesh=self.mesh)
        self._state = with_values(dataclasses.replace(self._state, rows=rows), {GRAMMARS: arena})
        self.setup, self.kept_run = setup, run

    @CALLS.shared
    def write_automaton(self, blocks: np.ndarray, first: int, count: int) -> None:
        """Write so many blocks of words into the arena, from a word on."""
        arena = self._state.features[GRAMMARS]
        arena = loop.write_automaton(arena, blocks, np.int32(first), np.int32(count), mesh=self.mesh)
        self._state = with_values(self._state, {GRAMMARS: arena})

    @CALLS.shared
    def write_masks(self, masks: np.ndarray, firsts: np.ndarray, rows: np.ndarray) -> None:
        """Write masks into the arena from these words on, and the states that their rows get then."""
        arena, grammars = self._state.features[GRAMMARS], self._state.rows.features[GRAMMARS]
        arena, state = loop.write_masks((arena, grammars.state), masks, firsts, rows, mesh=self.mesh)
        in_rows = with_values(self._state.rows, {GRAMMARS: dataclasses.replace(grammars, state=state)})
        self._state = with_values(dataclasses.replace(self._state, rows=in_rows), {GRAMMARS: arena})

    @CALLS.shared
    def put_adapter(self, arrays: Arrays, number: int) -> None:
        """Write an adapter into the slot of a number, from 1 on."""
        if self.mesh is not None:
            arrays = from_host(self.mesh, BY_SHARD, arrays)
        adapters, weights = nnx.split_state(self.params, AdapterParam, ...)
        slot = np.int32(number - 1)
        written = loop.put_adapter(self.graphdef, adapters, weights, arrays, slot, mesh=self.mesh)
        self.params = nnx.merge_state(weights, written)

    # The prefix cache.

    @CALLS.shared
    def look(self) -> None:
        """Let the devices report once more what the prefix cache has."""
        self._look()

    def _look(self) -> None:
        if self.observer is not None:
            self.observer.look(self._state)

    @CALLS.shared
    def forget_prefixes(self) -> None:
        """Forget all cached prefixes."""
        self._state = loop.reset_prefix_cache(self._state, mesh=self.mesh)
        if self.observer is not None:
            self.observer.forget_all(self._state)

    def adopt(self, reservation: exchange.Reservation, chunks: Iterator[exchange.Chunk]) -> None:
        """Write a chain into the cache that has reserved blocks. After an error nothing wrong is found."""
        for state in exchange.fill(self._state, reservation, chunks, self.mesh):
            self._state = state

    def write_piece(
        self,
        line: staging.Line,
        present: np.ndarray,
        places: tuple[np.ndarray, ...],
        arrays: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Cache a chain whose new blocks are a piece. Return whether it is cached, without waiting for it."""
        self._state, done = staging.arrived(self._state, line, present, places, arrays, self.mesh)
        return done

    # Memory and weights.

    def read_update(self, arrays: Mapping[str, Any]) -> updates.Update:
        """Check an update by names. Raises `InputError`."""
        assert self.names is not None
        return updates.Update(self.setup, self.names, arrays)

    def with_missing_draft(self) -> nnx.State | None:
        """Return the parameters with the weights of the model that drafts, which sleep has taken; None if it
        has not: then nobody must hold the parameters, so that an update can free them one by one.
        """
        if self._draft is None:
            return None
        draft, is_asleep = self._draft, self.asleep is not None

        def load() -> nnx.State:
            return self._awake()[updates.DRAFT] if is_asleep else drafted.weights(draft, self.setup)

        params = updates.with_draft(self.params, load)
        return None if params is self.params else params

    def _awake(self) -> nnx.State:
        """Return the weights that sleep has put into the host's memory, on the device."""
        shapes = updates.without_adapters(self.params)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), self.asleep, shapes)

    def put_update(self, update: updates.Update, params: nnx.State | None = None) -> None:
        """Put in an update that is checked. Should memory not suffice, the weights are away, as after
        `sleep(2)`: none of an answer comes of a half of them.

        params: what to put it into; None: the present parameters.
        """
        if params is not None:
            self.params = params
        params = jax.tree.map(lambda array: array, self.params)
        shapes = jax.tree.map(updates.shape_of, updates.own_weights(self.params))
        self.params = updates.with_weights(self.params, shapes)
        self.resident -= {WEIGHTS}
        self.take(update.into(params))

    def take(self, params: nnx.State) -> None:
        """Put parameters in the place of the present ones."""
        self.params, self.asleep = params, None
        self.resident |= {WEIGHTS}
        self.num_updates += 1

    @CALLS.shared
    def put_weights(self, arrays: Mapping[str, Any]) -> None:
        """Put in an update by names, which all processes check."""
        self.put_update(self.read_update(arrays))

    @CALLS.shared
    def release(self, level: int) -> None:
        """Give back the cache's memory, and with level 1 and 2 that of the weights: 1 keeps them in the
        host's, 2 nowhere.
        """
        if KV_CACHE in self.resident:
            for array in jax.tree.leaves(self._state.kv_cache):
                array.delete()
        gone = {KV_CACHE}
        if level and WEIGHTS in self.resident:
            weights = updates.without_adapters(self.params)
            # On a CPU they are in the host's memory.
            keeps = jax.default_backend() == "cpu"
            if level == 1:
                self.asleep = weights if keeps else jax.device_put(weights, jax.memory.Space.Host)
            self.params = updates.with_weights(self.params, jax.tree.map(updates.shape_of, weights))
            gone.add(WEIGHTS)
        elif level == 2:
            self.asleep = None
        self.resident -= gone

    @CALLS.shared
    def restore(self, memory: Sequence[str]) -> None:
        """Take memory again. Weights that were kept nowhere are read from the model's files."""
        if WEIGHTS in memory:
            if self.asleep is not None:
                weights = self._awake()
            else:
                weights = updates.without_adapters(nnx.state(start.load(self.setup, self._load_model)))
                self.weight_version += 1
            self.take(updates.with_weights(self.params, weights))
        if KV_CACHE in memory:
            kv_cache = self._new_state().kv_cache
            self._state = dataclasses.replace(self._state, kv_cache=kv_cache)
            self.resident |= {KV_CACHE}
