"""Files of prompts cut into parts that any worker can answer, and their answers in a folder, each row's once.

A part's answers are in a file of its own, named by the part, that is there as a whole or not at all. While a
worker answers it, each row's line goes to a file of that worker's beside it; whoever takes the part over, on
whatever machine, begins with what such files have.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.batch import prompt_files
from jaxpaged.batch.prompt_files import PromptLine
from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.api.async_llm import AsyncLLM
    from jaxpaged.api.llm import LLM

JOB = "job.json"
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows `first` to `first + num_rows - 1` of a file."""

    file: str
    number: int  # the file's, among those of the job
    first: int
    num_rows: int
    start: int = 0  # bytes before the first row's line, in JSON lines
    end: int = 0  # and up to the end of the last one's

    @property
    def name(self) -> str:
        """Name of the part's file: names sort in the order of rows."""
        return f"{self.number:04}-{self.first:012}"


def cut(files: Sequence[str | os.PathLike[str]], rows_per_part: int) -> list[Part]:
    """Divide the rows of all files, in order, into parts: Parquet if a name ends so, otherwise JSON lines, of
    which empty ones do not count. Raises `InputError`.
    """
    checked_int("rows_per_part", rows_per_part, "an int >= 1", 1)
    check(
        "files", files, "a list of paths", isinstance(files, Sequence) and not isinstance(files, str | bytes)
    )
    parts = []
    for number, file in enumerate(files):
        path = Path(file).resolve()
        try:
            cut_one = _cut_parquet if path.suffix == ".parquet" else _cut_lines
            parts += [dataclasses.replace(part, number=number) for part in cut_one(path, rows_per_part)]
        except OSError as error:
            raise InputError(f"file {str(file)!r} cannot be read: {error}") from error
    if not parts:
        raise InputError("files must have at least one row")
    return parts


def _cut_lines(path: Path, rows_per_part: int) -> Iterator[Part]:
    first = num_rows = start = end = 0
    with path.open("rb") as lines:
        for line in lines:
            end += len(line)
            num_rows += bool(line.strip())
            if num_rows == rows_per_part:
                yield Part(str(path), 0, first, num_rows, start, end)
                first, num_rows, start = first + num_rows, 0, end
    if num_rows:
        yield Part(str(path), 0, first, num_rows, start, end)


def _cut_parquet(path: Path, rows_per_part: int) -> Iterator[Part]:
    from pyarrow import ArrowInvalid, parquet

    try:
        num_rows = parquet.read_metadata(path).num_rows
    except ArrowInvalid as error:
        raise InputError(f"file {str(path)!r} must be Parquet: {error}") from error
    for first in range(0, num_rows, rows_per_part):
        yield Part(str(path), 0, first, min(rows_per_part, num_rows - first))


def rows(part: Part) -> list[bytes | Line]:
    """Return the rows of a part: each a line of JSON, or a mapping of a Parquet file's columns."""
    if Path(part.file).suffix != ".parquet":
        with open(part.file, "rb") as file:
            file.seek(part.start)
            return [line for line in file.read(part.end - part.start).split(b"\n") if line.strip()]
    from pyarrow import parquet

    table_file = parquet.ParquetFile(part.file)
    lines: list[bytes | Line] = []
    before = 0  # rows of the groups so far
    for group in range(table_file.num_row_groups):
        num_rows = table_file.metadata.row_group(group).num_rows
        skip = max(part.first - before, 0)
        wanted = min(part.first + part.num_rows - before, num_rows) - skip
        if wanted > 0 and skip < num_rows:
            table = table_file.read_row_group(group).slice(skip, wanted)
            lines += [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
        before += num_rows
    return lines


def open_folder(folder: str | os.PathLike[str], parts: Sequence[Part], asked: Mapping[str, Any]) -> Path:
    """Open the folder of a job's answers; create it if it is missing.

    `asked`: what answers depend on beside the parts. Raises `InputError` if it has another job's.
    """
    path = Path(folder).resolve()
    contents = [dataclasses.astuple(part) for part in parts]
    job = {
        "files": list(dict.fromkeys(part.file for part in parts)),
        "parts": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        **asked,
    }
    text = json.dumps(job, indent=1, default=str) + "\n"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / JOB).exists():
            if there := next((each.name for part in parts for each in path.glob(f"*{part.name}.*")), None):
                raise InputError(f"folder {str(folder)!r} must be a new one: {there} is of no job of ours")
            (path / f".{JOB}").write_text(text)
            (path / f".{JOB}").replace(path / JOB)
        if (path / JOB).read_text() != text:
            raise InputError(f"folder {str(folder)!r} must be a new one: it has the answers of another job")
    except OSError as error:
        raise InputError(f"folder {str(folder)!r} cannot be used: {error}") from error
    return path


