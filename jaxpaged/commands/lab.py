"""The command line of `jaxpaged lab`. Imports nothing heavy at the top."""

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from jaxpaged.checks import InputError, check, checked_int, checked_number
from jaxpaged.commands.parser import Commands, require
from jaxpaged.config import EngineConfig, EvictionPolicy
from jaxpaged.contracts import versions
from jaxpaged.research.lab.combination import UNBOUNDED, Combination, default_cache_tokens

if TYPE_CHECKING:
    from jaxpaged.research.lab.decoders import Decoder
    from jaxpaged.research.lab.serving.replay import Served
    from jaxpaged.research.lab.serving.roofline import Roofline
    from jaxpaged.research.lab.sweep import Result
    from jaxpaged.research.lab.traces import Trace

TABLES = (".csv", ".md")
MOST_WARMUP = 1 - 1e-9
SERVED = 1000  # requests, with --out
DECODER = "Llama 3.1 8B"
PROMPT_TOKENS = 2048  # prompt tokens computed in one step
NARROW, WIDE = 12, 23  # columns of a policy's name, without and with its tables


def add_lab(commands: Commands) -> None:
    lab = commands.add_parser(
        "lab", help="simulate a request trace: hit rates by policy, block size and cache size"
    )
    lab.set_defaults(command=run)
    lab.add_argument(
        "trace",
        metavar="TRACE",
        help="JSON lines in Mooncake's format, Azure's CSV, or what LLM(..., record_trace=FILE) has written",
    )
    lab.add_argument(
        "--policies",
        type=_names,
        default=["lru"],
        metavar="NAME,...",
        help=f"eviction policies (default lru): {', '.join(get_args(EvictionPolicy))}, belady, or "
        "module:Name of one of yours",
    )
    lab.add_argument(
        "--block-size",
        type=_names,
        metavar="TOKENS,...",
        help="block sizes (default: the block size of the trace's own ids)",
    )
    lab.add_argument(
        "--cache-tokens",
        type=_names,
        metavar="TOKENS,...",
        help=f"cache sizes, or {UNBOUNDED} (default: 16384, each next four times as large, and {UNBOUNDED})",
    )
    lab.add_argument(
        "--tiers",
        metavar="device=TOKENS,host=TOKENS,disk=TOKENS",
        help="send the trace through one device's cache and the tiers below it, and tell what each gives; "
        f"a size may be {UNBOUNDED}",
    )
    lab.add_argument(
        "--warmup",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of requests that fill the cache first and are not counted (default 0.5)",
    )
    lab.add_argument(
        "--partial-blocks",
        action="store_true",
        help="let a prompt's last, partly filled block hit, too, as in simulators that know ids only",
    )
    lab.add_argument(
        "--resident",
        type=int,
        default=1,
        metavar="N",
        help="number of requests that hold their blocks at the same time (default 1)",
    )
    lab.add_argument(
        "--requests", type=int, metavar="N", help="use the first N requests of the trace (default: all)"
    )
    lab.add_argument(
        "--out", metavar="DIR", help="folder to write report.html, with plots, and report.json to"
    )
    lab.add_argument(
        "--table", metavar="FILE", help="file to write the table to, as CSV (.csv) or Markdown (.md)"
    )
    lab.add_argument("--json", action="store_true", help="print a JSON line for each combination")
    serving = lab.add_argument_group(
        "serving", "the engine's scheduler with each cache, in the time of a GPU at its peaks: a model"
    )
    serving.add_argument(
        "--serve",
        type=int,
        metavar="N",
        help=f"simulate serving the first N requests (default: {SERVED} with --out, else 0)",
    )
    serving.add_argument(
        "--gpu", default="h100", help="GPU of the model: a100, h100 (default), h200, b200 or 8xh200"
    )
    serving.add_argument(
        "--decoder",
        default=DECODER,
        help=f'language model: "{DECODER}" (default), "Llama 3.1 70B", command-r7b, '
        "gemma-3-27b, gpt-oss-20b, llama-4-scout, or a local config.json. Where layers read different "
        "tokens, each cache comes with block tables by kind of layer, and with one for all",
    )
    serving.add_argument(
        "--layer-kind",
        metavar="MODULE:NAME",
        help="kind of the decoder's layers that would read everything: one of yours",
    )
    serving.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences that run together (default 64)"
    )
    serving.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help=f"tokens computed in one step (default: max-num-seqs + {PROMPT_TOKENS})",
    )


