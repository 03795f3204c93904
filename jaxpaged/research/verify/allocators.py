"""Verifying an allocator: random histories beside the oracle of its generation, and a short one that fails.

    report = verify_allocator(MyBlockPool, "v1")
    assert report.ok, report

What each kind takes:

* "v0", "v063": a class as vLLM's `BlockSpaceManager` of that version,
  `(block_size, num_gpu_blocks, num_cpu_blocks, watermark)`, with `can_allocate`, `allocate`, `append_slot`
  (0.6.3: `append_slots`), `fork`, `swap_out`, `swap_in`, `can_swap_in` (v0), `free`, `get_block_table` and
  `get_num_free_gpu_blocks`, `_cpu_blocks`.
* "v1", "v1_split": a class as V1's `BlockPool`, `(num_gpu_blocks, enable_caching, hash_block_size)`, to vLLM
  0.23 and since 0.24, with `get_new_blocks`, `free_blocks`, `touch`, `evict_blocks`, `cache_full_blocks`,
  `get_cached_block`, `reset_prefix_cache`, `get_num_free_blocks`, `blocks` and `null_block`. Its blocks'
  `block_hash` is whatever the pool likes, as long as it is equal for equal contents only.
* "policy": a `jaxpaged.memory.policies.Policy`; or functions `verb(state, inputs) -> (state, info)`, as
  `subjects.Theirs` says, with the name of the policy whose oracle they are to equal.

An operation that the oracle refuses, for want of blocks, must raise, whatever it likes. That is tried on a
`copy.deepcopy`, so that it may stop half way. So are blocks that are freed more often than they are held;
`class_lockstep` says what each generation makes of that.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.checks import (
    InputError,
    check,
    checked_bool,
    checked_choice,
    checked_int,
    checked_number,
    shown,
)
from jaxpaged.research.verify import class_lockstep, frameworks
from jaxpaged.research.verify.history import VERBS, History, Unusable
from jaxpaged.untrusted import read_json

KINDS = (*class_lockstep.GENERATIONS, "policy")
DISAGREEMENT = "disagreement: "
BY_CHANCE = "a history failed, and not when it was repeated: it depends on more than what was asked"
Make = Callable[[int], History]  # takes a block size


@dataclass(frozen=True)
class AllocatorReport:
    """Results of an allocator over random histories."""

    kind: str
    num_histories: int
    steps: int
    sentence: str | None = None  # where the two sides disagree
    history: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # a short one that leads there
    saved: Path | None = None
    name: str = ""  # the allocator's MODULE:NAME, if it has one
    seconds: float = 0.0
    seconds_to_shrink: float = 0.0

    @property
    def ok(self) -> bool:
        return self.sentence is None

    def __str__(self) -> str:
        if self.sentence is None:
            return (
                f"{self.kind}: {self.num_histories} histories of up to {self.steps} steps agree with the "
                f"oracle ({self.seconds:.1f} s)"
            )
        lines = [f"{self.kind}: FAILED {self.sentence}"]
        if self.history:
            lines.append(f"a short history that leads there ({self.seconds_to_shrink:.1f} s to find):")
        lines += [f"  {verb}({', '.join(map(str, args))})" for verb, args in self.history]
        if self.saved is not None:
            lines.append(
                f"again: jaxpaged verify allocator {self.name or 'MODULE:NAME'} --replay {self.saved}"
            )
        return "\n".join(lines)


def verify_allocator(
    theirs: Any,
    kind: str,
    *,
    policy: str | None = None,
    name: str | None = None,
    histories: int = 300,
    steps: int = 40,
    block_sizes: Sequence[int] = (1, 4),
    seed: int = 0,
    shrink_seconds: float = 60.0,
    save: Path | str | None = None,
) -> AllocatorReport:
    """Drive an allocator and its oracle through random histories, and shorten the first that fails.

    Args:
        kind: one of `KINDS`; see the module.
        policy: of kind "policy", whose oracle it is to equal: "lifo", "naive", "lru" or "lru_split".
        name: its MODULE:NAME, for replaying.
        histories: so many, shared out over the block sizes; each of up to `steps` steps.
        shrink_seconds: at most so long; 0: not at all.
        save: a folder for the failing history; None: it is not saved.
    """
    checked_choice("kind", kind, KINDS)
    checked_int("histories", histories, "at least 1", 1)
    checked_int("steps", steps, "at least 1", 1)
    checked_number("shrink_seconds", shrink_seconds, "at least 0", 0)
    if not block_sizes:
        raise InputError("block_sizes=() must be at least one")
    for size in block_sizes:
        checked_int("block_size", size, "from 1 to 64", 1, 64)
    try:
        from jaxpaged.research.verify import histories as random
    except ImportError as error:
        raise InputError("histories need hypothesis: pip install 'jaxpaged[verify]'") from error

    name = name or frameworks.path_of(theirs)
    make = maker(theirs, kind, name, policy)
    start = time.monotonic()
    try:
        for size in block_sizes:
            make(size)
    except Unusable as error:
        return AllocatorReport(kind, 0, steps, sentence=str(error), name=name)
    except AssertionError:  # a history finds it, and is saved
        pass
    for number, (size, count) in enumerate(_shares(histories, block_sizes)):
        of_size = functools.partial(make, size)
        lines = random.failing(of_size, size, max_examples=count, steps=steps, seed=seed + number)
        if lines is None:
            continue
        found_s = time.monotonic()
        lines = random.short(of_size, size, lines, shrink_seconds)
        found_there = random.failure(of_size, lines)  # none of what happens by chance
        history = _recorded(of_size, lines)
        return AllocatorReport(
            kind,
            histories,
            steps,
            sentence=str(found_there) if found_there else BY_CHANCE,
            history=tuple((verb, tuple(args)) for verb, args in lines),
            saved=None if save is None or history is None else history.save(Path(save)),
            name=name,
            seconds=found_s - start,
            seconds_to_shrink=time.monotonic() - found_s,
        )
    return AllocatorReport(kind, histories, steps, seconds=time.monotonic() - start)


def _shares(histories: int, block_sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield how many histories each block size gets: first a few of each, since many bugs are of one size
    alone.
    """
    few = histories // (10 * len(block_sizes))
    rest = histories - few * len(block_sizes)
    yield from ((size, few) for size in block_sizes if few)
    for number, size in enumerate(block_sizes):
        if count := rest // len(block_sizes) + (number < rest % len(block_sizes)):
            yield size, count


