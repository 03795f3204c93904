"""For a bug report: an engine's state in a file, and what it does from there, step by step.

    replay.report(engine, "report.npz")      # or llm.engine; while it runs, or after it has stopped

    python -m jaxpaged.replay report.npz     # who runs, who gives way, and with which blocks

The file has everything of an `EngineState` but K and V: so it has the requests' tokens. Look before you
send it.

What is faithful: the step is the engine's own, and all it decides depends on small integers that the file
has. Of an answer's tokens scheduling sees only which are stop tokens, and in the prefix cache which contents
are equal. So without K and V a stand-in answers: with the tokens that the file has for a request (`answers`),
else with one that is no stop token. Where none are recorded, a replay may differ from the first step in which
the real answer has a stop token, or is equal, or is not, to another that is looked up. Log-probabilities mean
nothing. A request still queued on the host takes a row before the first step in which one is free; the engine
gives it one between two runs, which may be some steps later, and may be another row.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jaxpaged
from jaxpaged.config import EngineConfig, InputError, check
from jaxpaged.engine import loop, plan, scheduler
from jaxpaged.engine import state as states
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.scheduler import Decision, Limits
from jaxpaged.engine.state import EngineState, FinishReason, HostPool, Phase, Rows
from jaxpaged.engine.step import StepConfig
from jaxpaged.memory import kv_cache, policies, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import InvariantError, check_invariants
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import loading
from jaxpaged.models.attention import AttentionBatch
from jaxpaged.models.llama import Llama
from jaxpaged.status import PagedMemoryError, Status

VERSION = 1  # of the file's format
NO_KV = KVCache(k=(), v=())


@dataclasses.dataclass(frozen=True)
class Event:
    """What came from outside, after so many steps: a request, or the wish to give one up."""

    num_steps: int  # made since the dump
    request: Rows | None = None  # NumPy arrays of one line, as `Door.write` fills it
    abort: int | None = None  # an arrival


@dataclasses.dataclass(frozen=True)
class Dump:
    """What a file says."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    events: tuple[Event, ...]  # those of one moment in the order in which they came
    answers: dict[int, list[int]]  # tokens known of requests' answers, from their first, by arrival
    made_with: dict[str, str]  # versions


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a replay. States are as in `Dump`."""

    before: EngineState  # as the last step left it: what came since is not in it
    decision: Decision
    after: EngineState
    num_queued: int  # requests without a row


def report(engine: Engine | Driver, path: str | os.PathLike[str]) -> None:
    """Write how an engine stands between two runs, with the requests that wait for a row. From any thread.

    It goes on as if nothing had been. One that has stopped, by an error too, can still be written, unless the
    error was in the run itself and took the state with it: then JAX says that an array has been deleted.
    """
    shot = engine.snapshot()
    events = [Event(0, _line(shot.queue, i)) for i in range(len(shot.queue.phase))]
    dump(shot.state, path, step_config=shot.step_config, vocab_size=shot.vocab_size, events=events)


def dump(
    state: EngineState,
    path: str | os.PathLike[str],
    *,
    step_config: StepConfig,
    vocab_size: int,
    events: Sequence[Event] = (),
    answers: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write a state, except K and V, and what came later, as .npz: arrays by name, and a JSON header."""
    cache, kv = state.tables.pool.prefix_cache, state.kv_cache
    check(
        "hash_fn",
        cache and cache.hash_fn,
        "prefix_cache.hash_block: no other can be written down",
        cache is None or cache.hash_fn is prefix_cache.hash_block,
    )
    requests = [event.request for event in events if event.request is not None]
    header = {
        "version": VERSION,
        "made_with": {"jaxpaged": jaxpaged.__version__, "jax": jax.__version__},
        "step_config": dataclasses.asdict(step_config),
        "vocab_size": vocab_size,
        "sizes": {
            "num_rows": state.tables.max_seqs,
            "max_model_len": state.rows.token_ids.shape[1],
            "max_blocks_per_seq": state.tables.max_blocks_per_seq,
            "block_size": state.tables.block_size,
            "device": _pool_sizes(state.tables),
            "host": state.host and _pool_sizes(state.host.tables),
        },
        "kv": {
            "num_layers": len(kv.k),
            "num_kv_heads": kv.k[0].shape[2] if kv.k else 1,
            "head_dim": kv.k[0].shape[3] if kv.k else 1,
            "dtype": str(kv.k[0].dtype) if kv.k else "float32",
        },
        "num_requests": len(requests),
        "events": [
            {"num_steps": e.num_steps, "abort": e.abort, "has_request": e.request is not None} for e in events
        ],
        "answers": {str(arrival): [*map(int, tokens)] for arrival, tokens in (answers or {}).items()},
    }
    lines = jax.tree.map(lambda *each: np.concatenate(each), *requests) if requests else None
    arrays = {"header": np.array(json.dumps(header))}
    for tree in ({"state": _put_kv(state, NO_KV, NO_KV)}, {"requests": lines}):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            arrays[_name(keys)] = np.asarray(leaf)
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: str | os.PathLike[str]) -> Dump:
    """Read what `dump` wrote. Raises `InputError`, one sentence, for a file that is none, or damaged."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _read(arrays)
    except InputError as error:
        raise InputError(f"dump {name!r}: {error}") from error
    except OSError as error:
        raise InputError(f"dump {name!r} cannot be read: {error.strerror or error}") from error
    except (
        Exception
    ) as error:  # NumPy, zipfile, JSON: each has errors of its own for what it cannot understand
        raise InputError(f"dump {name!r} must be a file that jaxpaged.replay wrote, undamaged") from error


def _read(arrays: Mapping[str, np.ndarray]) -> Dump:
    header = json.loads(str(arrays["header"]))
    version = header["version"]
    check("version", version, f"{VERSION}, the one that this jaxpaged reads", version == VERSION)

    def fill(tree: Any) -> Any:
        """The arrays by the names and shapes of `tree`."""

        def array(keys: Any, want: Any) -> np.ndarray:
            got = arrays[_name(keys)]
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise ValueError(f"{_name(keys)} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
            return got

        return jax.tree_util.tree_map_with_path(array, tree)

    sizes, num_requests = header["sizes"], header["num_requests"]
    state = fill({"state": jax.eval_shape(lambda: _new_state(**sizes, kv={}))})["state"]
    with_kv = jax.eval_shape(lambda: _new_state(**sizes, kv=header["kv"]))
    lines = states.empty_rows(num_requests, sizes["max_model_len"])
    if num_requests:
        lines = fill({"requests": lines})["requests"]
    requests = (_line(lines, i) for i in range(num_requests))
    limits = Limits(**header["step_config"]["limits"])
    return Dump(
        state=_put_kv(state, with_kv.kv_cache, with_kv.host and with_kv.host.kv_cache),
        step_config=StepConfig(**header["step_config"] | {"limits": limits}),
        vocab_size=header["vocab_size"],
        events=tuple(
            Event(e["num_steps"], next(requests) if e["has_request"] else None, e["abort"])
            for e in header["events"]
        ),
        answers={int(arrival): tokens for arrival, tokens in header["answers"].items()},
        made_with=header["made_with"],
    )


def replay(dump: Dump, model: Llama | None = None) -> Iterator[Step]:
    """Step the state until all is done; without a `model` the stand-in answers.

    Raises `InputError` for a model where the state has computed tokens: their K and V are not there.
    """
    config, state = dump.step_config, dump.state
    if model is not None:
        _refuse_computed(state)
    state = jax.tree.map(jnp.array, _put_kv(state, NO_KV, NO_KV))
    if model is not None:
        state = _put_kv(state, *_zeros(dump.state))
    before, queue = dump.state, list[Rows]()
    events = sorted(dump.events, key=lambda event: event.num_steps)
    for num_steps in itertools.count():
        phases = np.asarray(state.rows.phase)  # a row whose request is given up now is free later
        while events and events[0].num_steps <= num_steps:
            event = events.pop(0)
            if event.request is not None:
                queue.append(event.request)
            if event.abort is not None:
                queue = [line for line in queue if line.arrival[0] != event.abort]
                state = loop.abort(state, np.array([event.abort], np.int32))
        queue.sort(key=lambda line: (line.priority[0], line.arrival[0]))
        for row in np.flatnonzero((phases == Phase.EMPTY) | (phases == Phase.FINISHED))[: len(queue)]:
            state = loop.submit(state, queue.pop(0), np.array([row], np.int32))
        if not (events or queue or scheduler.any_work(state.rows)):
            return
        answering = model or _stand_in(dump, state)
        state, decision = loop.step_once(*nnx.split(answering), state, config=config)
        # A copy, for the state is donated to the next step.
        after = _put_kv(jax.device_get(states.without_kv(state)), *_kv(dump.state))
        yield Step(before, jax.device_get(decision), after, len(queue))
        before = after


class StandIn(nnx.Module):
    """Answers slot i with `next_tokens[i]`, whatever it is shown and however it is sampled."""

    hidden_size = 1
    dtype = jnp.dtype("float32")

    def __init__(self, next_tokens: Int[Array, " max_num_seqs"], vocab_size: int) -> None:
        self.next_tokens = nnx.Variable(next_tokens)
        self.vocab_size = vocab_size

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "num_tokens 1"], KVCache]:
        return jnp.zeros((token_ids.shape[0], 1)), cache

    def logits(self, hidden: Float[Array, "max_num_seqs 1"]) -> Float[Array, "max_num_seqs vocab"]:
        is_next = self.next_tokens[...][:, None] == jnp.arange(self.vocab_size)
        return jnp.where(is_next, 0.0, -jnp.inf)


def _stand_in(dump: Dump, state: EngineState) -> StandIn:
    """The one for the next step. It has to know who will be in each slot: so the step is decided twice."""
    limits = dump.step_config.limits
    decision = jax.device_get(loop.schedule(state, limits=limits))
    rows = jax.device_get(state.rows)
    next_tokens = np.zeros(limits.max_num_seqs, np.int32)
    runs = ((rows.phase == Phase.RUNNING) & ~decision.preempted) | decision.admitted
    for slot, row in enumerate(np.flatnonzero(runs)):
        answer = dump.answers.get(int(rows.arrival[row]), [])
        place = int(rows.num_tokens[row] - rows.prompt_lens[row])
        stop = set(rows.stop_token_ids[row].tolist())
        known = place < len(answer)
        next_tokens[slot] = answer[place] if known else min(set(range(len(stop) + 1)) - stop)
    return StandIn(jnp.asarray(next_tokens), dump.vocab_size)


def describe(number: int, step: Step) -> Iterator[str]:
    """A step in words: a line for the whole, and one for each row to which something happened."""
    after, decision = step.after, step.decision
    waiting = np.sum(np.isin(after.rows.phase, (Phase.WAITING, Phase.SWAPPED)))
    yield (
        f"step {number}: {np.sum(decision.plan.num_new_tokens > 0)} ran, "
        f"{waiting + step.num_queued} wait{_free_blocks(after)}"
    )
    for row in range(after.tables.max_seqs):
        facts = [*_facts(step, row), *_blocks(step.before, after, row)]
        if facts:
            yield f"  row {row}, request {after.rows.arrival[row]}: {'; '.join(facts)}"
    if after.status != step.before.status:
        yield f"  error: {PagedMemoryError(Status(int(after.status)))}"
    try:
        check_invariants(after.tables)
    except InvariantError as error:
        yield f"  broken: {error}"


def describe_start(dump: Dump) -> Iterator[str]:
    """What a file holds: the sizes, and each row that has a request."""
    state, tables, limits = dump.state, dump.state.tables, dump.step_config.limits
    versions = ", ".join(f"{name} {version}" for name, version in dump.made_with.items())
    yield f"made with {versions}"
    yield (
        f"{tables.max_seqs} rows of {state.rows.token_ids.shape[1]} tokens, "
        f"{limits.max_num_seqs} run together; blocks of {tables.block_size} tokens{_free_blocks(state)}"
    )
    for row in np.flatnonzero(state.rows.phase != Phase.EMPTY).tolist():
        phase = Phase(int(state.rows.phase[row])).name
        done = sum(int(each.seq_lens[row]) for each in _tables(state).values())
        tokens = f"{state.rows.prompt_lens[row]} prompt tokens, {state.rows.num_tokens[row]} in all"
        facts = [phase, tokens, f"{done} computed", *_blocks(None, state, row)]
        yield f"  row {row}, request {state.rows.arrival[row]}: {'; '.join(facts)}"


def _facts(step: Step, row: int) -> Iterator[str]:
    old, new, decision = step.before.rows, step.after.rows, step.decision
    arrives = old.phase[row] == Phase.EMPTY or old.arrival[row] != new.arrival[row]
    if arrives and new.phase[row] != Phase.EMPTY:
        yield f"submitted, {new.prompt_lens[row]} prompt tokens"
    if decision.preempted[row]:
        yield "preempted, swapped out" if decision.swapped[row] else "preempted, to be recomputed"
    if decision.admitted[row]:
        swapped = not arrives and old.phase[row] == Phase.SWAPPED
        yield "swapped in" if swapped else f"admitted, {decision.num_hit_blocks[row]} blocks hit"
    if count := decision.plan.num_new_tokens[row]:
        yield f"prompt +{count}" if decision.plan.num_tiles[row] else f"decode +{count}"
    if (reason := new.finish_reason[row]) and (arrives or not old.finish_reason[row]):
        yield f"finished, {FinishReason(int(reason)).name}"


def _blocks(before: EngineState | None, after: EngineState, row: int) -> Iterator[str]:
    """The row's tables, device's and host's, where they differ from those before."""
    old = {} if before is None else _tables(before)
    for name, tables in _tables(after).items():
        line = np.asarray(tables.block_tables[row])
        old_line = np.asarray(old[name].block_tables[row]) if old else np.zeros_like(line)
        if np.any(line != old_line):
            yield f"{name}blocks {_runs(line[: np.max(np.flatnonzero(line), initial=-1) + 1])}"


