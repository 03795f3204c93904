"""Parsers that take strangers' bytes, each with valid inputs to begin with."""

import contextlib
import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from jaxpaged.batch import prompt_files
from jaxpaged.checks import InputError
from jaxpaged.engine.device import CALL_CLASSES
from jaxpaged.handover.blocks import BlockFormat, Blocks
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading, lora
from jaxpaged.models.families.llama import NAMES
from jaxpaged.parallel import messages
from jaxpaged.research import replay
from jaxpaged.research.lab import traces
from jaxpaged.research.verify import allocators
from jaxpaged.research.verify.history import History
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve import bounds
from jaxpaged.serve.parsers import REASONING_PARSERS, TOOL_PARSERS
from jaxpaged.serve.pooling_schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from jaxpaged.serve.replies import ApiError
from jaxpaged.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    ResponsesRequest,
    TextRequest,
    TokenizeRequest,
)
from jaxpaged.serve.tools import Form, ToolDeltas
from jaxpaged.step.state import empty_rows
from jaxpaged.text.conversations import read_items, read_messages
from tests import tiny, tiny_lora
from tests.fuzz.fuzzer import Target
from tests.tiny_gguf import write_gguf

GOLDEN = Path(__file__).parents[1] / "goldens" / "gqa_tied"


def file_of(data: bytes, folder: Path, name: str) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


# An input that stands for several files: a JSON line of names and lengths, then the files' bytes.


