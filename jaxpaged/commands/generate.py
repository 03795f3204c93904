"""`jaxpaged generate`: answer prompts in one batch. Imports nothing heavy at the top."""

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.batch import answer_files, prompt_files
from jaxpaged.batch.answer_files import AnswerFile
from jaxpaged.batch.prompt_files import PromptLine, Refused
from jaxpaged.checks import InputError
from jaxpaged.commands.engine_options import MODEL_OPTIONS, add_engine_options, engine_options
from jaxpaged.commands.output import (
    OutputError,
    bar,
    first_interrupt,
    keep_stdout_for_answers,
    log_to_stderr,
    write_stderr,
    write_stdout,
)
from jaxpaged.commands.parser import Commands
from jaxpaged.config import EngineConfig, config_of
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
    generate.add_argument(
        "--output",
        metavar="FILE",
        help="file of JSON lines, to which each answer is written as it finishes; in the prompts' order at "
        "the end",
    )
    generate.add_argument(
        "--resume", action="store_true", help="ask only what --output has no answer to, from an earlier run"
    )
    add_engine_options(generate)


def run(args: argparse.Namespace) -> None:
    """Answer the prompts. Raises `InputError`; `OutputError` where answers end early or cannot be written."""
    options = engine_options(args)
    if args.lora is not None:
        options["enable_lora"] = True
    config = config_of(options)  # mistakes are reported before anything heavy is loaded
    if args.resume and args.output is None:
        raise InputError("--resume must be given with --output")
    sampling = {name: getattr(args, name) for name in flags_of(SamplingParams)}
    SamplingParams(**sampling)
    asked = [
        *prompt_files.of_texts(args.prompt, sampling),
        *prompt_files.read(args.prompts_file, sampling, skip_errors=args.skip_errors),
    ]
    if not asked:
        raise InputError("no prompt: give --prompt or --prompts-file")
    if config.process_id:  # works for process 0, which writes; ends by `SystemExit`
        from jaxpaged.api.llm import LLM

        LLM(args.model, **options)
    with contextlib.ExitStack() as files:
        answers: Stdout | File = Stdout(args.json)
        if args.output is not None:
            answers = File(files.enter_context(_open(args, config, asked)))
            if len(answers.written) == len(asked):
                answers.end()
                write_stderr(f"all {answers.num_answers} answers were there before")
                return
        _answer(args, options, asked, answers)


def _open(
    args: argparse.Namespace, config: EngineConfig, asked: Sequence[PromptLine | Refused]
) -> AnswerFile:
    """Open the file of answers; report on standard error the bytes of a broken answer that were dropped."""
    has_files = args.prompts_file is not None and args.output is not None
    has_files = has_files and os.path.exists(args.prompts_file) and os.path.exists(args.output)
    if has_files and os.path.samefile(args.prompts_file, args.output):
        raise InputError(f"--output {args.output!r} must be another file than --prompts-file")
    given = {name: getattr(args, name) for name in ("model", *MODEL_OPTIONS, "lora")}
    model = answer_files.model_of(config, given) | {"chat": args.chat}
    file = AnswerFile(args.output, asked, model, resume=args.resume)
    if file.num_dropped:
        write_stderr(
            f"jaxpaged: --output {args.output!r}: its last {file.num_dropped} bytes are no whole answer and "
            "are dropped"
        )
    return file


def _answer(
    args: argparse.Namespace,
    options: Mapping[str, Any],
    asked: Sequence[PromptLine | Refused],
    answers: "Stdout | File",
) -> None:
    """Generate the missing answers, write each as it finishes, and print the speeds."""
    from jaxpaged.api.llm import LLM
    from jaxpaged.api.progress import speeds
    from jaxpaged.engine.handle import EngineDeadError
    from jaxpaged.engine.texts import TextError

    start = time.perf_counter()
    before = answers.num_answers  # of an earlier run
    left = {place: each for place, each in enumerate(asked) if place not in answers.written}
    total = before + sum(each.params.n for each in left.values() if isinstance(each, PromptLine))
    num_refused = num_prompt_tokens = num_new_tokens = 0

    def so_far() -> str:
        again = "" if args.output is None else "; --resume goes on from there"
        return f"{answers.num_answers} of {total} answers are written{again}"

    log_to_stderr(args.verbose)
    if args.distributed_init is not None:
        keep_stdout_for_answers()
    try:
        llm = LLM(args.model, **options)
        loaded = time.perf_counter()
        adapter = None if args.lora is None else LoRARequest("adapter", 1, args.lora)
        answering = prompt_files.ask(
            asked,
            functools.partial(
                llm.generate_as_finished,
                lora_request=adapter,
                use_tqdm=functools.partial(_bar, before=before),
            ),
            llm.render_chat,
            chat=args.chat,
            skip_errors=args.skip_errors,
            skip=answers.written,
        )
        with first_interrupt(answering.stop) as interrupts, contextlib.closing(answers):
            for place, refused in answering.refused.items():
                line = left[place]
                total -= line.params.n if isinstance(line, PromptLine) else 0
                num_refused += 1
                answers.write(place, refused, None)
            for place, output in answering.finished:
                answers.write(place, asked[place], output)
                num_prompt_tokens += len(output.prompt_token_ids)
                num_new_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        if interrupts:
            raise KeyboardInterrupt
        answers.end()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f": {so_far()}") from None
    except (EngineDeadError, OutputError, TextError) as error:
        raise OutputError(f"{error}; {so_far()}") from error
    seconds = time.perf_counter() - loaded
    write_stderr(
        f"\nloaded and compiled in {loaded - start:.1f} s; {answers.num_answers - before} answers in "
        f"{seconds:.1f} s: {num_prompt_tokens} prompt tokens, {num_new_tokens} generated "
        f"({speeds(seconds, num_prompt_tokens, num_new_tokens)})"
        + (f"; {num_refused} prompts were refused" if num_refused else "")
        + (f"; {before} answers were there before" if before else "")
    )


