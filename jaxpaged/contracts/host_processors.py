"""Logits processors by vLLM's classes, which the host calls in each step: slower than `contracts.processors`.

The loop hands the host the logits of all requests whose tokens are chosen, and waits. A class sees a batch as
vLLM's does: a line for each request, told by `BatchUpdate` when requests come and go. Logits are a tensor of
torch's where torch has been imported, as by scripts for vLLM; else a NumPy array.
"""

import functools
import inspect
import itertools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxpaged.checks import InputError


class MoveDirectionality(Enum):
    """Ways in which a request moves in a batch. None moves here."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Change of a batch: lines that were left, and lines that were taken. Fields are vLLM's."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]  # line, parameters, prompt, answer so far
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(ABC):
    """Base of classes that change the logits of a batch, as vLLM's."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `ValueError` for a request that cannot be served."""
        del sampling_params  # any will do

    @abstractmethod
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...
    @abstractmethod
    def apply(self, logits: Any) -> Any: ...
    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...
    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None: ...


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of classes that make a function of one request's logits, as vLLM's."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> Callable[..., Any] | None: ...

    def _new_state(self, params: Any, prompt: list[int] | None, answer: list[int]) -> Any:
        made = self.new_req_logits_processor(params)
        if not made:
            return None
        takes_prompt = len(inspect.signature(made).parameters) == 3
        return functools.partial(made, prompt, answer) if takes_prompt else functools.partial(made, answer)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Any) -> Any:
        for line, function in self.req_info.items():
            logits[line] = function(logits[line])
        return logits


def process_dict_updates(
    req_entries: dict[int, Any], batch_update: BatchUpdate | None, new_state: Callable[..., Any]
) -> bool:
    """Bring a mapping of lines to states up to date. Return whether it has changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for line, params, prompt, answer in batch_update.added:
        req_entries.pop(line, None)
        if (state := new_state(params, prompt, answer)) is not None:
            req_entries[line] = state
    for line in batch_update.removed:
        req_entries.pop(line, None)
    return before != req_entries


class Words(tuple[int, ...]):
    """A row's words, and what must live as long as they do."""

    keeps: Any = None


class _Asked:
    """Parameters of a request, by which its answers are processed."""

    def __init__(self, params: Any) -> None:
        self.params = params


class HostProcessors:
    """All of an engine's processors by vLLM's classes, as one function of the compiled loop.

    Raises `InputError` for a class that cannot be made.
    """

    def __init__(self, classes: Sequence[type[LogitsProcessor]], max_num_seqs: int, vocab_size: int) -> None:
        sizes = SimpleNamespace(
            speculative_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
        )
        torch = sys.modules.get("torch")
        device = "cpu" if torch is None else torch.device("cpu")
        self._made = []
        for each in classes:
            try:
                self._made.append(each(sizes, device, False))
            except Exception as error:
                what = f"logits_processors={each.__qualname__}: it cannot be made"
                raise InputError(f"{what}: {type(error).__name__}: {error}") from error
        self._numbers = itertools.count(1)
        self._asked: weakref.WeakValueDictionary[int, _Asked] = weakref.WeakValueDictionary()
        self._lines: dict[tuple[int, int], tuple[int, list[int]]] = {}  # line and answer of each request
        self._lock = threading.Lock()

    def take(self, params: Any) -> tuple[int, Any]:
        """Return a number for a request's parameters, and an object to keep as long as the number is used.

        Raises `InputError` for what a class refuses.
        """
        for each in self._made:
            try:
                each.validate_params(params)
            except ValueError as error:
                raise InputError(f"extra_args: {error}") from error
        asked = _Asked(params)
        with self._lock:
            number = next(self._numbers) % 2**31 or next(self._numbers)
            self._asked[number] = asked
        return number, asked

    def __call__(self, logits: Float[Array, "rows vocab"], request: Any) -> Float[Array, "rows vocab"]:
        """Return the logits as the host changes them. `request`: `contracts.processors.RequestRows`."""
        like = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        numbers, places = request.arguments[NUMBER], (request.prompt_lens, request.num_tokens)
        arrays = logits, numbers, request.request_ids, request.token_ids, *places
        return jax.pure_callback(self._by_host, like, *arrays)

    def _by_host(self, *arrays: Any) -> np.ndarray:
        logits, numbers, ids, token_ids, prompt_lens, num_tokens = map(np.asarray, arrays)
        made = np.array(logits)
        with self._lock:
            gone = [key for key in self._lines if key[0] not in self._asked]
            removed = {self._lines.pop(key)[0] for key in gone}
            rows, lines, added = list[int](), list[int](), list[Any]()
            for row in np.flatnonzero(numbers).tolist():
                key, tokens_of_row = (int(numbers[row]), int(ids[row])), token_ids[row]
                if (asked := self._asked.get(key[0])) is None:
                    continue
                if key not in self._lines:
                    taken = {line for line, _ in self._lines.values()}
                    line = next(each for each in itertools.count() if each not in taken)
                    self._lines[key] = line, []
                    prompt = tokens_of_row[: prompt_lens[row]].tolist()
                    added.append((line, asked.params, prompt, self._lines[key][1]))
                line, answer = self._lines[key]
                answer[:] = tokens_of_row[prompt_lens[row] : num_tokens[row]].tolist()
                rows.append(row)
                lines.append(line)
            if not rows:
                return made
            size = 1 + max(line for line, _ in self._lines.values())
            left = sorted(removed - {line for line, *_ in added})
            update = BatchUpdate(size, left, added) if left or added else None
            batch = np.zeros((size, logits.shape[1]), np.float32)
            batch[lines] = logits[rows]
            torch = sys.modules.get("torch")
            values = batch if torch is None else torch.from_numpy(batch)
            for each in self._made:
                each.update_state(update)
                values = each.apply(values)
            made[rows] = np.asarray(values)[lines]
        return made


NUMBER = "number of the request"  # argument by which `HostProcessors` finds a request