def pack(folder: Path, names: Sequence[str]) -> bytes:
    """Return the files of these names as one input."""
    contents = {name: (folder / name).read_bytes() for name in names}
    head = json.dumps([[name, len(content)] for name, content in contents.items()])
    return head.encode() + b"\n" + b"".join(contents.values())


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the files of an input by name; none if its first line is damaged."""
    head, _, rest = data.partition(b"\n")
    files = {}
    with contextlib.suppress(ValueError, TypeError, RecursionError, OverflowError):
        for name, size in json.loads(head):
            name = str(name).encode(errors="replace").decode()
            files[name] = rest[: int(size)] if int(size) > 0 else b""
            rest = rest[len(files[name]) :]
    return files


def write_files(data: bytes, folder: Path, names: Sequence[str]) -> None:
    """Write those of these files that the input has; the others stay as the input before left them."""
    for name, content in unpack(data).items():
        if name in names:
            (folder / name).write_bytes(content)


def blocks() -> list[bytes]:
    block_format = BlockFormat(4, "groups", "TokenMajor()", "float32", 2, 1, 8, False, "digest")
    arrays = {name: np.zeros((3, 2, 4, 1, 8), np.float32) for name in ("k", "v")}
    its = np.arange(8, dtype=np.int32).reshape(2, 4), np.array([[True, True], [False, True]])
    salted = [Blocks(block_format, *its, salt, arrays) for salt in (None, "s")]
    return [each.to_bytes() for each in salted]


def dumps() -> list[bytes]:
    """Return the files in a dump: `parse_dump` makes the archive around them, with its checksums."""
    from tests.step.lockstep import VOCAB_ROOM, Setting

    setting = Setting("swap", num_blocks=1 + 17, num_host_blocks=1 + 14)
    request = empty_rows(1, 0, VOCAB_ROOM)
    with tempfile.TemporaryDirectory() as folder:
        replay.dump(
            setting.state(), Path(folder) / "dump", step_config=setting.config, vocab_size=VOCAB_ROOM,
            answers={1: [2, 3]}, events=[replay.Event(0, request=request), replay.Event(1, abort=3)],
        )  # fmt: skip
        with zipfile.ZipFile(Path(folder) / "dump") as archive:
            archive.extractall(folder)
            return [pack(Path(folder), archive.namelist())]


def parse_dump(data: bytes, folder: Path) -> None:
    with zipfile.ZipFile(folder / "dump", "w") as archive:
        for name, content in unpack(data).items():
            archive.writestr(name, content)
    replay.load(folder / "dump")


def gguf_files() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            write_gguf(Path(folder) / "tiny.gguf", sliding_window=window).read_bytes() for window in (None, 8)
        ]


def read_checkpoint(path: Path) -> None:
    checkpoint = loading.open_checkpoint(path)
    _ = checkpoint.tokenizer
    tensors = checkpoint.load_weights()
    for name in list(tensors)[:40]:
        _ = tensors[name].shape


def parse_gguf(data: bytes, folder: Path) -> None:
    read_checkpoint(Path(file_of(data, folder, "tiny.gguf")))


DIRECTORY = ("config.json", "generation_config.json", "model.safetensors")


def directories() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for name in DIRECTORY:
            if (GOLDEN / name).exists():
                (Path(folder) / name).write_bytes((GOLDEN / name).read_bytes())
        (Path(folder) / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
        return [pack(Path(folder), DIRECTORY)]


def parse_directory(data: bytes, folder: Path) -> None:
    write_files(data, folder, DIRECTORY)
    read_checkpoint(folder)


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def adapters() -> list[bytes]:
    patterns = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.0.self_attn.v_proj": 3.0}}
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for number, options in enumerate(({}, patterns, {"use_rslora": True})):
            path = tiny_lora.write(Path(folder) / str(number), **options)
            found.append(pack(path, ADAPTER))
        return found


def parse_adapter(data: bytes, folder: Path) -> None:
    write_files(data, folder, ADAPTER)
    lora.read(LoRARequest("fuzzed", 1, folder), tiny.CONFIG, NAMES, 8, np.dtype("float32"))  # type: ignore[arg-type]


def trace_lines() -> list[bytes]:
    mooncake = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 27, "input_length": 512, "output_length": 0, "hash_ids": [1]},
    ]
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,100,7\n2023-11-16 18:17:04,9,0\n"
    return ["\n".join(map(json.dumps, mooncake)).encode(), azure.encode()]


def parse_trace(data: bytes, folder: Path) -> None:
    trace = traces.read(file_of(data, folder, "trace"))
    if trace.input_lens.sum() < 2**20:
        traces.blocks(trace, 16)


def prompt_lines() -> list[bytes]:
    lines = [
        {"prompt": "Once", "max_tokens": 3, "temperature": 0.5, "id": 7},
        {"prompt_token_ids": [1, 2, 3], "stop": ["x"], "logit_bias": {"3": 1.0}},
        {"messages": [{"role": "user", "content": "Hi"}], "bad_words": ["no"], "cache_salt": "s"},
    ]
    return ["\n".join(map(json.dumps, lines)).encode(), b"a prompt\nanother\n"]


def parse_prompts(data: bytes, folder: Path) -> None:
    prompt_files.read(file_of(data, folder, "prompts"), {})


def histories() -> list[bytes]:
    made = {"policy": "lru", "block_size": 4, "use_jit": False, "collide": False}
    lines = [["append", [[6, 3, 0, 0], 1]], ["free", [[0]]], ["fork", [[1], [0]]]]
    return [json.dumps({"made_with": made, "history": lines}).encode()]


def parse_history(data: bytes, folder: Path) -> None:
    """Read a history up to its first step, which is not run."""
    path = file_of(data, folder, "history.json")

    def stop(history: History, *args: object) -> bool:
        raise StopIteration

    run = History.run
    History.run = stop  # type: ignore[method-assign,assignment]
    try:
        for _ in allocators.replay(path):
            pass
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
    finally:
        History.run = run  # type: ignore[method-assign]


def calls() -> list[bytes]:
    found = [
        ("_dispatch", (8, np.bool_(True), False)),
        ("_place", (empty_rows(1, 2, 97), np.arange(1, dtype=np.int32))),
        ("_put_adapter", ({"qkv": (np.zeros((2, 3), np.float32),) * 2}, 1)),
    ]
    return [b"".join(messages.encode(call, CALL_CLASSES)) for call in found]


def answer_texts() -> list[bytes]:
    """Return the texts of the parsers' own tests. Two bytes before it choose parsers and chunk length."""
    from tests.serve.test_parsers import CASES

    return [bytes([number % 256, 7]) + case.text.encode() for number, case in enumerate(CASES)]