def run(args: argparse.Namespace) -> None:
    """Replay the trace and print the results. Raises `InputError`."""
    checked_number("warmup", args.warmup, "in [0, 1)", 0, MOST_WARMUP)
    checked_int("resident", args.resident, "an int from 1 to 1024", 1, 1024)
    if args.requests is not None:
        checked_int("requests", args.requests, "an int >= 1", 1)
    num_served = args.serve if args.serve is not None else SERVED if args.out is not None else 0
    checked_int("serve", num_served, "an int >= 0", 0)

    from tqdm import tqdm

    from jaxpaged.contracts import layer_kinds
    from jaxpaged.engine import machine
    from jaxpaged.memory import eviction
    from jaxpaged.research.lab import belady, decoders, sweep, traces
    from jaxpaged.research.lab.serving import replay, roofline

    peak = roofline.named(args.gpu)
    decoder = decoders.named(args.decoder)
    if args.layer_kind is not None:
        decoder = decoders.with_kinds(decoder, layer_kinds.named(args.layer_kind))
    num_tokens = args.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = args.max_num_seqs + PROMPT_TOKENS
    config = EngineConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=num_tokens)
    if args.out is not None:
        require(("matplotlib",), "lab")
    is_table = args.table is None or Path(args.table).suffix in TABLES
    check("table", args.table, "a file that ends in .csv or .md", is_table)
    for name in args.policies:
        belady.named(name)
    trace = traces.read(args.trace)
    if args.requests is not None:
        trace = trace.first(args.requests)
    if args.tiers is not None:
        _print_tiers(args, trace, peak, decoder)
        return
    block_sizes = [_size("block_size", text, 1) for text in args.block_size or [str(trace.block_size)]]
    combinations = [
        Combination(policy, block_size, tokens, one_table)
        for block_size in block_sizes
        for policy in args.policies
        for one_table in _tables(policy, decoder)
        for tokens in _cache_tokens(args.cache_tokens, int(trace.input_lens.sum()), block_size)
    ]
    served = trace.first(num_served)
    # Not Belady's rule, for one: it needs to know the future, and who runs when depends on what was hit.
    in_engine = [
        each
        for each in combinations
        if num_served and (each.policy in eviction.EVICTION_POLICIES or versions.is_path(each.policy))
    ]
    machine.keep_on_disk()
    total = trace.num_requests * len(combinations) + served.num_requests * len(in_engine)
    if not args.json:
        print(_headline(trace, bool(in_engine), decoder.has_groups))
    results: list[Result] = []
    caches: list[Served] = []
    with tqdm(total=total, unit=" requests", disable=None, leave=False) as bar:
        sent = sweep.sweep(
            trace,
            combinations,
            warmup=args.warmup,
            partial=args.partial_blocks,
            resident=args.resident,
            decoder=decoder,
            progress=bar.update,
        )
        serving = replay.serve(
            served, in_engine, peak, config, decoder, warmup=args.warmup, progress=bar.update
        )
        for result in sent:
            results.append(result)
            is_served = result.combination in in_engine
            if is_served:
                caches.append(next(serving))
            with tqdm.external_write_mode():
                served_by = caches[-1] if is_served else None
                print(_line(result, served_by, args.json, decoder.has_groups), flush=True)
    if args.table is not None:
        _write_table(args.table, results)
    if args.out is not None:
        from jaxpaged.research.lab import report

        of_gpu = replay.Serving(args.gpu, args.decoder, config, served.num_requests, caches)
        command = shlex.join(["jaxpaged", *args.words])
        written = report.write(args.out, trace, results, of_gpu if caches else None, command)
        if not args.json:
            print(f"report: {written}")