def answer(llm: "LLM", part: Part, folder: Path, sampling: Mapping[str, Any], *, chat: bool = False) -> int:
    """Answer a part's rows, but those that somebody has answered, and write its file; how many were answered.

    `sampling`: fields of `SamplingParams` for rows that do not have them. A row that cannot be asked has an
    "error" in place of its outputs. Raises `EngineDeadError`, and `OSError` where nothing can be written.
    """
    whole = folder / f"{part.name}.jsonl"
    pattern = f".{part.name}.{32 * '[0-9a-f]'}.part"
    num_answered = 0
    if not whole.exists():
        lines = _found(folder, pattern)
        unfinished = folder / f".{part.name}.{uuid.uuid4().hex}.part"
        with unfinished.open("x", encoding="utf-8") as file:
            todo = {part.first + i: row for i, row in enumerate(rows(part)) if part.first + i not in lines}
            for line in answers_of(llm, todo, sampling, chat):
                lines[line["row"]] = {"file": part.file} | line
                file.write(json.dumps(lines[line["row"]]) + "\n")
                file.flush()
                num_answered += 1
            file.flush()
            os.fsync(file.fileno())
        complete = folder / f".{part.name}.{uuid.uuid4().hex}.whole"
        with complete.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(lines[row]) + "\n" for row in sorted(lines))
            file.flush()
            os.fsync(file.fileno())
        complete.replace(whole)
    for leftover in (*folder.glob(pattern), *folder.glob(pattern.removesuffix("part") + "whole")):
        leftover.unlink(missing_ok=True)
    return num_answered


def missing(folder: Path, parts: Sequence[Part]) -> list[Part]:
    """Return the parts that are not answered."""
    return [part for part in parts if not (folder / f"{part.name}.jsonl").exists()]


def _found(folder: Path, pattern: str) -> dict[int, Line]:
    """Return, by row, the answers of workers that did not finish their part; an incomplete line does not
    count.
    """
    lines: dict[int, Line] = {}
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # another has completed the part
            for text in path.read_text(encoding="utf-8").split("\n")[:-1]:
                line = json.loads(text)
                lines.setdefault(line["row"], line)
    return lines


def answers_of(
    llm: "LLM", todo: Mapping[int, bytes | Line], sampling: Mapping[str, Any], chat: bool
) -> Iterator[Line]:
    """Yield the output line of each row as soon as the row is answered."""
    from jaxpaged.api.async_llm import AsyncLLM

    engine = AsyncLLM.of(llm)
    with asyncio.Runner() as runner:
        tasks = {
            runner.get_loop().create_task(_answer(engine, row, content, sampling, chat))
            for row, content in todo.items()
        }
        while tasks:
            done, tasks = runner.run(_first(tasks))
            for task in done:
                yield task.result()


async def _first(
    tasks: set["asyncio.Task[Line]"],
) -> tuple[set["asyncio.Task[Line]"], set["asyncio.Task[Line]"]]:
    return await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _answer(
    engine: "AsyncLLM", row: int, content: bytes | Line, sampling: Mapping[str, Any], chat: bool
) -> Line:
    line: Line = {"row": row}
    try:
        asked: PromptLine = prompt_files.of_row(content, sampling)
        if asked.id is not None:
            line["id"] = asked.id
        params: SamplingParams = dataclasses.replace(asked.params, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = prompt_files.for_llm(asked, engine.llm.render_chat, chat)
        request = engine.generate(prompt, params, str(row), priority=asked.priority)
        [output] = [each async for each in request]
    except InputError as error:
        return line | {"error": str(error)}
    outputs = [
        {
            "text": each.text,
            "token_ids": each.token_ids,
            "finish_reason": each.finish_reason,
            "stop_reason": each.stop_reason,
        }
        for each in output.outputs
    ]
    return line | {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": outputs}