def _runs(block_ids: np.ndarray) -> str:
    """Block ids in order, neighbours as first-last; "-" stands for one that has left the window."""
    runs: list[list[int]] = []
    for block_id in block_ids.tolist():
        if runs and runs[-1][-1] > 0 and block_id == runs[-1][-1] + 1:
            runs[-1].append(block_id)
        else:
            runs.append([block_id])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0] or "-") for run in runs]
    return " ".join(words) or "none"


def _free_blocks(state: EngineState) -> str:
    pools = {name: tables.pool for name, tables in _tables(state).items()}
    return "".join(
        f"; {p.free_queue.num_free} of {p.num_blocks - 1} {name}blocks free" for name, p in pools.items()
    )


def _tables(state: EngineState) -> dict[str, BlockTables]:
    """The device's tables, and the host's if there are any, by what their blocks are called."""
    return {"": state.tables} | ({} if state.host is None else {"host ": state.host.tables})


def _new_state(
    *,
    num_rows: int,
    max_model_len: int,
    max_blocks_per_seq: int,
    block_size: int,
    device: dict[str, Any],
    host: dict[str, Any] | None,
    kv: dict[str, Any],
) -> EngineState:
    """A state of the sizes that a header has; without K and V if it does not say theirs."""

    def tables(num_blocks: int, policy: str, has_prefix_cache: bool) -> BlockTables:
        return states.create_tables(
            num_blocks,
            num_rows,
            max_blocks_per_seq,
            block_size,
            prefix_caching=has_prefix_cache,
            policy=policies.named(policy),
        )

    def arrays(num_blocks: int) -> KVCache:
        if not kv:
            return NO_KV
        sizes = kv | {"num_blocks": num_blocks, "block_size": block_size, "dtype": jnp.dtype(kv["dtype"])}
        return kv_cache.create(**sizes)

    pool = None if host is None else HostPool(tables(**host), arrays(host["num_blocks"]))
    return states.create(tables(**device), arrays(device["num_blocks"]), max_model_len, pool)


