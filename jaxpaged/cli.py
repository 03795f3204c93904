"""The command line: `jaxpaged generate`, `info`, `serve`, `run-batch`, `bench`, `verify` and `lab`.

Imports at the top are light, so that `--help` answers at once: a command imports jax when it runs.
"""

import sys
from collections.abc import Sequence

import jaxpaged
from jaxpaged.checks import InputError
from jaxpaged.commands.bench import add_bench
from jaxpaged.commands.generate import add_generate
from jaxpaged.commands.info import add_info
from jaxpaged.commands.lab import add_lab
from jaxpaged.commands.output import OutputError, discard_stdout, write_stderr
from jaxpaged.commands.parser import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USER_ERROR, Parser
from jaxpaged.commands.run_batch import add_run_batch
from jaxpaged.commands.serve import add_serve
from jaxpaged.commands.verify import add_verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    A command's own code is 0 unless it returns another one. A mistake of the user is 2, with one line on
    standard error; Ctrl-C is 130.
    """
    try:
        args = parser().parse_args(argv)
        args.words = sys.argv[1:] if argv is None else [*argv]  # as they were given, for who repeats them
        code = args.command(args)
    except (InputError, OutputError) as error:
        write_stderr(f"jaxpaged: {' '.join(str(error).split())}")
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of standard output has gone: nothing is left to say to it
        discard_stdout()
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        write_stderr(f"jaxpaged: interrupted{interrupt}")
        return EXIT_INTERRUPTED
    return code or 0


def parser() -> Parser:
    """Return the parser of the command line, with all commands."""
    made = Parser(prog="jaxpaged", description="Generate text with a paged KV cache, in JAX.")
    made.add_argument("--version", action="version", version=f"jaxpaged {jaxpaged.__version__}")
    made.set_defaults(command=lambda args: made.print_help())
    commands = made.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for add in (add_generate, add_info, add_serve, add_run_batch, add_bench, add_verify, add_lab):
        add(commands)
    return made
