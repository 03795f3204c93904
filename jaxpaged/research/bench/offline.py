"""`jaxpaged bench latency` and `throughput`: the engine in this process, without a server."""

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import jaxpaged
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.api.llm import LLM
from jaxpaged.checks import InputError, check
from jaxpaged.inputs import TokensPrompt
from jaxpaged.lora import LoRARequest
from jaxpaged.research.bench import datasets
from jaxpaged.research.bench.datasets import Sample, Words
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
MOST_DUMMY_ID = 10_000  # prompts are drawn from the ids below, as vLLM's are


def latency(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> None:
    """Time one batch again and again, and tell the mean and percentiles."""
    llm = LLM(args.model, **engine_options)
    max_model_len, needed = llm.engine.door.max_model_len, args.input_len + args.output_len
    check(
        "max_model_len",
        max_model_len,
        f"at least {needed}, input_len and output_len",
        needed <= max_model_len,
    )
    vocab_size = min(MOST_DUMMY_ID, llm.engine.door.model_config.vocab_size)
    words = Words(llm.tokenizer, vocab_size, args.seed)
    prompts = [TokensPrompt(prompt_token_ids=words.draw(args.input_len)) for _ in range(args.batch_size)]
    run: Callable[[], Any]
    if args.use_beam_search:
        search = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)

        def run() -> Any:
            return llm.beam_search(prompts, search)
    else:
        params = _params(args, args.output_len)

        def run() -> Any:
            return llm.generate(prompts, params, use_tqdm=False)

    for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", unit="batch"):
        run()
    if args.profile is not None:
        with _profile(args.profile):
            run()
        return
    seconds = [_timed(run) for _ in tqdm(range(args.num_iters), desc="measured", unit="batch")]
    percentiles = dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))
    mean = float(np.mean(seconds))
    print(f"Avg latency: {mean} seconds")
    for percentage, value in percentiles.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    results = {"avg_latency": mean, "latencies": seconds, "percentiles": percentiles}
    _write(args, results, llm)


def throughput(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> None:
    """Time all requests asked at once, and tell requests and tokens a second."""
    llm = LLM(args.model, **engine_options)
    max_model_len = llm.engine.door.max_model_len
    samples = datasets.make(args, llm, args.num_prompts, args.seed)
    warmups = datasets.make(args, llm, args.num_warmups, args.seed + 1) if args.num_warmups else []
    datasets.check_lengths([*samples, *warmups], max_model_len)
    # Nothing may be left to compile when time counts.
    llm.generate([TokensPrompt(prompt_token_ids=[0])], _params(args, 1), use_tqdm=False)
    if warmups:
        _ask(args, llm, warmups)
    if args.profile is not None:
        with _profile(args.profile):
            _ask(args, llm, samples)
        return
    outputs: list[Any] = []
    seconds = _timed(lambda: outputs.extend(_ask(args, llm, samples)))
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = num_prompt_tokens + num_output_tokens
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{num_output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt_tokens}")
    print(f"Total num output tokens:  {num_output_tokens}")
    results = {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": total / seconds,
        "output_tokens_per_second": num_output_tokens / seconds,
    }
    _write(args, results, llm)


def _params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not args.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _ask(args: argparse.Namespace, llm: LLM, samples: Sequence[Sample]) -> list[Any]:
    """Answer all requests, asked at once."""
    prompts: list[Any] = [sample.prompt for sample in samples]
    params = [_params(args, sample.output_len) for sample in samples]
    adapters = _adapters(args, llm, len(samples))
    if not args.async_engine:
        return llm.generate(prompts, params, lora_request=adapters)
    engine = AsyncLLM.of(llm)

    async def answer(i: int) -> Any:
        outputs = engine.generate(prompts[i], params[i], f"request-{i}", lora_request=adapters[i])
        [output] = [output async for output in outputs]
        return output

    async def answer_all() -> list[Any]:
        return await asyncio.gather(*(answer(i) for i in range(len(samples))))

    return asyncio.run(answer_all())


def _adapters(args: argparse.Namespace, llm: LLM, count: int) -> list[LoRARequest | None]:
    """Return each request's adapter: as many different ones as run together, all from the same directory."""
    if args.lora_path is None:
        return [None] * count
    max_loras, rng = llm.config.max_loras, random.Random(args.seed)
    is_random = args.lora_assignment == "random"
    ids = [1 + (rng.randrange(max_loras) if is_random else i % max_loras) for i in range(count)]
    return [LoRARequest(str(i), i, args.lora_path) for i in ids]


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@contextlib.contextmanager
def _profile(folder: str) -> Any:
    """Record a run with JAX's profiler into a folder."""
    with jax.profiler.trace(folder):
        yield
    print(f"the profile is in {folder}: tensorboard --logdir {folder}")


def _write(args: argparse.Namespace, results: Mapping[str, Any], llm: LLM) -> None:
    """Write the results to the file that was asked for, with what they were measured on."""
    if args.output_json is None:
        return
    about = {
        "model_id": str(args.model),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jaxpaged": jaxpaged.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "dtype": llm.config.dtype,
        "max_num_seqs": llm.config.max_num_seqs,
    }
    try:
        Path(args.output_json).write_text(json.dumps({**about, **results}, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output-json {args.output_json!r} cannot be written: {error}") from error
