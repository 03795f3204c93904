"""The command line: `jaxpaged generate`, `info`, `serve`, `run-batch`, `bench`, `verify` and `lab`.

Imports at the top are light, so that `--help` answers at once; jax comes in when a command runs.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jaxpaged
from jaxpaged.batch import prompt_files
from jaxpaged.batch.prompt_files import Asked, Refused
from jaxpaged.bench import command as bench_command
from jaxpaged.checks import InputError
from jaxpaged.command_line import EXIT_USER_ERROR, Parser
from jaxpaged.config import EngineConfig, config_of
from jaxpaged.lab import command as lab_command
from jaxpaged.lora import LoRARequest
from jaxpaged.options import flags_of
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve import batch_command
from jaxpaged.serve import command as serve_command
from jaxpaged.verify import command as verify_command

if TYPE_CHECKING:
    from jaxpaged.api.outputs import RequestOutput

EXIT_ERROR = 1  # of ours
MODEL_OPTIONS = ("tokenizer", "revision", "generation_config")  # of `LLM`, beside its engine's
EXIT_INTERRUPTED = 130  # as a shell says of Ctrl-C


class OutputError(Exception):
    """Standard output takes nothing more; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: its own (0, unless it says other), or 2 with one line about
    the user's mistake, or 130 after Ctrl-C.
    """
    try:
        args = _parser().parse_args(argv)
        code = args.command(args)
    except (InputError, OutputError) as error:
        _say(f"jaxpaged: {_one_line(str(error))}")
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say to it
        _forget_output()
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        _say(f"jaxpaged: interrupted{interrupt}")
        return EXIT_INTERRUPTED
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxpaged", description="Generate text with a paged KV cache, in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxpaged {jaxpaged.__version__}")
    parser.set_defaults(command=lambda args: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    generate = commands.add_parser("generate", help="answer prompts in one batch")
    generate.set_defaults(command=_generate)
    prompts = generate.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given repeatedly"
    )
    prompts.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a prompt a line; or JSON lines, each with 'prompt', 'prompt_token_ids' or 'messages', and with "
        "an 'id' to be repeated and sampling options of its own; - for standard input",
    )
    prompts.add_argument(
        "--skip-errors",
        action="store_true",
        help="answer the others where a prompt is refused, with an error in place of its answer",
    )
    prompts.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    sampling = generate.add_argument_group("sampling")
    for names, flag in flags_of(SamplingParams).values():
        sampling.add_argument(*names, **flag)
    generate.add_argument("--lora", metavar="DIR", help="answer with this adapter, one of PEFT's")
    generate.add_argument("--json", action="store_true", help="JSON lines on standard output, nothing else")
    _add_engine_options(generate)

    info = commands.add_parser("info", help="versions, devices, implementation, and the cache for a model")
    info.set_defaults(command=_info)
    info.add_argument("--seed", type=int, help="for requests without a seed (default 0)")
    _add_engine_options(info)

    serve_command.add_serve(commands, _add_engine_options, _engine_options)
    batch_command.add_run_batch(commands, _add_engine_options, _engine_options)
    bench_command.add_bench(commands, _add_engine_options, _engine_options)
    verify_command.add_verify(commands)
    lab_command.add_lab(commands)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, Parser):
        parser.takes_vllms = True
    group = parser.add_argument_group("engine", "flags of vLLM's that change nothing are accepted, too")
    group.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), a directory with config and safetensors, a .gguf file, or a hub id",
    )
    group.add_argument("--tokenizer", metavar="DIR", help="another than the model's: a directory or hub id")
    group.add_argument("--revision", help="of a hub id")
    group.add_argument(
        "--generation-config", help="sampling defaults: the model's own (auto, default), or none (vllm)"
    )
    for names, flag in flags_of(EngineConfig).values():
        group.add_argument(*names, **flag)
    group.add_argument(
        "--verbose", action="store_true", help="say on standard error what the engine chose, and why"
    )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options given of `LLM`'s; the others keep their defaults."""
    # `seed` is the request's on the command line.
    given = {name: getattr(args, name, None) for name in (*EngineConfig.__dataclass_fields__, *MODEL_OPTIONS)}
    return {name: value for name, value in given.items() if value is not None}