def _pool_sizes(tables: BlockTables) -> dict[str, Any]:
    pool = tables.pool
    return {
        "num_blocks": pool.num_blocks,
        "policy": pool.policy.name,
        "has_prefix_cache": pool.prefix_cache is not None,
    }


def _kv(state: EngineState) -> tuple[KVCache, KVCache | None]:
    """The device's, and the host's."""
    return state.kv_cache, None if state.host is None else state.host.kv_cache


def _put_kv(state: EngineState, device: KVCache, host: KVCache | None) -> EngineState:
    pool = state.host
    if pool is not None and host is not None:
        pool = dataclasses.replace(pool, kv_cache=host)
    return dataclasses.replace(state, kv_cache=device, host=pool)


def _zeros(state: EngineState) -> tuple[KVCache, KVCache | None]:
    """Arrays for K and V, of the device and of the host."""

    device, host = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), _kv(state))
    return device, host and jax.device_put(host, jax.memory.Space.Host)


def _line(rows: Rows, i: int) -> Rows:
    return jax.tree.map(lambda array: array[i : i + 1], rows)


def _name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def _refuse_computed(state: EngineState) -> None:
    cache = state.tables.pool.prefix_cache
    cached = cache is not None and np.any(cache.last)
    if cached or any(np.any(tables.seq_lens) for tables in _tables(state).values()):
        raise InputError(
            "model: the state must have no computed tokens, nor any in the prefix cache, for their K and V "
            "are not in the file; replay it without a model"
        )


