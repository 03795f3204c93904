"""Shared parts of the runners: arguments, two pinned cores, timing, and one JSON line a repeat.

A runner is a script for the Python its peer is installed in, so this folder is no package and this file
needs only the standard library (3.11 or later). A runner calls, in this order:

    options = harness.start(description)      # before it imports its peer: sets the cores and the threads
    ... load the model ...
    harness.measure(peer, version, options, generate)

Standard output carries the JSON lines and nothing else: whatever the peer prints, from Python or from C,
goes to standard error.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

NUM_THREADS = 2
# Weights as a GGUF file of that type has them, for llama.cpp and ours; all else as each has it for bfloat16.
QUANTISED = ["q8_0", "q4_0", "q4_1"]
# The model that drafts, in the folder of the model, and the most drafts of an answer at a time.
DRAFT, NUM_DRAFTS = "draft.gguf", 4
NGRAM, NGRAM_DRAFTS = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}, 7


@dataclass(frozen=True)
class Request:
    """One prompt, the exact number of tokens to generate for it, what JSON schema they follow, and how many
    answers there are.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    json_schema: str | None = None
    num_answers: int = 1


@dataclass(frozen=True)
class Options:
    """The command line, read; `extra` holds the flags only one runner has."""

    model: Path
    dtype: str
    workload: str
    requests: list[Request]
    max_num_seqs: int
    repeats: int
    cores: list[int]
    extra: argparse.Namespace
    results: TextIO

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        return max(len(request.prompt_token_ids) + request.max_tokens for request in self.requests)


# From requests to the tokens generated for each: exactly max_tokens of them, greedy, in the requests' order.
Generate = Callable[[list[Request]], list[list[int]]]
# Likewise to all answers of each, sampled.
Sample = Callable[[list[Request]], list[list[list[int]]]]


