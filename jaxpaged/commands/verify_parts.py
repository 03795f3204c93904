"""The command line of `jaxpaged verify layout`, `policy`, `ptx`, `explore` and `engine`.

Imports nothing heavy at the top.
"""

import argparse
import os
from typing import Any

from jaxpaged.checks import InputError, checked_int
from jaxpaged.commands.parser import Commands

EXIT_WRONG = 1  # something was found, or nothing was verified


def add_layout(kinds: Commands) -> None:
    layout = kinds.add_parser("layout", help="check that a layout reads what it wrote, and states its error")
    layout.set_defaults(command=verify_layout)
    layout.add_argument(
        "layout", metavar="MODULE:NAME", help="a Layout, its class, or the name of one of ours"
    )


def verify_layout(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 if something was verified and no rule is broken."""
    from jaxpaged.research.verify import layouts as verifier
    from pallas_kernels import layouts

    try:
        layout = layouts.named(args.layout)
    except ValueError as error:
        raise InputError(str(error)) from error
    report = verifier.verify_layout(layout, name=args.layout)
    print(report)
    return 0 if report.ok else EXIT_WRONG


def add_policy(kinds: Commands) -> None:
    policy = kinds.add_parser(
        "policy", help="check that an eviction policy takes the blocks that plain Python takes"
    )
    policy.set_defaults(command=verify_policy)
    policy.add_argument(
        "policy", metavar="MODULE:NAME", help="a Ranking, a Policy, or the name of one of ours"
    )
    policy.add_argument(
        "--oracle",
        metavar="MODULE:CLASS",
        help="class in plain Python that it must equal (default: its own functions, for one block at a time)",
    )
    policy.add_argument("--traces", type=int, default=20, metavar="N", help="number of traces (default 20)")
    policy.add_argument(
        "--requests", type=int, default=40, metavar="N", help="prompts of the longest (default 40)"
    )
    policy.add_argument("--seed", type=int, default=0, help="seed of the traces (default 0)")


def verify_policy(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 if blocks were hit and evicted, and all were the right ones."""
    from jaxpaged.research.verify import frameworks, policies

    for name in ("traces", "requests"):
        checked_int(name, getattr(args, name), "an int from 4 to 10000", 4, 10_000)
    oracle = None if args.oracle is None else frameworks.named(args.oracle)
    report = policies.verify_policy(
        args.policy, oracle, name=args.policy, traces=args.traces, requests=args.requests, seed=args.seed
    )
    print(report)
    return 0 if report.ok else EXIT_WRONG


def add_ptx(kinds: Commands) -> None:
    ptx = kinds.add_parser("ptx", help="run compiled GPU kernels without a GPU, and look for their faults")
    ptx.set_defaults(command=verify_ptx)
    ptx.add_argument(
        "files", nargs="+", metavar="FILE", help="launches, as python -m benchmarks.compile_ptx writes them"
    )
    ptx.add_argument("--seeds", type=int, default=1, metavar="N", help="orders of warps to try (default 1)")
    ptx.add_argument("--counts", action="store_true", help="also print instructions by role")


def verify_ptx(args: argparse.Namespace) -> int:
    """Print a line for each launch and seed; the exit code is 0 if all are right and have no race."""
    from jaxpaged.research.ptx import report

    checked_int("seeds", args.seeds, "an int from 1 to 1000", 1, 1000)
    is_right = True
    for file in args.files:
        for line in report.lines(file, args.seeds, has_counts=args.counts):
            print(line.text, flush=True)
            is_right &= line.is_right
    return 0 if is_right else EXIT_WRONG


def add_explore(kinds: Commands) -> None:
    explore = kinds.add_parser(
        "explore", help="walk every interleaving of arrivals, aborts and steps in a small world"
    )
    explore.set_defaults(command=verify_explore)
    explore.add_argument(
        "world", metavar="WORLD", nargs="?", default="three", help="name of the world (default three)"
    )
    explore.add_argument(
        "--max-states",
        type=int,
        default=1_000_000,
        metavar="N",
        help="states after which the walk stops (default 1000000)",
    )
    explore.add_argument(
        "--no-oracle", action="store_true", help="leave out the comparison of each edge with the oracle"
    )


def verify_explore(args: argparse.Namespace) -> int:
    """Print the numbers of the walk; the exit code is 0 if all states were met and nothing was wrong."""
    from jaxpaged.research.verify.explore import lockstep, walk, worlds

    checked_int("max_states", args.max_states, "an int from 1 to 10000000", 1, 10_000_000)
    if args.world not in worlds.WORLDS:
        raise InputError(f"world={args.world!r} must be one of {', '.join(worlds.WORLDS)}")
    result = walk.explore(worlds.WORLDS[args.world], max_states=args.max_states)
    num_compared = 0
    if result.finding is None and not args.no_oracle:
        num_compared = lockstep.compare(result)
    print(result)
    if num_compared:
        print(f"{num_compared} edges are the oracle's")
    return 0 if result.finding is None and result.complete else EXIT_WRONG


def add_engine(kinds: Commands) -> None:
    engine = kinds.add_parser(
        "engine", help="check a server's or an adapter's answers over random histories of requests"
    )
    engine.set_defaults(command=verify_engine)
    engine.add_argument(
        "engine", metavar="URL|MODULE:NAME", help="server with OpenAI's interface, or an adapter"
    )
    engine.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time limit (default 60)")
    engine.add_argument("--seed", type=int, default=0, help="seed of the histories (default 0)")
    engine.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X",
        help="largest difference of log-probabilities that is right (default 0.05)",
    )  # fmt: skip
    engine.add_argument(
        "--slack-blocks", type=int, default=1, metavar="N",
        help="blocks at a prompt's end that need not be found (default 1)",
    )  # fmt: skip
    engine.add_argument(
        "--longest", type=int, default=96, metavar="N", help="tokens of the longest prompt (default 96)"
    )
    engine.add_argument(
        "--families", default="", metavar="NAME,...", help="families of histories (default: all)"
    )
    engine.add_argument(
        "--reference",
        metavar="URL|MODULE:NAME",
        help="engine whose answers are right, such as one without a cache",
    )
    engine.add_argument("--key", help="API key of the server (default: $JAXPAGED_API_KEY)")
    engine.add_argument("--model", help="model of the server (default: the first that it lists)")
    engine.add_argument(
        "--token-ids", type=int, nargs=2, metavar=("FIRST", "LAST"),
        help="ids of the tokens of prompts (default: prompts are English words)",
    )  # fmt: skip
    engine.add_argument(
        "--block-size", type=int, default=0, metavar="N", help="tokens of the server's blocks"
    )
    engine.add_argument(
        "--num-blocks", type=int, default=0, metavar="N", help="blocks of the server, to fill them"
    )
    engine.add_argument(
        "--adapter", action="append", default=[], metavar="NAME", help="low-rank adapter it serves"
    )
    engine.add_argument("--events", metavar="ENDPOINT", help="ZeroMQ endpoint of the server's cache events")
    engine.add_argument("--events-replay", metavar="ENDPOINT", help="endpoint that replays them")
    engine.add_argument(
        "--body", default="{}", metavar="JSON", help="fields added to each request of the server"
    )
    engine.add_argument("--json", metavar="FILE", help="file for the report as JSON")
    engine.add_argument("--html", metavar="FILE", help="file for the report as a page")


