"""The command line of `jaxpaged lab`. Imports nothing heavy at the top."""

import argparse
import json
from typing import TYPE_CHECKING

from jaxpaged.checks import InputError, checked_choice, checked_int, checked_number
from jaxpaged.lab.combination import UNBOUNDED, Combination
from jaxpaged.serve.command import Commands, require

if TYPE_CHECKING:
    from jaxpaged.lab.sweep import Result
    from jaxpaged.lab.traces import Trace

MOST_WARMUP = 1 - 1e-9


def add_lab(commands: Commands) -> None:
    lab = commands.add_parser("lab", help="hit rates of a request trace by policy, block and cache size")
    lab.set_defaults(command=run)
    lab.add_argument(
        "trace",
        metavar="TRACE",
        help="JSON lines in Mooncake's format, Azure's CSV, or what LLM(..., record_trace=FILE) has written",
    )
    lab.add_argument("--policies", type=_names, default=["lru"], metavar="NAME,...", help="default lru")
    lab.add_argument(
        "--block-size", type=_names, metavar="TOKENS,...", help="default: that of the trace's own ids"
    )
    lab.add_argument(
        "--cache-tokens",
        type=_names,
        metavar="TOKENS,...",
        help=f"sizes of the cache, or {UNBOUNDED} (default: from 16384 on by fours, and {UNBOUNDED})",
    )
    lab.add_argument(
        "--warmup",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="of the requests, which fill the cache and are not counted (default 0.5)",
    )
    lab.add_argument(
        "--partial-blocks",
        action="store_true",
        help="a prompt's last, partly filled block can be found, too, as in simulators that know ids only",
    )
    lab.add_argument(
        "--resident",
        type=int,
        default=1,
        metavar="N",
        help="the last so many requests hold their blocks at the same time (default 1)",
    )
    lab.add_argument("--out", metavar="DIR", help="write a report with plots, report.html, and report.json")
    lab.add_argument(
        "--gpu", default="h100", help="of the report's model of latencies: a100, h100 (default), h200 or b200"
    )
    lab.add_argument(
        "--json", action="store_true", help="a JSON line for each combination on standard output"
    )


def run(args: argparse.Namespace) -> None:
    """Replay, and tell. Raises `InputError`."""
    checked_number("warmup", args.warmup, "in [0, 1)", 0, MOST_WARMUP)
    checked_int("resident", args.resident, "an int from 1 to 1024", 1, 1024)

    from tqdm import tqdm

    from jaxpaged.engine import machine
    from jaxpaged.lab import belady, questions, sweep, traces

    checked_choice("gpu", args.gpu, questions.GPUS)
    if args.out is not None:
        require(("matplotlib",), "lab")
    for name in args.policies:
        belady.named(name)
    trace = traces.read(args.trace)
    block_sizes = [_size("block_size", text, 1) for text in args.block_size or [str(trace.block_size)]]
    combinations = [
        Combination(policy, block_size, tokens)
        for block_size in block_sizes
        for policy in args.policies
        for tokens in _cache_tokens(args.cache_tokens, trace.input_lens.sum(), block_size)
    ]
    machine.keep_on_disk()
    total = trace.num_requests * len(combinations)
    if not args.json:
        print(_headline(trace))
    done = []
    with tqdm(total=total, unit=" requests", disable=None, leave=False) as bar:
        results = sweep.sweep(
            trace,
            combinations,
            warmup=args.warmup,
            partial=args.partial_blocks,
            resident=args.resident,
            progress=bar.update,
        )
        for result in results:
            done.append(result)
            with tqdm.external_write_mode():
                print(json.dumps(result.line()) if args.json else _row(result), flush=True)
    if args.out is not None:
        from jaxpaged.lab import report

        written = report.write(args.out, trace, done, args.gpu)
        if not args.json:
            print(f"report: {written}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _size(name: str, text: str, least: int) -> int:
    rule = f"an int >= {least}"
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{name}={text!r} must be {rule}") from None
    return checked_int(name, value, rule, least, 2**62)


def _cache_tokens(texts: list[str] | None, num_tokens: int, block_size: int) -> list[int | None]:
    """The sizes asked for, or by fours up to what the trace could fill."""
    if texts is not None:
        return [None if text == UNBOUNDED else _size("cache_tokens", text, block_size) for text in texts]
    sizes: list[int] = []
    size = 2**14
    while size < num_tokens and len(sizes) < 7:
        sizes.append(size)
        size *= 4
    return [*(size for size in sizes if size >= block_size), None]


def _headline(trace: "Trace") -> str:
    known = f"content known in blocks of {trace.block_size} tokens"
    return (
        f"{trace.name} ({trace.format}): {trace.num_requests:,} requests in {trace.arrival_s[-1]:,.0f} s, "
        f"{trace.input_lens.mean():,.0f} tokens in and {trace.output_lens.mean():,.0f} out in the mean; "
        f"{'nothing known of content' if trace.content is None else known}\n"
        f"{'policy':<12} {'block size':>10} {'cache tokens':>14} {'hit rate':>9}"
    )


def _row(result: "Result") -> str:
    each = result.combination
    return f"{each.policy:<12} {each.block_size:>10} {each.size:>14} {result.hit_rate:>9.4f}"
