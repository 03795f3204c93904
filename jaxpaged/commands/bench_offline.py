"""`jaxpaged bench latency` and `throughput`, with vLLM's flags. Imports nothing heavy at the top."""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, check, checked_int, checked_number
from jaxpaged.commands.engine_options import add_engine_options, engine_options
from jaxpaged.commands.parser import Commands
from jaxpaged.config import config_of

DATASETS = ("random", "sharegpt", "custom", "prefix_repetition")
DEFAULT_PROFILE = "jaxpaged-profile"


def add_latency(kinds: Commands) -> None:
    latency = kinds.add_parser("latency", help="measure the latency of one batch of prompts")
    latency.set_defaults(command=run_latency)
    group = latency.add_argument_group("batch")
    for name, default, what in (
        ("input-len", 32, "tokens of a prompt"),
        ("output-len", 128, "tokens of an answer"),
        ("batch-size", 8, "prompts"),
        ("n", 1, "answers to a prompt; with --use-beam-search, beams"),
        ("num-iters-warmup", 10, "warm-up batches, not measured"),
        ("num-iters", 30, "measured batches"),
    ):
        group.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})"
        )
    group.add_argument("--use-beam-search", action="store_true", help="use beam search in place of sampling")
    _add_common(group)
    add_engine_options(latency)
    # What an earlier batch has left in the cache would be found.
    latency.set_defaults(enable_prefix_caching=False)


def add_throughput(kinds: Commands) -> None:
    throughput = kinds.add_parser(
        "throughput", help="measure prompts and tokens per second, all queued at once"
    )
    throughput.set_defaults(command=run_throughput)
    group = throughput.add_argument_group("requests")
    group.add_argument("--backend", choices=("vllm",), default="vllm", help="this engine, by vLLM's name")
    group.add_argument(
        "--dataset-name", choices=DATASETS, help="default: random; with --dataset-path, sharegpt"
    )
    group.add_argument(
        "--dataset-path", metavar="FILE", help="file of sharegpt (JSON) and custom (JSON lines)"
    )
    group.add_argument(
        "--num-prompts", type=int, default=1000, metavar="N", help="number of prompts (default 1000)"
    )
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="warm-up prompts, not measured"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="answers to a prompt (default 1)")
    group.add_argument("--input-len", type=int, metavar="N", help="same as --random-input-len")
    group.add_argument(
        "--output-len", type=int, metavar="N", help="tokens of each answer, whatever the dataset has"
    )
    group.add_argument("--prefix-len", type=int, metavar="N", help="same as --random-prefix-len")
    group.add_argument("--random-input-len", type=int, metavar="N", help="tokens of a prompt (default 1024)")
    group.add_argument("--random-output-len", type=int, metavar="N", help="tokens of an answer (default 128)")
    group.add_argument(
        "--random-prefix-len", type=int, metavar="N", help="tokens that all prompts begin with"
    )
    group.add_argument(
        "--random-range-ratio",
        default="0.0",
        metavar="R",
        help="lengths are drawn from (1 - R) to (1 + R) times the given ones: a number in [0, 1), or "
        '\'{"input": R, "output": R}\' (default 0)',
    )
    for name, default, what in (
        ("prefix-len", 256, "tokens of a shared prefix"),
        ("suffix-len", 256, "tokens after the prefix"),
        ("num-prefixes", 10, "number of shared prefixes"),
        ("output-len", 128, "tokens of an answer"),
    ):
        help_ = f"prefix_repetition: {what} (default {default})"
        group.add_argument(f"--prefix-repetition-{name}", type=int, default=default, metavar="N", help=help_)
    group.add_argument("--custom-output-len", type=int, metavar="N", help="custom: tokens of an answer")
    group.add_argument("--skip-chat-template", action="store_true", help="custom: use prompts as they are")
    group.add_argument("--no-oversample", action="store_true", help="use no request of a file twice")
    group.add_argument("--async-engine", action="store_true", help="use AsyncLLM in place of LLM")
    group.add_argument(
        "--prequeue-requests",
        action="store_true",
        help="accepted for vLLM: all requests are queued at once anyway",
    )
    group.add_argument("--lora-path", metavar="DIR", help="an adapter for the requests, with --enable-lora")
    group.add_argument("--lora-assignment", choices=("random", "round-robin"), default="random")
    _add_common(group)
    add_engine_options(throughput)


