"""The command line of `jaxpaged bench`, and that of its `serve`. Imports nothing heavy at the top."""

import argparse
import sys
from pathlib import Path

from jaxpaged.checks import InputError, checked_int, checked_number
from jaxpaged.commands.bench_offline import add_latency, add_throughput
from jaxpaged.commands.parser import Commands, require

LIMITS = ("ttft", "tpot", "e2e")
WORKLOADS = ("ragged", "shared-prefix", "trace")


def add_bench(commands: Commands) -> None:
    """Add the command to the command line."""
    bench = commands.add_parser("bench", help="measure a server, or the engine")
    bench.set_defaults(command=lambda args: bench.print_help())
    kinds = bench.add_subparsers(metavar="WHAT", parser_class=type(bench))
    add_latency(kinds)
    add_throughput(kinds)
    serve = kinds.add_parser("serve", help="measure an OpenAI-compatible server under load")
    serve.set_defaults(command=run)
    server = serve.add_argument_group("server")
    server.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        help="address of the server (default http://127.0.0.1:8000)",
    )
    server.add_argument(
        "--model", help="model to name in requests (default: the first that the server lists)"
    )
    server.add_argument("--api-key", help="key of the server (default: $JAXPAGED_API_KEY, or none)")
    load = serve.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="closed loop: clients that send their next request when answered; several values run in order",
    )
    load.add_argument(
        "--rate",
        type=float,
        nargs="+",
        metavar="R",
        help="open loop: requests per second, as a Poisson process; with a trace, the speed of its clock",
    )
    load.add_argument(
        "--num-requests",
        type=int,
        default=128,
        help="requests to send (default 128); with a trace, its first ones",
    )
    load.add_argument("--num-warmups", type=int, default=4, help="warm-up requests, not counted (default 4)")
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for a request (default 600)"
    )
    load.add_argument("--seed", type=int, default=0)
    work = serve.add_argument_group("workload")
    work.add_argument("--workload", choices=WORKLOADS, default="ragged")
    work.add_argument(
        "--trace", metavar="FILE", help="trace of --workload trace, in any format of `jaxpaged lab`"
    )
    work.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        help="factor for a trace's lengths, for smaller models (default 1)",
    )
    for name, default, what in (
        ("prompt-tokens", (16, 256), "a prompt's own tokens"),
        ("output-tokens", (16, 128), "tokens to generate"),
        ("token-range", (1000, 40000), "ids that prompts are drawn from"),
    ):
        work.add_argument(
            f"--{name}",
            type=int,
            nargs=2,
            default=default,
            metavar=("LEAST", "MOST"),
            help=f"{what} (default {default[0]} to {default[1]})",
        )
    work.add_argument(
        "--shared-tokens", type=int, default=512, help="tokens of a shared prefix (default 512)"
    )
    work.add_argument("--num-prefixes", type=int, default=4, help="number of shared prefixes (default 4)")
    work.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature (default 0: greedy)"
    )
    results = serve.add_argument_group("results")
    results.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of ttft, tpot and e2e in ms: reports how many requests keep all of them",
    )
    results.add_argument("--output", metavar="FILE", help="file to add a JSON line to for each run")
    results.add_argument("--requests", metavar="FILE", help="file to add a JSON line to for each request")
    results.add_argument("--plot", metavar="FILE", help="file to draw the results into: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> None:
    """Measure. Raises `InputError`, also where nothing answers."""
    levels = _levels(args)
    limits = _limits(args.goodput)
    checked_int("num_requests", args.num_requests, "an int >= 1", 1)
    checked_int("num_warmups", args.num_warmups, "an int >= 0", 0)
    for name in ("prompt_tokens", "output_tokens", "token_range"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            raise InputError(f"{name}={[low, high]} must be two ints, 1 <= least <= most")
    checked_int("shared_tokens", args.shared_tokens, "an int >= 1", 1)
    checked_int("num_prefixes", args.num_prefixes, "an int >= 1", 1)
    checked_number("length_scale", args.length_scale, "in (0, 1]", 0, 1, above=True)
    if (args.workload == "trace") != (args.trace is not None):
        raise InputError("--trace must be given with --workload trace, and only then")
    require(("httpx", *(("matplotlib",) if args.plot else ())), "bench")

    from jaxpaged.research.bench import client, report, workloads

    asked = workloads.make(args)
    warmups = workloads.make(args, seed=args.seed + 1, num_requests=args.num_warmups)
    runs = client.measure(args, levels, asked, warmups)
    lines = []
    for level, measured in runs:
        line = report.summary(args, level, measured, limits)
        lines.append(line)
        print(report.line(line) if args.output is None else report.for_people(line), flush=True)
        for file, texts in (
            (args.output, [line]),
            (args.requests, [report.one(level, each) for each in measured]),
        ):
            if file is not None:
                _append(file, "".join(report.line(each) + "\n" for each in texts))
    if args.plot is not None:
        from jaxpaged.research.bench import plot

        plot.draw([measured for _, measured in runs], lines, args.plot)
    if any(line["failed"] for line in lines):
        print("jaxpaged: some requests failed: their lines in --requests say why", file=sys.stderr)


def _levels(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the levels to measure, in order: {"concurrency": n} or {"rate": r}."""
    if args.concurrency and args.rate:
        raise InputError("--concurrency and --rate must not be given together")
    for name, values in (("concurrency", args.concurrency), ("rate", args.rate)):
        for value in values or ():
            checked_number(name, value, "a number > 0", 0, above=True)
    if args.rate:
        return [{"rate": rate} for rate in args.rate]
    if args.workload == "trace" and not args.concurrency:
        return [{"rate": 1.0}]
    return [{"concurrency": n} for n in args.concurrency or [16]]


def _limits(texts: list[str]) -> dict[str, float]:
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            name = ""
        if name not in LIMITS:
            raise InputError(f"--goodput {text!r} must be one of {', '.join(LIMITS)}, a colon, and ms")
    return limits


def _append(file: str, text: str) -> None:
    try:
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise InputError(f"{file!r} cannot be written: {error}") from error
