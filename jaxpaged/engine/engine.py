"""The engine: requests in, tokens out, from any thread. One thread of its own drives the compiled loop."""

import atexit
import dataclasses
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, Unpack

import numpy as np
from flax import nnx

from jaxpaged.checks import InputError, check, checked_bool, checked_choice, checked_int, shown
from jaxpaged.config import EngineConfig
from jaxpaged.engine.device import MEMORY, WEIGHTS
from jaxpaged.engine.door import RequestOptions
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.grammars import grammars_of
from jaxpaged.engine.handle import EngineDeadError, Handle, Sink
from jaxpaged.engine.occupancy import Occupancy
from jaxpaged.engine.recording import Recorder
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.snapshot import Snapshot
from jaxpaged.engine.start import Shapes
from jaxpaged.engine.stats import Stats
from jaxpaged.engine.updates import own_weights
from jaxpaged.engine.worker import Worker
from jaxpaged.handover.blocks import Blocks
from jaxpaged.handover.exchange import Chunk
from jaxpaged.models.changes import named
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names, num_weights
from jaxpaged.parallel.processes import Processes, WorkerProcess
from jaxpaged.sampling_params import SamplingParams

MODES = "abort", "wait", "keep"
SCHEDULING = "scheduling"
TAGS = *MEMORY, SCHEDULING