def _generate(args: argparse.Namespace) -> None:
    options = _engine_options(args)
    adapter = None
    if args.lora is not None:
        options["enable_lora"] = True
        adapter = LoRARequest("adapter", 1, args.lora)
    config_of(options)  # mistakes are told before anything heavy is loaded
    sampling = {name: getattr(args, name) for name in flags_of(SamplingParams)}
    SamplingParams(**sampling)
    asked = [
        *prompt_files.of_texts(args.prompt, sampling),
        *prompt_files.read(args.prompts_file, sampling, skip_errors=args.skip_errors),
    ]
    if not asked:
        raise InputError("no prompt: give --prompt or --prompts-file")

    from tqdm import tqdm

    from jaxpaged.api.llm import LLM
    from jaxpaged.api.progress import speeds
    from jaxpaged.engine.handle import EngineDeadError
    from jaxpaged.engine.texts import TextError

    start = time.perf_counter()
    num_written = num_refused = 0
    _log(args)
    if args.distributed_init is not None:
        _keep_output()
    try:
        llm = LLM(args.model, **options)
        loaded = time.perf_counter()
        answer = functools.partial(llm.generate_each, lora_request=adapter)
        answered = prompt_files.answered(
            asked, answer, llm.render_chat, chat=args.chat, skip_errors=args.skip_errors
        )
        num_prompt_tokens = num_new_tokens = 0
        for each, output in answered:
            with tqdm.external_write_mode():  # the bar, on the same terminal perhaps, makes room
                _write(_json_lines(num_written, each, output) if args.json else _text_block(each, output))
            num_written += 1
            if output is None:
                num_refused += 1
                continue
            num_prompt_tokens += len(output.prompt_token_ids)
            num_new_tokens += sum(len(answer.token_ids) for answer in output.outputs)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f": {num_written} of {len(asked)} answers are written") from None
    except (EngineDeadError, OutputError, TextError) as error:
        raise OutputError(f"{error}; {num_written} of {len(asked)} answers are written") from error
    seconds = time.perf_counter() - loaded
    _say(
        f"\nloaded and compiled in {loaded - start:.1f} s; {num_written - num_refused} answers in "
        f"{seconds:.1f} s: {num_prompt_tokens} prompt tokens, {num_new_tokens} generated "
        f"({speeds(seconds, num_prompt_tokens, num_new_tokens)})"
        + (f"; {num_refused} prompts were refused" if num_refused else "")
    )