def with_model(name: str, dump: Dump) -> tuple[Dump, Llama]:
    """The dump with the attention that serves the model here, and the model (a name as `LLM` takes it)."""
    _refuse_computed(dump.state)
    checkpoint = loading.open_checkpoint(name)
    c, kv, window = checkpoint.config, dump.state.kv_cache, dump.step_config.limits.sliding_window
    shape = (len(kv.k), *kv.k[0].shape[2:]) if kv.k else ()
    rule = "the one that was served, of {} layers, KV heads and head_dim, vocabulary {} and window {}"
    fits = (c.num_layers, c.num_kv_heads, c.head_dim) == shape
    fits &= (c.vocab_size, c.sliding_window) == (dump.vocab_size, window)
    check("model", name, rule.format(shape, dump.vocab_size, window), fits)
    dtype: Any = str(kv.k[0].dtype)
    config = EngineConfig(dtype=dtype, block_size=dump.state.tables.block_size)
    step_config = dataclasses.replace(dump.step_config, decode_attention=plan.attention(config, c)[0])
    model = Llama(c, checkpoint.load_weights(), kv.k[0].dtype)
    return dataclasses.replace(dump, step_config=step_config), model


def main(argv: Sequence[str] | None = None) -> int:
    """Print the replay of a file; the exit code is 0, or 2 with one line about the user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpaged.replay",
        description="Step an engine's state from a file, and say what happens.",
    )
    parser.add_argument("file", help="what jaxpaged.replay.report or dump has written")
    parser.add_argument("--steps", type=int, metavar="N", help="at most so many (default: until all is done)")
    parser.add_argument(
        "--model", help="let it answer instead of a stand-in; for a state without computed tokens only"
    )
    args = parser.parse_args(argv)
    try:
        dump = load(args.file)
        model = None
        if args.model is not None:
            dump, model = with_model(args.model, dump)
        plan.keep_compiled_programs()
        for line in describe_start(dump):
            print(line)
        for number, step in enumerate(itertools.islice(replay(dump, model), args.steps), start=1):
            for line in describe(number, step):
                print(line)
    except InputError as error:
        print(f"jaxpaged: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