def _print_tiers(args: argparse.Namespace, trace: "Trace", peak: "Roofline", decoder: "Decoder") -> None:
    """Replay the trace through tiers, and print the hits of each. Raises `InputError`."""
    from jaxpaged.research.lab import tiers

    sizes = tiers.sizes_of(args.tiers)
    check(
        "policies", ",".join(args.policies), "one policy, of the device, with tiers", len(args.policies) == 1
    )
    texts = args.block_size or [str(trace.block_size)]
    check("block_size", ",".join(texts), "one size with tiers", len(texts) == 1)
    result = tiers.replay(
        trace,
        sizes,
        policy=args.policies[0],
        block_size=_size("block_size", texts[0], 1),
        warmup=args.warmup,
        peak=peak,
        decoder=decoder,
    )
    if args.json:
        print(json.dumps(result.line()))
        return
    print(f"{'tier':<8} {'tokens':>14} {'hit tokens':>14} {'hit rate':>9} {'read, GB':>10}")
    for name, size in result.tokens.items():
        hits, read = result.hit_tokens[name], result.read_bytes.get(name, 0)
        size_text = UNBOUNDED if size is None else f"{size:,}"
        print(f"{name:<8} {size_text:>14} {hits:>14,} {hits / result.input_tokens:>9.4f} {read / 1e9:>10.1f}")
    line = result.line()
    mean, alone = line["modelled_ttft_s"]["mean"], line["modelled_ttft_uncached_s"]["mean"]
    print(f"hit rate {line['hit_rate']:.4f}; copied from the device: {result.stored_bytes / 1e9:.1f} GB")
    print(
        f"time to the first token, modelled, nobody waits: {mean:.3f} s in the mean, {alone:.3f} s uncached"
    )


def _write_table(path: str, results: "list[Result]") -> None:
    """Write a row for each combination. Raises `InputError`."""
    from jaxpaged.research.lab import tables

    rows = [result.line() for result in results]
    text = tables.to_csv(rows) if Path(path).suffix == ".csv" else tables.to_markdown(rows)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"table={path!r} cannot be written: {error}") from error


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
    """Return the cache sizes that were given, or those by default."""
    if texts is None:
        return default_cache_tokens(num_tokens, block_size)
    return [None if text == UNBOUNDED else _size("cache_tokens", text, block_size) for text in texts]


def _tables(policy: str, decoder: "Decoder") -> tuple[bool, ...]:
    """Return whether there is one block table, for each cache of a policy: both, if layers differ."""
    if not decoder.has_groups:
        return (False,)
    return (True,) if policy == "belady" else (False, True)


def _headline(trace: "Trace", is_served: bool, has_groups: bool) -> str:
    known = f"content known in blocks of {trace.block_size} tokens"
    width = WIDE if has_groups else NARROW
    columns = f"{'policy':<{width}} {'block size':>10} {'cache tokens':>14} {'hit rate':>9}"
    if is_served:
        columns += f" {'preemptions':>12} {'queue p50, s':>13} {'TTFT p50, s':>12} {'TPOT p50, ms':>13}"
    return (
        f"{trace.name} ({trace.format}): {trace.num_requests:,} requests in {trace.arrival_s[-1]:,.0f} s, "
        f"{trace.input_lens.mean():,.0f} tokens in and {trace.output_lens.mean():,.0f} out in the mean; "
        f"{'nothing known of content' if trace.content is None else known}\n{columns}"
    )


def _line(result: "Result", served: "Served | None", as_json: bool, has_groups: bool) -> str:
    """Return a line of output for a combination."""
    if as_json:
        return json.dumps(result.line() | ({} if served is None else {"served": served.line()}))
    each = result.combination
    width = WIDE if has_groups else NARROW
    row = f"{each.label:<{width}} {each.block_size:>10} {each.size:>14} {result.hit_rate:>9.4f}"
    if served is None:
        return row
    line = served.line()
    queue, ttft, tpot = (line[name].get("p50", math.nan) for name in ("queue_s", "ttft_s", "tpot_s"))
    return f"{row} {line['num_preemptions']:>12,} {queue:>13.3f} {ttft:>12.3f} {1000 * tpot:>13.2f}"