def _bar(*, total: int, before: int, **options: Any) -> Any:
    return bar(total=before + total, initial=before, **options)


class Stdout:
    """Standard output, where answers are written in the prompts' order."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._held: dict[int, tuple[PromptLine | Refused, RequestOutput | None]] = {}
        self._next = 0
        self.written: frozenset[int] = frozenset()
        self.num_answers = 0

    def write(self, place: int, asked: "PromptLine | Refused", output: "RequestOutput | None") -> None:
        """Write a prompt's answers as soon as all before it are written; of a refused prompt its error."""
        self._held[place] = asked, output
        while self._next in self._held:
            self._write(self._next)
            self._next += 1

    def close(self) -> None:
        """Write the answers that were held back, after an interrupt or an error."""
        for place in sorted(self._held):
            self._write(place)

    def end(self) -> None:
        """Do nothing: the answers are in order already."""

    def _write(self, place: int) -> None:
        from tqdm import tqdm

        asked, output = self._held.pop(place)
        encoding = getattr(sys.stdout, "encoding", None) or ""
        is_ascii = encoding.lower().replace("-", "") != "utf8"
        text = _text_block(asked, output)
        if self._as_json:
            lines = [{"index": place} | line for line in _lines(asked, output)]
            text = "\n".join(json.dumps(line, ensure_ascii=is_ascii) for line in lines)
        with tqdm.external_write_mode():  # the bar, on the same terminal perhaps, makes room
            try:
                write_stdout(text)
            except OutputError:
                self._held.clear()
                raise
        self.num_answers += 0 if output is None else len(output.outputs)


class File:
    """A file, where answers are written as they finish."""

    def __init__(self, file: AnswerFile) -> None:
        self._file = file

    @property
    def written(self) -> frozenset[int]:
        return frozenset(self._file.written)

    @property
    def num_answers(self) -> int:
        return self._file.num_answers

    def write(self, place: int, asked: "PromptLine | Refused", output: "RequestOutput | None") -> None:
        """Write a prompt's answers; of a refused prompt its error. Raises `OutputError`."""
        with _output_errors():
            self._file.write(place, _lines(asked, output))

    def close(self) -> None:
        """Do nothing: finished answers are written already."""

    def end(self) -> None:
        """Put all answers into the prompts' order. Raises `OutputError`."""
        with _output_errors():
            self._file.put_in_order()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    """Turn the errors of a file that cannot be written into `OutputError`."""
    try:
        yield
    except InputError as error:
        raise OutputError(str(error)) from error


def _lines(asked: PromptLine | Refused, output: "RequestOutput | None") -> list[dict[str, Any]]:
    """Return a line an answer, with its number if a prompt has several; of a refused prompt its error."""
    first = {} if asked.id is None else {"id": asked.id}
    if output is None:
        return [first | {"error": asked.error}]
    return [
        first
        | ({"answer": answer.index} if len(output.outputs) > 1 else {})
        | {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": answer.token_ids,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in output.outputs
    ]


def _text_block(asked: PromptLine | Refused, output: "RequestOutput | None") -> str:
    if output is None:
        return f"\n>>> {asked.title}\n[{asked.error}]"
    answers = [f"{answer.text.strip()}  [{answer.finish_reason}]" for answer in output.outputs]
    if len(answers) > 1:
        answers = [f"{i}: {answer}" for i, answer in enumerate(answers, 1)]
    return "\n".join([f"\n>>> {asked.title}", *answers])
