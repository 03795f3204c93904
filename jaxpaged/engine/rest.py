"""Rest: an engine's pauses, its sleep, and the update of its weights, for any thread."""

from collections.abc import Callable, Collection
from typing import Any

from flax import nnx

from jaxpaged.checks import InputError, check, checked_bool, checked_choice, checked_int, shown
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.request import Delta
from jaxpaged.engine.residence import MEMORY, WEIGHTS
from jaxpaged.engine.updates import own_weights
from jaxpaged.models.changes import named
from jaxpaged.models.names import num_weights

MODES = "abort", "wait", "keep"
SCHEDULING = "scheduling"
TAGS = *MEMORY, SCHEDULING


class Rest:
    """The part of an engine that lets it rest, and gives it new weights."""

    _driver: Driver
    _worker: Any
    refuse_here: Callable[[str], None]

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 for those that were loaded, and one more with each update."""
        return self._driver.weight_version

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
        self._driver.read_names(named(weights))

    def update_weights(self, weights: Any, version: int | None = None) -> int:
        """Put new weights in the place of old ones, all or none; see `LLM.update_weights`."""
        self.refuse_here("update weights")
        if version is not None:
            version = checked_int("version", version, "None or an int >= 1", 1)
        found = weights if isinstance(weights, nnx.State) else self._driver.read_names(named(weights))

        def update(driver: Driver) -> tuple[list[Delta], int]:
            try:
                return driver.update_weights(found, version), driver.weight_version
            finally:
                if WEIGHTS not in driver.resident:  # memory did not suffice: nothing runs without weights
                    self._worker.is_paused = self._worker.is_asleep = True

        return self._worker.act(update)

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
            self._worker.ask(Driver.clear_cache)

    def resume(self) -> None:
        """Let requests run again. Raises `InputError` while memory is away."""
        self._worker.ask(lambda driver: driver.require(*MEMORY))
        self._worker.resume()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and give memory back; see `LLM.sleep`."""
        level = checked_int("level", level, "0, 1 or 2", 0, 2)
        self.pause(mode)
        self._worker.act(lambda driver: (driver.sleep(level), None))
        self._worker.is_asleep = True

    def release_kv_cache(self) -> None:
        """Give back the memory of K and V alone; see `LLM.release_kv_cache_memory`."""
        self.refuse_here("release memory")
        check("is_paused", self.is_paused, "True: call pause_generation or sleep before", self.is_paused)
        self._worker.act(lambda driver: (driver.release_kv_cache(), None))
        self._worker.is_asleep = True

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again, and go on when all is there; see `LLM.wake_up`."""
        self.refuse_here("wake the engine")
        what = TAGS if tags is None else tags
        if isinstance(what, str | bytes) or not all(tag in TAGS for tag in what):
            raise InputError(f"tags={shown(tags)} must be None or a list of {', '.join(map(repr, TAGS))}")
        wanted = list(what)

        def wake(driver: Driver) -> bool:
            driver.wake_up(wanted)
            return driver.resident == frozenset(MEMORY)

        if self._worker.ask(wake) and self._worker.is_asleep:
            self._worker.is_asleep = False
            self._worker.resume()


def _weights(driver: Driver) -> nnx.State:
    driver.require(WEIGHTS)
    return own_weights(driver.params)


def _check_runs(driver: Driver) -> None:
    """Raise `InputError` if requests are kept, and the memory that they need is away."""
    if driver.has_work:
        driver.require(*MEMORY)
