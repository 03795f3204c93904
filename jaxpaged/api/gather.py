"""Answers of one call to a model, prompt by prompt, as they finish or in the prompts' order."""

import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from jaxpaged.api.progress import Progress
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import Handle, Item, collect, or_raise
from jaxpaged.engine.request import Delta


class Group(NamedTuple):
    """One prompt of a call, and the handles of its answers."""

    place: int  # among the prompts that the caller gave
    text: str | None  # where it came as text
    handles: list[Handle]


type ToOutput = Callable[[Sequence[Handle], str | None, Sequence[Delta]], Any]


class Finished:
    """Iterator over the prompts of a call as they finish: each one's place, and its output.

    `items`: where the deltas of all handles come. `output` makes a prompt's output of its answers. A bar
    counts answers, and shows both speeds. Leaving the iteration, by whatever error, gives up what is left.
    Raises `EngineDeadError` if the engine stops, `TextError` if the tokenizer fails on an answer's tokens.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[Group],
        items: "queue.SimpleQueue[Item | None]",
        use_tqdm: bool | Callable[..., Any],
        output: ToOutput,
    ) -> None:
        self._items = items
        self.groups = groups
        self._left = _gather(engine, groups, items, use_tqdm, output)
        next(self._left)  # into its `try`: from here on it gives up what is left, whatever happens

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Any]:
        return next(self._left)

    def stop(self) -> None:
        """End the iteration after the prompts that have finished so far. A signal handler may call it."""
        self._items.put(None)

    def close(self) -> None:
        """Abort all prompts that have not finished."""
        self._left.close()


def _gather(
    engine: Engine,
    groups: Sequence[Group],
    items: "queue.SimpleQueue[Item | None]",
    use_tqdm: bool | Callable[..., Any],
    output: ToOutput,
) -> Generator[Any]:
    """Yield None first, then each prompt's place and output when all of its answers have ended."""
    group_of = {handle.request_id: group for group in groups for handle in group.handles}
    deltas: dict[int, list[Delta]] = {request_id: [] for request_id in group_of}
    num_left = {group.place: len(group.handles) for group in groups}
    progress = Progress(
        {group.handles[0].request_id: len(group.handles[0].request.prompt_token_ids) for group in groups}
    )
    bar_of = use_tqdm if callable(use_tqdm) else tqdm
    is_stopping = False
    try:
        yield None
        with bar_of(total=len(group_of), desc="answers", unit="req", disable=not use_tqdm) as bar:
            while num_left and not (is_stopping and items.empty()):
                item = items.get()
                if item is None:
                    is_stopping = True
                    continue
                delta = or_raise(item)
                deltas[delta.request_id].append(delta)
                bar.set_postfix_str(progress.after(delta), refresh=False)
                if not delta.finish_reason:
                    continue
                group = group_of[delta.request_id]
                num_left[group.place] -= 1
                if num_left[group.place]:
                    continue
                del num_left[group.place]
                bar.update(len(group.handles))
                answers = [collect(deltas.pop(handle.request_id)) for handle in group.handles]
                yield group.place, output(group.handles, group.text, answers)
    finally:  # the user's Ctrl-C, for one: what is left should not run on unseen
        engine.abort([h for group in groups for h in group.handles if h.request_id in deltas])


def in_order(finished: Finished, places: Iterable[int]) -> Iterator[Any]:
    """Yield each output as soon as it and all before it are there. `places`: of all prompts, rising."""
    held: dict[int, Any] = {}
    try:
        for place in places:
            while place not in held:
                its_place, output = next(finished)
                held[its_place] = output
            yield held.pop(place)
    finally:
        finished.close()
