"""`jaxpaged generate`: answer prompts in one batch. Imports nothing heavy at the top."""

import argparse
import functools
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from jaxpaged.batch import prompt_files
from jaxpaged.batch.prompt_files import PromptLine, Refused
from jaxpaged.checks import InputError
from jaxpaged.commands.engine_options import add_engine_options, engine_options
from jaxpaged.commands.output import (
    OutputError,
    keep_stdout_for_answers,
    log_to_stderr,
    write_stderr,
    write_stdout,
)
from jaxpaged.commands.parser import Commands
from jaxpaged.config import config_of
from jaxpaged.lora import LoRARequest
from jaxpaged.options import flags_of
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.api.outputs import RequestOutput


def add_generate(commands: Commands) -> None:
    """Add the command to the command line."""
    generate = commands.add_parser("generate", help="answer prompts in one batch")
    generate.set_defaults(command=run)
    prompts = generate.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="prompt; may be repeated"
    )
    prompts.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="file with a prompt on each line, or with JSON lines; each has 'prompt', 'prompt_token_ids' or "
        "'messages', and may have an 'id' and sampling options of its own; - for standard input",
    )
    prompts.add_argument(
        "--skip-errors",
        action="store_true",
        help="go on after a prompt that is refused, with an error in place of its answer",
    )
    prompts.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    sampling = generate.add_argument_group("sampling")
    for names, flag in flags_of(SamplingParams).values():
        sampling.add_argument(*names, **flag)
    generate.add_argument("--lora", metavar="DIR", help="directory of a PEFT adapter to answer with")
    generate.add_argument(
        "--json", action="store_true", help="print JSON lines on standard output, and nothing else"
    )
    add_engine_options(generate)


def run(args: argparse.Namespace) -> None:
    options = engine_options(args)
    adapter = None
    if args.lora is not None:
        options["enable_lora"] = True
        adapter = LoRARequest("adapter", 1, args.lora)
    config_of(options)  # mistakes are reported before anything heavy is loaded
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
    log_to_stderr(args.verbose)
    if args.distributed_init is not None:
        keep_stdout_for_answers()
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
                write_stdout(
                    _json_lines(num_written, each, output) if args.json else _text_block(each, output)
                )
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
    write_stderr(
        f"\nloaded and compiled in {loaded - start:.1f} s; {num_written - num_refused} answers in "
        f"{seconds:.1f} s: {num_prompt_tokens} prompt tokens, {num_new_tokens} generated "
        f"({speeds(seconds, num_prompt_tokens, num_new_tokens)})"
        + (f"; {num_refused} prompts were refused" if num_refused else "")
    )


def _json_lines(index: int, asked: PromptLine | Refused, output: "RequestOutput | None") -> str:
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


def _text_block(asked: PromptLine | Refused, output: "RequestOutput | None") -> str:
    if output is None:
        return f"\n>>> {asked.title}\n[{asked.error}]"
    answers = [f"{answer.text.strip()}  [{answer.finish_reason}]" for answer in output.outputs]
    if len(answers) > 1:
        answers = [f"{i}: {answer}" for i, answer in enumerate(answers, 1)]
    return "\n".join([f"\n>>> {asked.title}", *answers])