def start(description: str, flags: dict[str, str] | None = None) -> Options:
    """Read the command line, pin this process to two cores and keep standard output for the results.

    Args:
        description: what `--help` says first.
        flags: switches of this runner alone, from name (`--continuous`) to what it does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory or a GGUF file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", *QUANTISED], required=True)
    parser.add_argument("--workload", type=Path, required=True, help="a workload as a JSON file")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs, after one that is not")
    for flag, meaning in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=meaning)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"{args.repeats=} must be at least 1")
    if not args.model.exists():
        parser.error(f"{args.model=} must be a file or directory that exists")
    try:
        workload = json.loads(args.workload.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"--workload {args.workload}: {error}")
    if not workload["requests"]:
        parser.error(f"--workload {args.workload} must have at least one request")

    return Options(
        model=args.model,
        dtype=args.dtype,
        workload=workload["name"],
        requests=[Request(**request) for request in workload["requests"]],
        max_num_seqs=workload["max_num_seqs"],
        repeats=args.repeats,
        cores=_pin_to_cores(),
        extra=args,
        results=_keep_standard_output(),
    )


def measure(
    peer: str,
    version: str,
    options: Options,
    generate: Generate,
    reset: Callable[[], None] = lambda: None,
    counts: Callable[[], tuple[int, int]] | None = None,
) -> None:
    """Run the workload once uncounted, then `repeats` times, and write a JSON line for each.

    Each repeat runs twice: once for a single token per request (`prefill_seconds`), once in full (`seconds`,
    prompt time included). `reset` is called before every run and is not timed. `counts` returns how many
    tokens were drafted so far, and how many of these were accepted.

    Raises: RuntimeError if an answer has not exactly the tokens asked for.
    """
    prompts_only = [replace(request, max_tokens=1) for request in options.requests]
    reset()
    warm, _ = _timed(generate, options.requests)
    num_output_tokens = sum(map(len, warm))
    for repeat in range(options.repeats):
        reset()
        _, prefill_seconds = _timed(generate, prompts_only)
        reset()
        before = counts() if counts else (0, 0)
        token_ids, seconds = _timed(generate, options.requests)
        measured: dict[str, Any] = {
            "seconds": round(seconds, 4),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in options.requests),
            "output_tokens": num_output_tokens,
            "prefill_seconds": round(prefill_seconds, 4),
            "output_tokens_per_s": round(num_output_tokens / seconds, 2),
        }
        if counts:
            measured["drafted"], measured["accepted"] = (a - b for a, b in zip(counts(), before, strict=True))
        if repeat == 0:
            measured["token_ids"] = token_ids
        _put(peer, version, options, repeat, measured)


def measure_rollouts(
    peer: str,
    version: str,
    options: Options,
    sample: Sample,
    new_weights: Callable[[float], Any],
    update: Callable[[Any], object],
) -> None:
    """Run rounds of rollouts, each an update of all weights and then all answers, and write a line for each.

    A round is run before that is not counted. Whether an update has an effect is checked first: with all
    weights doubled a prompt has another answer, and with the old ones its own again. Memory is the most that
    the process has during an update, less what it had before; the trainer's new weights were there.

    Raises: RuntimeError if an update has no effect, or an answer has not exactly the tokens asked for.
    """
    few = [replace(request, num_answers=1) for request in options.requests[:1]]
    first = sample(few)
    update(new_weights(2.0))
    changed = sample(few)
    update(new_weights(1.0))
    if changed == first or sample(few) != first:
        raise RuntimeError("new weights must change an answer, and the old ones bring it back")
    want = [[request.max_tokens] * request.num_answers for request in options.requests]
    for repeat in range(-1, options.repeats):
        given = new_weights(1.0 + 1e-3 * (repeat + 2))
        with most_memory() as memory:
            begin = time.perf_counter()
            update(given)
            update_seconds = time.perf_counter() - begin
        del given
        begin = time.perf_counter()
        answers = sample(options.requests)
        seconds = time.perf_counter() - begin
        got = [list(map(len, each)) for each in answers]
        if got != want:
            raise RuntimeError(f"the answers' lengths {got} must be {want}")
        if repeat < 0:
            continue
        num_answers = sum(map(len, got))
        measured = {
            "update_seconds": round(update_seconds, 4),
            "update_bytes": memory[-1] - memory[0],
            "seconds": round(seconds, 4),
            "answers": num_answers,
            "rollouts_per_s": round(num_answers / (seconds + update_seconds), 3),
        }
        _put(peer, version, options, repeat, measured)


def sampler(llm: Any, sampling_params: Callable[..., Any]) -> Sample:
    """Return the function by which an engine with vLLM's interface samples answers, with log-probabilities.

    Args:
        llm: of `vllm.LLM`'s interface.
        sampling_params: the `SamplingParams` of the same library.
    """

    def params(request: Request, seed: int) -> Any:
        return sampling_params(
            n=request.num_answers,
            temperature=1.0,
            seed=seed,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )

    def sample(requests: list[Request]) -> list[list[list[int]]]:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        asked = [params(request, seed) for seed, request in enumerate(requests)]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]

    return sample


@contextlib.contextmanager
def most_memory() -> Iterator[list[int]]:
    """Yield a list with the bytes of memory that this process has; at the end with the most of them, too."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not done.wait(0.002):
            most.append(max(most[-1], resident()))
            del most[1:-1]

    most, done = [resident()], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
        most.append(max(most[-1], resident()))


def _put(peer: str, version: str, options: Options, repeat: int, measured: dict[str, Any]) -> None:
    """Write the line of a repeat."""
    about = {"peer": peer, "version": version, "dtype": options.dtype, "workload": options.workload}
    print(json.dumps(about | {"repeat": repeat} | measured), file=options.results, flush=True)


def _timed(generate: Generate, requests: list[Request]) -> tuple[list[list[int]], float]:
    begin = time.perf_counter()
    token_ids = generate(requests)
    seconds = time.perf_counter() - begin
    got, want = list(map(len, token_ids)), [request.max_tokens for request in requests]
    if got != want:
        raise RuntimeError(f"the answers' lengths {got} must be {want}")
    return token_ids, seconds


def _pin_to_cores() -> list[int]:
    """Keep this process, and all it starts, on the first two cores it may use, one thread each."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:NUM_THREADS]
        os.sched_setaffinity(0, cores)
    else:
        cores = list(range(NUM_THREADS))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(NUM_THREADS)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return cores


def _keep_standard_output() -> TextIO:
    """Return standard output as a file; descriptor 1, which C code writes to, becomes standard error."""
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results