def _add_common(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of prompts and answers (default 0)"
    )
    group.add_argument("--disable-detokenize", action="store_true", help="do not decode the answers")
    group.add_argument(
        "--output-json", metavar="FILE", help="file to write the results to, under vLLM's names"
    )
    group.add_argument(
        "--profile",
        nargs="?",
        const=DEFAULT_PROFILE,
        metavar="DIR",
        help=f"run once under JAX's profiler, into a folder (default {DEFAULT_PROFILE}), and measure nothing",
    )


def run_latency(args: argparse.Namespace) -> None:
    """Measure batches one by one. Raises `InputError`."""
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        checked_int(name, getattr(args, name), "an int >= 1", 1)
    checked_int("num_iters_warmup", args.num_iters_warmup, "an int >= 0", 0)
    engine = _checked_engine_options(args)

    from jaxpaged.research.bench import offline

    offline.latency(args, engine)


def run_throughput(args: argparse.Namespace) -> None:
    """Measure all requests at once. Raises `InputError`."""
    choose_dataset(args)
    for name in ("num_prompts", "n"):
        checked_int(name, getattr(args, name), "an int >= 1", 1)
    checked_int("num_warmups", args.num_warmups, "an int >= 0", 0)
    for name, least in (
        ("random_input_len", 1),
        ("random_output_len", 1),
        ("random_prefix_len", 0),
        ("prefix_repetition_prefix_len", 0),
        ("prefix_repetition_suffix_len", 1),
        ("prefix_repetition_num_prefixes", 1),
        ("prefix_repetition_output_len", 1),
    ):
        checked_int(name, getattr(args, name), f"an int >= {least}", least)
    for name in ("output_len", "custom_output_len"):
        if getattr(args, name) is not None:
            checked_int(name, getattr(args, name), "an int >= 1", 1)
    args.random_range_ratio = range_ratios(args.random_range_ratio)
    given = args.lora_path is not None
    rule = "given with --enable-lora, and only then"
    check("--lora-path", args.lora_path, rule, given == bool(engine_options(args).get("enable_lora")))
    engine = _checked_engine_options(args)

    from jaxpaged.research.bench import offline

    offline.throughput(args, engine)


def choose_dataset(args: argparse.Namespace) -> None:
    """Resolve flags that mean the same option; as in vLLM, flags that begin with "random" take precedence."""
    if args.dataset_name is None:
        args.dataset_name = "random" if args.dataset_path is None else "sharegpt"
    rule = "given for sharegpt and custom, and only then"
    needs = args.dataset_name in ("sharegpt", "custom")
    check("--dataset-path", args.dataset_path, rule, needs == (args.dataset_path is not None))
    for option, general_option, default in (
        ("random_input_len", "input_len", 1024),
        ("random_output_len", "output_len", 128),
        ("random_prefix_len", "prefix_len", 0),
    ):
        if getattr(args, option) is None:
            value = getattr(args, general_option)
            setattr(args, option, default if value is None else value)


def range_ratios(text: str) -> tuple[float, float]:
    """Return the range ratios of prompts and of answers. Raises `InputError`."""
    rule = 'in [0, 1), or \'{"input": R, "output": R}\' with such numbers'
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    pair = (value.get("input", 0.0), value.get("output", 0.0)) if isinstance(value, dict) else (value, value)
    try:
        ratios = [checked_number("random_range_ratio", each, rule, 0, 1) for each in pair]
    except InputError:
        ratios = [1.0]
    check("random_range_ratio", text, rule, max(ratios) < 1)
    return ratios[0], ratios[1]


def _checked_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options. Raises `InputError` for a mistake in what both commands take."""
    checked_int("seed", args.seed, "an int in [0, 2**32)", 0, 2**32 - 1)
    engine = engine_options(args)
    config_of(engine)  # mistakes are reported before anything heavy is loaded
    if args.output_json is not None:  # and so is a file that cannot be written
        try:
            with Path(args.output_json).open("a", encoding="utf-8"):
                pass
        except (OSError, ValueError) as error:
            raise InputError(f"--output-json {args.output_json!r} cannot be written: {error}") from error
    return engine