def parse_answer(data: bytes, _: Path) -> None:
    """Read an answer whole and in chunks: the result must be the same."""
    calls, reasoning = [None, *sorted(TOOL_PARSERS)], [None, *sorted(REASONING_PARSERS)]
    choice, step = data[0] if data else 0, 1 + (data[1] if len(data) > 1 else 0) % 16
    form = Form(calls=calls[choice % len(calls)], reasoning=reasoning[choice // len(calls) % len(reasoning)])
    text = data[2:].decode(errors="replace")

    def read(chunks: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
        deltas = ToolDeltas(form)
        found = [
            delta
            for number, chunk in enumerate(chunks)
            for delta in deltas.feed(chunk, is_last=number == len(chunks) - 1)
        ]
        content = "".join(delta.get("content") or "" for delta in found)
        functions = [call["function"] for call in deltas.calls]
        return content, deltas.reasoning, [(each["name"], each["arguments"]) for each in functions]

    chunks = [text[i : i + step] for i in range(0, len(text), step)] or [""]
    assert read(chunks) == read([text]), f"{form}: in chunks of {step} it is another answer"


BODIES: list[tuple[type[ModelRequest], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": ["a", "b"], "max_tokens": 3, "stop": ["x"], "logit_bias": {"3": 1}}),
    (CompletionRequest, {"prompt": [[1, 2]], "stream": True, "stream_options": {"include_usage": True}}),
    (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "content": "b", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "response_format": {"type": "text"}, "top_logprobs": 2, "logprobs": True,
        },
    ),
    (ResponsesRequest, {"input": [{"role": "user", "content": "a"}], "instructions": "b", "text": {}}),
    (TokenizeRequest, {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}),
    (DetokenizeRequest, {"tokens": [1, 2]}),
    (EmbeddingRequest, {"input": ["a"], "dimensions": 2, "encoding_format": "base64"}),
    (ScoreRequest, {"text_1": "a", "text_2": ["b"]}),
    (RerankRequest, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
]  # fmt: skip


def bodies() -> list[bytes]:
    """Return valid bodies. The first byte chooses the schema."""
    return [bytes([i]) + json.dumps(body).encode() for i, (_, body) in enumerate(BODIES)]


def parse_body(data: bytes, _: Path) -> None:
    """Do what the server does with a body before it asks the engine."""
    schema = BODIES[(data[0] if data else 0) % len(BODIES)][0]
    try:
        body: Any = schema.model_validate(bounds.parsed(bytearray(data[1:]), LIMITS))
        if isinstance(body, TextRequest | ResponsesRequest):
            body.params(SamplingParams(), max_tokens=3, logprobs=None)
        if getattr(body, "messages", None):
            read_messages(body.messages)
        if isinstance(body, ResponsesRequest) and isinstance(body.input, list):
            read_items(body.input)
        if isinstance(body, ScoreRequest):
            body.pair()
        if isinstance(body, RerankRequest):
            body.texts()
    except ApiError as error:
        raise InputError(error.message) from error
    except ValidationError as error:
        raise InputError(str(error.errors()[0]["msg"])) from error


LIMITS = bounds.Limits.of(4 * 2**20, 64)

TARGETS = {
    target.name: target
    for target in (
        Target("blocks", lambda data, _: Blocks.from_bytes(data), blocks, ("handover/blocks", "untrusted")),
        Target("dump", parse_dump, dumps, ("research/replay/dump", "untrusted")),
        Target("gguf", parse_gguf, gguf_files, ("models/", "gguf/gguf_reader")),
        Target("directory", parse_directory, directories, ("models/",)),
        Target("adapter", parse_adapter, adapters, ("models/lora", "models/files/safetensors_files")),
        Target("trace", parse_trace, trace_lines, ("research/lab/traces",)),
        Target("prompts", parse_prompts, prompt_lines, ("prompt_files", "sampling_params", "checks")),
        Target("history", parse_history, histories, ("research/verify/allocators", "untrusted")),
        Target("message", lambda data, _: messages.decode(data, CALL_CLASSES), calls, ("parallel/messages",)),
        Target(
            "body", parse_body, bodies, ("serve/bounds", "serve/schemas", "conversations", "sampling_params")
        ),
        Target("answer", parse_answer, answer_texts, ("serve/tools", "serve/parsers")),
    )
}
