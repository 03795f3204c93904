"""The command line of `jaxpaged verify`. Imports nothing heavy at the top."""

import argparse
import ast
import sys
from typing import TYPE_CHECKING, Any

from jaxpaged.checks import InputError
from jaxpaged.commands import verify_parts
from jaxpaged.commands.parser import Commands

if TYPE_CHECKING:
    from jaxpaged.research.verify.kernels import Terms
    from jaxpaged.research.verify.report import Outcome

KINDS = ("v0", "v063", "v1", "v1_split", "policy")
EXIT_WRONG = 1  # something was found, or nothing was verified
OPERATIONS = (
    "paged_attention_v1", "paged_attention_v2", "tiled_paged_attention", "ragged_paged_attention",
    "reshape_and_cache", "copy_blocks", "swap_blocks", "merge",
)  # fmt: skip


def add_verify(commands: Commands) -> None:
    verify = commands.add_parser("verify", help="compare your kernel or allocator with our oracles")
    verify.set_defaults(command=lambda args: verify.print_help())
    kinds = verify.add_subparsers(metavar="WHAT", parser_class=type(verify))
    _add_kernel(kinds)
    _add_allocator(kinds)
    verify_parts.add_layout(kinds)
    verify_parts.add_policy(kinds)
    verify_parts.add_ptx(kinds)
    verify_parts.add_explore(kinds)
    verify_parts.add_engine(kinds)


def _add_kernel(kinds: Commands) -> None:
    kernel = kinds.add_parser("kernel", help="check a function over the cases of one of our operations")
    kernel.set_defaults(command=verify_kernel)
    kernel.add_argument(
        "function", metavar="MODULE:FUNCTION", help="function with the arguments of pallas_kernels.ops"
    )
    kernel.add_argument("--op", choices=OPERATIONS, required=True, help="operation that the function must do")
    kernel.add_argument(
        "--arrays", default="numpy", help="arrays that it takes: numpy (default), jax or torch"
    )
    kernel.add_argument("--weights", help="data type of its softmax weights (default: q's)")
    kernel.add_argument("--stale", default="nan", help="content of unseen slots: nan (default), or zero")
    kernel.add_argument(
        "--padding",
        default="invalid",
        help="block table entries past a row's tokens: invalid (default), or null (block 0)",
    )
    kernel.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME=VALUE,...",
        help="values of case fields that it supports, such as head_dim=64,128 dtype=float16",
    )
    kernel.add_argument(
        "--without",
        default="",
        metavar="FEATURE,...",
        help="features that it does not support, such as alibi,sinks",
    )
    _add_shrink_seconds(kernel)
    kernel.add_argument(
        "--save", default=".", metavar="DIR", help="folder for a failing case's arrays (default .)"
    )
    kernel.add_argument("--quiet", action="store_true", help="print the final report only")


def _add_shrink_seconds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shrink-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit for shrinking a failure (default 60); 0: no shrinking",
    )


def verify_kernel(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 if at least one case was verified and none was wrong."""
    from jaxpaged.research.verify import frameworks, report, shrinking

    terms = _terms(args)
    function = frameworks.named(args.function)
    if not callable(function):
        raise InputError(f"{args.function!r} must be a function, not {type(function).__name__}")

    def report_failure(outcome: "Outcome") -> None:
        if outcome.wrong and not args.quiet:
            print(f"{outcome.case} fails", file=sys.stderr, flush=True)

    result = report.verify_kernel(
        function, args.op, terms, name=args.function, shrink_seconds=args.shrink_seconds, save=args.save,
        progress=report_failure,
    )  # fmt: skip
    print(result)
    if result.wrong and not shrinking.is_possible():
        print("it would be made smaller with hypothesis: pip install 'jaxpaged[verify]'", file=sys.stderr)
    return 0 if result.ok else EXIT_WRONG


def _add_allocator(kinds: Commands) -> None:
    allocator = kinds.add_parser("allocator", help="check a class, or pure functions, over random histories")
    allocator.set_defaults(command=verify_allocator)
    allocator.add_argument(
        "allocator",
        metavar="MODULE:NAME",
        nargs="?",
        help="class or object, or MODULE alone for pure functions; left out with --replay of our own history",
    )
    allocator.add_argument(
        "--as",
        dest="kind",
        choices=KINDS,
        help="generation of vLLM that it must equal; policy: for pure functions",
    )
    allocator.add_argument(
        "--policy",
        help="policy of --as policy: lifo, naive, lru or lru_split (default: a Policy's own name)",
    )
    allocator.add_argument(
        "--histories", type=int, default=300, metavar="N", help="number of histories (default 300)"
    )
    allocator.add_argument(
        "--steps", type=int, default=40, metavar="N", help="steps of each history (default 40)"
    )
    allocator.add_argument(
        "--block-size", type=int, nargs="+", default=[1, 4], metavar="N", help="block sizes (default 1, 4)"
    )
    allocator.add_argument("--seed", type=int, default=0, help="seed of the histories (default 0)")
    _add_shrink_seconds(allocator)
    allocator.add_argument(
        "--save", default=".", metavar="DIR", help="folder for a failing history (default .)"
    )
    allocator.add_argument("--replay", metavar="TRACE", help="replay a saved history step by step")


def verify_allocator(args: argparse.Namespace) -> int:
    """Print the report, or a replay; the exit code is 0 if the two sides agree."""
    from jaxpaged.research.verify import allocators, frameworks

    may_be_module = args.kind in (None, "policy")
    theirs = None
    if args.allocator is not None:
        theirs = frameworks.named(args.allocator, may_be_module=may_be_module)
    if args.replay is not None:
        failed = False
        for line in allocators.replay(args.replay, theirs):
            print(line)
            failed = line.startswith(allocators.DISAGREEMENT)
        return EXIT_WRONG if failed else 0
    if theirs is None or args.kind is None:
        raise InputError("an allocator needs MODULE:NAME and --as, or --replay")
    report = allocators.verify_allocator(
        theirs, args.kind, policy=args.policy, name=args.allocator, histories=args.histories,
        steps=args.steps, block_sizes=args.block_size, seed=args.seed, shrink_seconds=args.shrink_seconds,
        save=args.save,
    )  # fmt: skip
    print(report)
    return 0 if report.ok else EXIT_WRONG


def _terms(args: argparse.Namespace) -> "Terms":
    from jaxpaged.research.verify.kernels import Terms

    only = {}
    for given in args.only:
        name, equals, values = given.partition("=")
        if not (name and equals and values):
            raise InputError(f"only={given!r} must be NAME=VALUE,...")
        only[name] = tuple(map(_value, values.split(",")))
    return Terms(
        arrays=args.arrays,
        weights=args.weights,
        stale=args.stale,
        padding=args.padding,
        only=only,
        without=frozenset(filter(None, args.without.split(","))),
    )


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
