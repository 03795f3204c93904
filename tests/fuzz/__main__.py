"""Fuzz parsers for longer than the tests do, or repeat one input: python -m tests.fuzz --help."""

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.fuzzer import FoundError, Fuzzer
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help=f"some of {', '.join(TARGETS)} (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=600, help="processor time for each target (default 600)"
    )
    parser.add_argument("--seed", type=int, default=0, help="determines the inputs (default 0)")
    parser.add_argument("--input", type=Path, help="parse this file alone")
    args = parser.parse_args()
    failed = False
    for name in args.target or TARGETS:
        with tempfile.TemporaryDirectory() as scratch:
            if args.input is not None:
                TARGETS[name].parse(args.input.read_bytes(), Path(scratch))
                continue
            fuzzer = Fuzzer(TARGETS[name], Path(scratch), args.seed)
            try:
                fuzzer.run(args.seconds)
            except FoundError as error:
                failed = True
                kept = Path(f"found-{name}")
                kept.write_bytes((Path(scratch) / f"found-{name}").read_bytes())
                print(f"FAILED {error}\n(kept as {kept})", flush=True)
                if error.__cause__ is not None:
                    traceback.print_exception(error.__cause__)
            print(
                f"{name}: {fuzzer.num_inputs} inputs, {fuzzer.num_refused} refused, corpus of "
                f"{len(fuzzer.corpus)}, {fuzzer.num_lines} lines reached, seed {args.seed}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