def maker(theirs: Any, kind: str, path: str, policy: str | None = None) -> Make:
    """Return a function that starts a history of an allocator, given the block size."""
    if kind != "policy":
        return lambda size: class_lockstep.ClassLockstep(kind, theirs, size, path)
    from jaxpaged.memory.policies import POLICIES, Policy
    from jaxpaged.research.verify.lockstep import Lockstep

    is_policy = isinstance(theirs, Policy)
    if policy is None and not (is_policy and theirs.name in POLICIES):
        raise InputError(f"policy=None must be the one that {path or 'it'} equals, of {', '.join(POLICIES)}")
    if policy is not None:
        checked_choice("policy", policy, POLICIES)
    oracle = policy or theirs.name
    if is_policy:
        return lambda size: Lockstep(theirs, size, save=False, path=path, oracle=oracle)
    return lambda size: Lockstep(oracle, size, save=False, theirs=theirs, path=path)


def replay(path: Path | str, theirs: Any = None) -> Iterator[str]:
    """Replay a saved history: yield a line for each step, and at the end whether the two sides agree.

    theirs: the allocator of a history of somebody's. The file only names it: nothing that a file names is
        imported.

    Raises `InputError` for a file that is no history, or that is of an allocator which is not given.
    """
    try:
        trace = read_json(Path(path).read_bytes())
        made_with, lines = (
            dict(trace["made_with"]),
            [(str(verb), list(args)) for verb, args in trace["history"]],
        )
        for verb, _ in lines:
            checked_choice("verb", verb, VERBS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} must be a file of a history: {error}") from error
    try:
        history = _made(made_with, theirs)
        for step, (verb, args) in enumerate(lines):
            done = history.run(verb, *args)
            yield f"{step}: {verb}({', '.join(map(str, args))}) {'done' if done else 'refused'}"
            yield f"   {history.shown()}"
    except AssertionError as error:
        yield f"{DISAGREEMENT}{error}"
    else:
        yield "the two sides agree"


def _made(made_with: dict[str, Any], theirs: Any) -> History:
    """Return an empty history from a file's description, with `theirs` if it is of a user's allocator."""
    kind, block_size = made_with.get("as"), made_with.get("block_size")
    size = checked_int("block_size", block_size, "from 1 to 64", 1, 64)
    if kind is None:  # our own functions
        from jaxpaged.memory.policies import POLICIES
        from jaxpaged.research.verify.lockstep import Lockstep

        policy = checked_choice("policy", made_with.get("policy"), POLICIES)
        use_jit, collide = (checked_bool(name, made_with.get(name)) for name in ("use_jit", "collide"))
        return Lockstep(policy, size, use_jit=use_jit, collide=collide, save=False)
    kind, named = checked_choice("as", kind, KINDS), made_with.get("path")
    check("path", named, "a string", isinstance(named, str))
    if theirs is None:
        raise InputError(f"the history is of {shown(named)}: give MODULE:NAME, it or another, to be run")
    return maker(theirs, kind, str(named), made_with.get("oracle"))(size)


def _recorded(make: Callable[[], History], lines: list[tuple[str, list[Any]]]) -> History | None:
    """Return a history of these lines that has been run; None if it cannot even be started."""
    try:
        history = make()
    except AssertionError:
        return None
    history.history = lines
    return history