def verify_engine(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 if something was verified and every property holds."""
    from pathlib import Path

    from jaxpaged.research.verify.engines import judge, report

    reference = None if args.reference is None else _engine(args.reference, args)
    result = judge.verify_engine(
        _engine(args.engine, args),
        name=args.engine,
        seconds=args.seconds,
        seed=args.seed,
        tolerance=args.tolerance,
        slack_blocks=args.slack_blocks,
        longest=args.longest,
        families=tuple(filter(None, args.families.split(","))),
        reference=reference,
    )
    print(report.text(result))
    for path, written in ((args.json, report.as_json), (args.html, report.page)):
        if path:
            Path(path).write_text(written(result))
    return 0 if result.ok else EXIT_WRONG


def _engine(named: str, args: argparse.Namespace) -> Any:
    """Return the adapter of a URL, or the object that MODULE:NAME names; a class or a function makes one."""
    if named.startswith(("http://", "https://")):
        from jaxpaged.research.verify.engines.server import Facts, ServerAdapter

        facts = Facts(
            key=args.key or os.environ.get("JAXPAGED_API_KEY"),
            model=args.model,
            token_ids=None if args.token_ids is None else tuple(args.token_ids),
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            adapters=tuple(args.adapter),
            events=args.events,
            events_replay=args.events_replay,
            body=args.body,
        )
        return ServerAdapter(named, facts)
    from jaxpaged.research.verify import frameworks, hints

    engine = frameworks.named(named)
    if hasattr(engine, "ask") and not isinstance(engine, type):
        return engine
    try:
        return engine()
    except Exception as error:  # whatever a user's function raises
        raise InputError(f"{named!r} makes no adapter: {hints.raised(error)}") from error
