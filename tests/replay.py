"""Repeat a history that a test has saved: `python -m tests.replay TRACE [--verbose]`."""

import argparse
import json
import pathlib
import sys

from jaxpaged.verify.lockstep import Lockstep


def replay(path: pathlib.Path, verbose: bool = False) -> None:
    """Run the history step by step; raise what the test raised, or nothing if it has been mended."""
    trace = json.loads(path.read_text())
    lockstep = Lockstep(**trace["made_with"], save=False)
    for step, (verb, args) in enumerate(trace["history"]):
        done = lockstep.run(verb, *args)
        if verbose:
            print(f"{step}: {verb}{tuple(args)} {'done' if done else 'refused'}")
            print(lockstep.device.block_tables.tolist(), lockstep.device.seq_lens.tolist())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay", description=__doc__)
    parser.add_argument("trace", type=pathlib.Path, help="a JSON file that a failed test has named")
    parser.add_argument("--verbose", action="store_true", help="print every step and the tables after it")
    options = parser.parse_args(argv)
    try:
        replay(options.trace, options.verbose)
    except AssertionError as error:
        print(f"disagreement: {error}", file=sys.stderr)
        return 1
    print("the two sides agree")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
