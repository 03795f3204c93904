"""`jaxpaged run-batch`: answer a file of requests. Imports nothing heavy at the top."""

import argparse
import asyncio
import os
from pathlib import Path

from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.commands.engine_options import add_engine_options, engine_options
from jaxpaged.commands.output import bar, write_stderr
from jaxpaged.commands.parser import EXIT_ERROR, Commands, require
from jaxpaged.commands.serve import add_model_options, server_options
from jaxpaged.config import config_of

NEEDS = ("fastapi", "prometheus_client")


def add_run_batch(commands: Commands) -> None:
    """Add the command to the command line."""
    batch = commands.add_parser(
        "run-batch", help="answer a file of requests, in the form of OpenAI's batches"
    )
    batch.set_defaults(command=run)
    group = batch.add_argument_group("batch")
    group.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="JSON lines, each with custom_id, method, url and body; - for standard input",
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="file to add a line to for each answer as it comes; requests answered there are skipped",
    )
    group.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="requests in flight at a time (default: four times the sequences that run together)",
    )
    group.add_argument("--max-body-bytes", type=int, help="largest request body (default 4 MiB)")
    group.add_argument("--max-nesting", type=int, help="deepest nesting of a request's JSON (default 64)")
    add_model_options(group)
    add_engine_options(batch)


def run(args: argparse.Namespace) -> int:
    """Answer a batch. Returns: the exit code. Raises `InputError`, also where packages are missing."""
    options = server_options(args)
    engine = engine_options(args)
    config = config_of(engine)  # mistakes are reported before anything heavy is loaded
    if options.lora_modules:
        check("enable_lora", config.enable_lora, "True for adapters", config.enable_lora)
    max_inflight = 4 * config.max_num_seqs * config.data_parallel_size
    if args.max_inflight is not None:
        max_inflight = checked_int("max_inflight", args.max_inflight, "an int in [1, 65536]", 1, 65536)
    _check_files(args.input_file, args.output_file)
    require(NEEDS, "serve")

    from jaxpaged.api.async_llm import AsyncLLM
    from jaxpaged.engine.handle import EngineDeadError
    from jaxpaged.serve import batch, batch_files

    if config.process_id:  # works for process 0, which reads the batch; ends by `SystemExit`
        AsyncLLM(args.model, **engine)
    total = batch_files.count(args.input_file)
    with batch_files.Output(args.output_file) as output:
        llm = AsyncLLM(args.model, **engine)
        try:
            with bar(total=total, desc="batch", unit="line") as shown:
                counts = asyncio.run(
                    batch.run(
                        batch.batch_app(llm, str(args.model), options),
                        batch_files.read(args.input_file, options.max_body_bytes),
                        output,
                        max_inflight=max_inflight,
                        max_body_bytes=options.max_body_bytes,
                        progress=shown.update,
                    )
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f": {output.num_written} answers are written") from None
        except EngineDeadError as error:
            write_stderr(
                f"jaxpaged: {error}; {output.num_written} answers are written, and another run goes on from "
                "there"
            )
            return EXIT_ERROR
        finally:
            llm.shutdown()
    write_stderr(
        f"{counts.answered} answers are written, {counts.failed} of them with an error; "
        f"{counts.skipped} were there before"
    )
    return 0


def _check_files(input_file: str, output_file: str) -> None:
    for name, file in (("--input-file", input_file), ("--output-file", output_file)):
        is_url = "://" in file
        check(name, file, "the name of a file, not of a place on the web", not is_url and "\0" not in file)
    if input_file != "-":
        check("--input-file", input_file, "a file that exists", Path(input_file).exists())
        same = Path(output_file).exists() and os.path.samefile(input_file, output_file)
        if same:
            raise InputError(f"--output-file {output_file!r} must be another file than --input-file")