def _json_lines(index: int, asked: Asked | Refused, output: "RequestOutput | None") -> str:
    """Return a line an answer, with its number if a prompt has several; of a refused prompt its error."""
    encoding = getattr(sys.stdout, "encoding", None) or ""
    is_ascii = encoding.lower().replace("-", "") != "utf8"
    first = {"index": index} | ({} if asked.id is None else {"id": asked.id})
    if output is None:
        return json.dumps(first | {"error": asked.error}, ensure_ascii=is_ascii)
    lines = []
    for answer in output.outputs:
        line: dict[str, Any] = dict(first)
        line |= {"answer": answer.index} if len(output.outputs) > 1 else {}
        line |= {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": answer.token_ids,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        lines.append(json.dumps(line, ensure_ascii=is_ascii))
    return "\n".join(lines)


def _text_block(asked: Asked | Refused, output: "RequestOutput | None") -> str:
    if output is None:
        return f"\n>>> {asked.title}\n[{asked.error}]"
    answers = [f"{answer.text.strip()}  [{answer.finish_reason}]" for answer in output.outputs]
    if len(answers) > 1:
        answers = [f"{i}: {answer}" for i, answer in enumerate(answers, 1)]
    return "\n".join([f"\n>>> {asked.title}", *answers])


def _info(args: argparse.Namespace) -> None:
    config = config_of(_engine_options(args))
    _log(args)

    import platform
    from importlib import metadata

    import jax
    from flax import nnx

    from jaxpaged.engine import capacity, gpu_flags, machine, start
    from jaxpaged.engine.setup import Setup
    from jaxpaged.models import loading
    from jaxpaged.models.layer_form import form_of
    from jaxpaged.models.quantised import codes as quantised
    from pallas_kernels import native
    from pallas_kernels.compilation_cache import compilation_cache_dir

    gpu_flags.set_defaults(config)
    lines = [(name, metadata.version(name)) for name in ("jax", "jaxlib", "flax", "numpy", "transformers")]
    lines = [("jaxpaged", jaxpaged.__version__), ("python", platform.python_version()), *lines]
    lines += [("device", f"{d.device_kind} ({d.platform} {d.id})") for d in jax.devices()]
    checkpoint = loading.open_checkpoint(args.model)
    model = checkpoint.config
    shapes = functools.partial(
        checkpoint.abstract, quantization=config.quantization, loop_over_layers=config.loop_over_layers
    )
    setup = Setup(config, model)
    attention, dtype = f"{setup.attention}: {setup.attention_reason}", setup.dtype
    how = config.quantization or checkpoint.quant_method
    kernels = quantised.implementations(nnx.state(shapes(dtype))) if how else {}
    no_native, form = native.why_not(dtype), form_of(dtype, config.loop_over_layers)
    products = f"xla: {no_native}" if no_native else f"native: {native.instructions()}"
    if no_native and form.loops:
        products = f"{form.stacked}: loop_over_layers"
    machine.keep_on_disk()  # what a GPU's loop is compiled for here, a start finds there
    cache, folder = start.cache_size(setup, shapes), compilation_cache_dir()
    longest = capacity.longest_that_fits(setup, cache)
    lines += [
        ("attention", attention),
        ("products", products),
        ("programs", f"kept in {folder}" if folder else "not kept"),
        (
            "model",
            f"{args.model}: {model.num_layers} layers, {model.num_q_heads} query heads and "
            f"{model.num_kv_heads} kv heads of {model.head_dim}, vocabulary {model.vocab_size}",
        ),
        ("dtype", str(dtype)),
        *([("quantization", how)] if how else []),
        *(("", f"{kernel} products for {n} of its weights") for kernel, n in kernels.items()),
        ("rows", f"{config.max_num_seqs} sequences of up to {longest} tokens"),
        ("layout", str(setup.layout)),
        (
            "cache",
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, {cache.bytes_per_block:,} bytes each: "
            f"{cache.num_tokens:,} tokens in {cache.num_bytes / 2**20:,.1f} MiB",
        ),
        ("", cache.why),
        *(("", line) for line in (cache.budget.lines() if cache.budget else ())),
    ]
    for name, value in lines:
        _write(f"{name:<14}{value}")
    capacity.served_len(setup, cache)  # where an engine would not start, that is said last


def _log(args: argparse.Namespace) -> None:
    """Let the package's log go to standard error, if that was asked for."""
    from absl import logging

    logging.use_absl_handler()
    if args.verbose:
        logging.set_verbosity(logging.INFO)


def _write(text: str) -> None:
    """A line or more on standard output, at once. Raises `OutputError` if that is closed or full."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:  # of a terminal that cannot show everything; JSON never comes here
        _write(text.encode("ascii", "backslashreplace").decode())
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # a full disk; a file closed under us
        _forget_output()
        raise OutputError(f"standard output cannot be written: {error}") from error


def _keep_output() -> None:
    """For answers alone: gloo, by which processes talk on CPUs, writes lines of its own to the descriptor."""
    given = sys.stdout
    if given is sys.__stdout__ and given is not None:
        given.flush()
        own = os.dup(given.fileno())
        os.dup2(2, given.fileno())
        sys.stdout = open(own, "w", encoding=given.encoding, errors=given.errors)  # noqa: SIM115


def _forget_output() -> None:
    """Leave what could not be written unwritten: the end of the program would try again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    """A line for people, on standard error, if anybody reads that."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