class Engine:
    """An engine that serves a model. `with` closes it; so does forgetting it, and the end of the program.

    load_model: returns the model in the form asked for; called when the options are known to be good.
    tokenizer: one of transformers', for the text of deltas.
    record_trace: as in `LLM`.
    shapes: returns the model with shapes for arrays, where weights are quantised.
    adapter_names: names of the model's weights in Hugging Face's model: for adapters, and for new weights.
    processes: those that `parallel.processes.join` has met, for `num_processes`. In all but process 0 the
        constructor raises `SystemExit` when process 0 ends.
    draft: the model that drafts, for `speculative_config`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        load_model: Callable[[LoadAs], Decoder],
        tokenizer: Any = None,
        record_trace: str | os.PathLike[str] | None = None,
        shapes: Shapes | None = None,
        adapter_names: Names | None = None,
        processes: Processes | None = None,
        draft: Draft | None = None,
    ) -> None:
        # Before anything heavy: the file may be one that cannot be written.
        self.recorder = None if record_trace is None else Recorder(record_trace, config.block_size)
        self._driver = Driver(config, model_config, load_model, shapes, adapter_names, processes, draft)
        if isinstance(processes, WorkerProcess):
            processes.follow(self._driver.device.follow)
        self.config, self.cache_size = config, self._driver.cache_size
        door = self._driver.door
        grammars = grammars_of(config, door.model_config, tokenizer, self._driver.late_arena.prepare)
        self.door = dataclasses.replace(door, tokenizer=tokenizer, grammars=grammars)
        self.tokenizer = tokenizer
        self._worker = Worker(self._driver)
        self._close = weakref.finalize(self, self._worker.stop)
        atexit.register(self._close)  # before what JAX does then, and before other finalizers

    @property
    def stats(self) -> Stats:
        """Statistics as of the last report; drafts are counted for the tokens that answers have."""
        return dataclasses.replace(self._driver.stats, **vars(self._worker.drafts))

    @property
    def stopped(self) -> EngineDeadError | None:
        """Error by which the engine has stopped; None while it lives."""
        return self._worker.stopped

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished, and the device has no work left."""
        return self._worker.is_idle

    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        sink: Sink | None = None,
        **options: Unpack[RequestOptions],
    ) -> Handle:
        """Queue a request for one answer (`params.n` is 1) and return at once.

        Requests share cached blocks only if their salts are equal. `sink` gets what the handle gets, without
        text, in the engine's thread, and must not block. If it raises, that is logged, and the request is
        given up. Raises `InputError`, and changes nothing, for a request that could never run.
        """
        requests = self.door.admit(prompt_token_ids, params, **options)
        check("n", params.n, "1: for several, give `submit_all` what `door.admit` makes", len(requests) == 1)
        [handle] = self.submit_all(requests, sink)
        return handle

    def submit_all(self, requests: Sequence[Request], sink: Sink | None = None) -> list[Handle]:
        """Queue requests of `door.admit` together: no step is made between the first and the last.

        All answers to a prompt come together, in their order.
        """

        def queue(sink: Sink | None) -> list[Handle]:
            return self._worker.submit(lambda request: Handle(self, request, sink), requests)

        return queue(sink) if self.recorder is None else self.recorder.record(requests, sink, queue)

    def abort(self, handles: Sequence[Handle]) -> None:
        """Give requests up; those that have finished stay as they are."""
        self._worker.abort([handle.request_id for handle in handles])

    def snapshot(self) -> Snapshot:
        """Return the state after the run under way, or of a stopped engine: see `research.replay.report`."""
        self.refuse_here("ask for a snapshot")
        return self._worker.ask(Driver.snapshot)

    def occupancy(self) -> Occupancy:
        """Return which request holds which blocks, and how far each is, after the run under way."""
        self.refuse_here("ask for the occupancy")
        return self._worker.ask(Driver.occupancy)

    def reset_prefix_cache(self, *, restarts: bool = False) -> bool:
        """Forget all cached prefixes. If any request is unfinished, change nothing and return False.

        restarts: put requests that run back into the queue, with their tokens, and forget in any case. What
            tiers have stays then. Raises `InputError` while a beam search runs.
        """
        self.refuse_here("reset the prefix cache")
        if self._worker.ask(Driver.reset_prefix_cache):
            return True
        if restarts:
            self._worker.act(lambda driver: (driver.lifecycle.restart(), None))
        return restarts

    def export_blocks(
        self, prompt_token_ids: Sequence[int] | np.ndarray, cache_salt: str | None = None
    ) -> Blocks:
        """Return the full blocks that are cached of a prompt, from its beginning on, in the host's memory.

        They come from requests that run and from former ones, for another engine or for this one later.
        Blocks that were computed with an adapter are left out: another engine could not know that its adapter
        is the same. The export takes place between two runs and delays the second. Raises `InputError` where
        there is no prefix cache, or its scales are measured.
        """
        self.refuse_here("export blocks")
        prompt = self.door.checked_prompt(prompt_token_ids, cache_salt)
        return self._worker.ask(lambda driver: driver.exchange.export_blocks(prompt, cache_salt))

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Cache blocks of another engine, as if a request here had computed them and had finished.

        They go to free blocks; those in use stay as they are. Returns how many of the blocks can be found
        then, with those that were there before: all, or 0 if they do not fit. Raises `InputError`, and
        changes nothing, for blocks of another model, layout, dtype, size or groups of layers.
        """
        self.refuse_here("adopt blocks")
        check("blocks", blocks, "a Blocks", isinstance(blocks, Blocks))
        return (
            self._worker.ask(lambda driver: driver.exchange.adopt_blocks(blocks)) if blocks.num_blocks else 0
        )

    def hand_over(
        self,
        to: "Engine",
        prompt_token_ids: Sequence[int] | np.ndarray,
        cache_salt: str | None = None,
    ) -> int:
        """Export blocks to another engine, from device to device, without a copy in the host's memory.

        Meanwhile both devices need memory for the blocks once more. Returns what `to.adopt_blocks` would.
        """
        for engine in (self, to):
            engine.refuse_here("hand over blocks")
        prompt = self.door.checked_prompt(prompt_token_ids, cache_salt)

        def take(driver: Driver) -> tuple[Blocks, list[Chunk]]:
            block_format, chain = driver.exchange.block_format, driver.exchange.locate(prompt, cache_salt)
            named = Blocks(block_format, chain.token_ids, chain.present, cache_salt, {})
            return named, driver.exchange.chunks(chain)

        named, chunks = self._worker.ask(take)

        def put(driver: Driver) -> int:
            driver.exchange.block_format.require(named)
            return driver.exchange.adopt(named, iter(chunks))

        return to._worker.ask(put) if chunks else 0

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 for those that were loaded, and one more with each update."""
        return self._driver.device.weight_version

    @property
    def weights(self) -> nnx.State:
        """Weights as the engine keeps them. Its arrays are the engine's own: they must not be donated."""
        self.refuse_here("ask for the weights")
        return self._worker.ask(_weights)

    @property
    def is_paused(self) -> bool:
        """Whether requests wait until generation is resumed."""
        return self._worker.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, or some of its memory is away."""
        return self._worker.is_asleep

    @property
    def num_weights(self) -> int:
        """Numbers in the model's weights, with a head that is the embedding's table."""
        whole = self._driver.setup.whole
        return num_weights(whole) + whole.tie_word_embeddings * whole.vocab_size * whole.hidden_size

    def check_weights(self, weights: Any) -> None:
        """Raise `InputError` unless names and arrays could be a part of an update; nothing changes."""
        self._driver.lifecycle.read_names(named(weights))

    def update_weights(self, weights: Any, version: int | None = None) -> int:
        """Put new weights in the place of old ones, all or none; see `LLM.update_weights`."""
        self.refuse_here("update weights")
        if version is not None:
            version = checked_int("version", version, "None or an int >= 1", 1)
        update = (
            weights if isinstance(weights, nnx.State) else self._driver.lifecycle.read_names(named(weights))
        )

        def put(driver: Driver) -> tuple[list[Delta], int]:
            try:
                return driver.lifecycle.update_weights(update, version), driver.device.weight_version
            finally:
                if (
                    WEIGHTS not in driver.device.resident
                ):  # memory did not suffice: nothing runs without weights
                    self._worker.is_paused = self._worker.is_asleep = True

        return self._worker.act(put)

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let nothing run until `resume`; see `LLM.pause_generation`."""
        self.refuse_here("pause the engine")
        checked_choice("mode", mode, MODES)
        checked_bool("clear_cache", clear_cache)
        if mode == "wait":
            if self.is_sleeping:
                self._worker.ask(_check_runs)
            self._worker.drain()
        else:
            self._worker.pause(aborts=mode == "abort")
        if clear_cache and mode != "keep":
            self._worker.ask(lambda driver: driver.lifecycle.clear_cache())

    def resume(self) -> None:
        """Let requests run again. Raises `InputError` while memory is away."""
        self._worker.ask(lambda driver: driver.device.require(*MEMORY))
        self._worker.resume()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and give memory back; see `LLM.sleep`."""
        level = checked_int("level", level, "0, 1 or 2", 0, 2)
        self.pause(mode)
        self._worker.act(lambda driver: (driver.lifecycle.sleep(level), None))
        self._worker.is_asleep = True

    def release_kv_cache(self) -> None:
        """Give back the memory of K and V alone; see `LLM.release_kv_cache_memory`."""
        self.refuse_here("release memory")
        check("is_paused", self.is_paused, "True: call pause_generation or sleep before", self.is_paused)
        self._worker.act(lambda driver: (driver.lifecycle.release_kv_cache(), None))
        self._worker.is_asleep = True

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again, and go on when all is there; see `LLM.wake_up`."""
        self.refuse_here("wake the engine")
        what = TAGS if tags is None else tags
        if isinstance(what, str | bytes) or not all(tag in TAGS for tag in what):
            raise InputError(f"tags={shown(tags)} must be None or a list of {', '.join(map(repr, TAGS))}")
        wanted = list(what)

        def wake(driver: Driver) -> bool:
            driver.lifecycle.wake_up(wanted)
            return driver.device.resident == frozenset(MEMORY)

        if self._worker.ask(wake) and self._worker.is_asleep:
            self._worker.is_asleep = False
            self._worker.resume()

    def refuse_here(self, what: str) -> None:
        """Raise `RuntimeError` in the engine's own thread, which a sink runs in: it would wait for itself."""
        if self._worker.is_here:
            raise RuntimeError(f"a sink must not {what}: it runs in the engine's thread, which answers")

    def close(self) -> None:
        """Stop, and end what is in flight with `EngineDeadError`. May be called again."""
        self._close()
        self._driver.close()
        if self.door.grammars is not None:
            self.door.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weights(driver: Driver) -> nnx.State:
    driver.device.require(WEIGHTS)
    return own_weights(driver.device.params)


def _check_runs(driver: Driver) -> None:
    """Raise `InputError` if requests are kept, and the memory that they need is away."""
    if driver.has_work:
        driver.device.require(*MEMORY)
