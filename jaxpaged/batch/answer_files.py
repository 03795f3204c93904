"""Files of `jaxpaged generate`'s answers: JSON lines that another run goes on from. Imports nothing heavy."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxpaged.batch.line_files import LineFile
from jaxpaged.batch.prompt_files import PromptLine, Refused
from jaxpaged.checks import InputError, is_int
from jaxpaged.config import EngineConfig

type Lines = Sequence[Mapping[str, Any]]

DIGITS = 12  # of each digest
BEGINS = b'{"index": '  # each line of answers
# Parts of a digest, as messages name them.
PARTS = ("another prompt", "other sampling options", "another model or other options of it")
# Options of engines that decide sizes and speed, and not what is answered.
SIZES = (
    *("block_size", "num_blocks", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    *("enable_prefix_caching", "reuse_answers", "eviction_policy", "preemption_mode", "num_host_blocks"),
    *("scheduling_policy", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "decode_widths"),
    *("distributed_init", "num_processes", "process_id", "tensor_parallel_size", "data_parallel_size"),
    *("tensor_parallel_sums", "loop", "loop_over_layers", "max_logprobs", "keep_programs", "seed"),
    *("kv_offloading_size", "kv_offloading_backend", "kv_offloading_disk_size", "kv_events_config"),
    *("disable_hybrid_kv_cache_manager", "structured_outputs_mib", "speculative_config"),
)


def digest_of(asked: PromptLine | Refused, model: Mapping[str, Any]) -> str:
    """Return three short digests of what an answer depends on: prompt, sampling options, model.

    `model`: what `model_of` returns.
    """
    if isinstance(asked, Refused):
        return "-".join(map(_digest, (["refused", asked.title], None, model)))
    prompt = [asked.prompt, asked.template_kwargs, asked.cache_salt]
    return "-".join(map(_digest, (prompt, dataclasses.asdict(asked.params), model)))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


class AnswerFile:
    """A file to which the answers to each prompt are added as they finish: a line for each answer.

    Each line has "index", the prompt's place; "asked", its digest; "answer", its number, if the prompt has
    several; and what `write` is given. `resume` keeps what is there, and `written` has the places of these
    prompts: otherwise the file must be new or empty. A last prompt whose lines are not all whole does not
    count, and `num_dropped` says how many bytes of it were dropped. Raises `InputError` if the file holds
    anything else, or cannot be written.
    """

    def __init__(
        self,
        file: str,
        asked: Sequence[PromptLine | Refused],
        model: Mapping[str, Any],
        *,
        resume: bool,
    ) -> None:
        self._digests = [digest_of(each, model) for each in asked]
        self._num_answers = [each.params.n if isinstance(each, PromptLine) else 1 for each in asked]
        self.written: set[int] = set()
        self.num_answers = self.num_dropped = 0  # answers written, those of the earlier run included; bytes
        self._spans: list[tuple[int, int]] = []  # in the file's order: place, and bytes of its lines
        self._out = LineFile("--output", file)
        try:
            if resume:
                self._read_back()
            elif self._out.can_be_read and os.path.getsize(file):
                raise InputError(f"{self._out.title} must be new or empty, or be given with --resume")
        except BaseException:
            self._out.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def write(self, place: int, answers: Lines) -> None:
        """Add the lines of a prompt's answers, at once. Raises `InputError`, and then none of them is
        there.
        """
        first = {"index": place, "asked": self._digests[place]}
        lines = b"".join(_line(first | dict(answer)) for answer in answers)
        self._out.write(lines)
        self.written.add(place)
        self._spans.append((place, len(lines)))
        self.num_answers += sum("error" not in answer for answer in answers)

    def put_in_order(self) -> None:
        """Put the lines into the prompts' order, by another file that takes this one's place.

        Nothing happens to what is no file, such as a pipe. Raises `InputError`, and the file stays as it is.
        """
        places = [place for place, _ in self._spans]
        if not self._out.can_be_read or places == sorted(places):
            return
        starts = itertools.accumulate((num_bytes for _, num_bytes in self._spans), initial=0)
        spans = sorted((place, start, n) for (place, n), start in zip(self._spans, starts, strict=False))
        file = Path(os.path.realpath(self._out.file))
        ordered = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            with file.open("rb") as written, ordered.open("xb") as out:
                os.fchmod(out.fileno(), os.fstat(written.fileno()).st_mode)
                for _, start, num_bytes in spans:
                    written.seek(start)
                    out.write(written.read(num_bytes))
                out.flush()
                os.fsync(out.fileno())
            ordered.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                ordered.unlink()
            raise InputError(f"{self._out.title} cannot be put in order: {error}") from error

    def _read_back(self) -> None:
        """Read the prompts whose answers are all in the file. Raises `InputError` for lines of others."""
        if not self._out.can_be_read:
            raise InputError(f"{self._out.title} must be a file that can be read, with --resume")
        end = whole = 0
        num_left, place = 0, -1
        for number, line in enumerate(self._out.lines(), 1):
            end += len(line)
            said = self._read(line, number)
            if num_left and said["index"] != place:
                raise InputError(f"{self._named(number)} must be another answer to prompt {place}")
            if not num_left:
                place = said["index"]
                self._check_is_asked(place, said["asked"], number)
                num_left = 1 if "error" in said else self._num_answers[place]
            num_left -= 1
            if not num_left:
                self.written.add(place)
                self._spans.append((place, end - whole))
                self.num_answers += 0 if "error" in said else self._num_answers[place]
                whole = end
        self.num_dropped = self._out.cut(whole, end, [BEGINS])

    def _read(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            said = json.loads(line)
            if is_int(said["index"]) and isinstance(said["asked"], str):
                return dict(said)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            pass
        raise InputError(f"{self._named(number)} must be an answer of an earlier run with --output")

    def _check_is_asked(self, place: int, digest: str, number: int) -> None:
        if not 0 <= place < len(self._digests):
            raise InputError(
                f"{self._named(number)} must answer one of {len(self._digests)} prompts, not number {place}"
            )
        if place in self.written:
            raise InputError(f"{self._named(number)} must not answer prompt {place} again")
        parts = zip(PARTS, digest.split("-"), self._digests[place].split("-"), strict=False)
        if others := [name for name, in_file, ours in parts if in_file != ours]:
            raise InputError(
                f"{self._named(number)} must be of the same run: it answers prompt {place} with "
                f"{' and '.join(others)}"
            )

    def _named(self, number: int) -> str:
        return f"{self._out.title}, line {number},"


def _line(value: Mapping[str, Any]) -> bytes:
    """Return a line in UTF-8; characters that it does not have are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


def model_of(config: EngineConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, besides prompts and sampling options, that decide answers: fields of `config`
    outside of `SIZES`, and the names and paths in `given`.
    """
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__ if name not in SIZES}
    return fields | {name: value if value is None else _resolved(value) for name, value in given.items()}


def _resolved(name: Any) -> Any:
    """Return the absolute path of a file that exists; a name, a number or a JSON object is returned
    unchanged.
    """
    if isinstance(name, Mapping | int | float):
        return name
    return os.path.realpath(name) if os.path.exists(name) else str(name)
