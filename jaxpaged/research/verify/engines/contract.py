"""Contract between the judge and an engine, version 1.

An adapter is an object, or a function that makes one, with `ask` and `token_ids`. The other names are
optional; properties that need a missing one are reported as not served.

| name | meaning |
| --- | --- |
| `ask(asks) -> answers` | answer these `Ask`s together, in company of each other; return when nothing runs |
| `token_ids` | ids that prompts may have, or strings of one word each: a sequence |
| `block_size` | tokens of a block of the prefix cache; 0 or missing: unknown |
| `num_blocks` | blocks that the longest request could have; 0 or missing: unknown |
| `num_groups` | groups of layers with blocks of their own; missing: 1 |
| `serves` | set of "salt", "n", "abort", "adapter", "prompt_logprobs": fields of `Ask` with an effect |
| `adapters` | names of low-rank adapters that are loaded |
| `reset()` | forget all that is cached |
| `update()` | load the next version of the weights; `reset` loads the first again |
| `gauges()` | mapping of name to number; each must return to its start when nothing runs |
| `events()` | cache events since the last call, as `jaxpaged.kv_events.messages` has them |
| `close()` | end |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

VERSION = "1.0"
SERVED = ("salt", "n", "abort", "adapter", "prompt_logprobs")
type Token = int | str


@dataclass(frozen=True)
class Ask:
    """Greedy request. Only `prompt`, `max_tokens` and `adapter` may have an effect on the answer."""

    prompt: tuple[Token, ...]
    max_tokens: int
    salt: str | None = None
    adapter: str | None = None
    n: int = 1
    abort_after: int | None = None  # the client leaves after so many tokens
    prompt_logprobs: bool = False
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # such as min_tokens: they must not split the cache


@dataclass(frozen=True)
class Answer:
    """Answer to an `Ask`. A field that the engine does not tell is None."""

    tokens: tuple[tuple[Token, ...], ...]  # of each of n answers
    logprobs: tuple[tuple[float, ...], ...] | None = None  # of each token
    margins: tuple[tuple[float, ...], ...] | None = None  # how far each token is ahead of the next likely one
    prompt_logprobs: tuple[float, ...] | None = None  # from the second token of the prompt on
    cached: int | None = None  # prompt tokens found in the cache
    num_prompt: int | None = None
    error: str | None = None  # why there is no answer


class Adapter(Protocol):
    """Engine as the judge sees it; see the module for the optional names."""

    token_ids: Sequence[Token]

    def ask(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        """Answer requests together, and return when nothing runs."""
        ...


def serves(adapter: Adapter, what: str) -> bool:
    """Return whether an adapter has a field of `SERVED`, a size, or an optional method."""
    if what in SERVED:
        return what in getattr(adapter, "serves", ())
    if what in ("block_size", "num_blocks"):
        return bool(getattr(adapter, what, 0))
    return callable(getattr(adapter, what, None))
