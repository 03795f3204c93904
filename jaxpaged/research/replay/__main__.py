"""A replay in words: `python -m jaxpaged.research.replay FILE`."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.engine import machine
from jaxpaged.memory.invariants import InvariantError, check_invariants
from jaxpaged.research.replay.dump import Dump, load
from jaxpaged.research.replay.stepper import Step, replay, tables_of, with_model
from jaxpaged.status import PagedMemoryError, Status
from jaxpaged.step.state import EngineState, FinishReason, Phase


def describe(number: int, step: Step) -> Iterator[str]:
    """Yield a step as text: a line for the whole, and one for each row that changed."""
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
    """Yield the contents of a dump as text: the sizes, and each row that has a request."""
    state, tables, limits = dump.state, dump.state.tables, dump.step_config
    versions = ", ".join(f"{name} {version}" for name, version in dump.made_with.items())
    yield f"made with {versions}"
    yield (
        f"{tables.max_seqs} rows of {state.rows.token_ids.shape[1]} tokens, "
        f"{limits.max_num_seqs} run together; blocks of {tables.block_size} tokens{_free_blocks(state)}"
    )
    for row in np.flatnonzero(state.rows.phase != Phase.EMPTY).tolist():
        phase = Phase(int(state.rows.phase[row])).name
        done = sum(int(each.seq_lens[row]) for each in tables_of(state).values())
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
    """Yield the row's block tables, on the device and on the host, where they changed."""
    old = {} if before is None else tables_of(before)
    for name, tables in tables_of(after).items():
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
    pools = {name: tables.pool for name, tables in tables_of(state).items()}
    return "".join(
        f"; {sum(q.num_free for q in p.queues)} of {p.num_blocks - 1} {name}blocks free"
        for name, p in pools.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the replay of a file; the exit code is 0, or 2 with one line about the user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpaged.research.replay",
        description="Step an engine's state from a file, and say what happens.",
    )
    parser.add_argument("file", help="file written by jaxpaged.research.replay.report or dump")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="largest number of steps (default: until all requests are done)",
    )
    parser.add_argument(
        "--model", help="model that answers instead of a stand-in; only for a state without computed tokens"
    )
    parser.add_argument(
        "--layout", metavar="MODULE:NAME", help="layout of yours, imported only if it is named here"
    )
    for part in ("policy", "attention", "sampler"):
        parser.add_argument(
            f"--{part}", metavar="MODULE:NAME", help=f"{part} of yours, imported only if it is named here"
        )
    args = parser.parse_args(argv)
    try:
        dump = load(
            args.file, args.layout, policy=args.policy, attention=args.attention, sampler=args.sampler
        )
        model = None
        if args.model is not None:
            dump, model = with_model(args.model, dump)
        machine.keep_on_disk()
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
