"""Times vLLM's sampler for the CPU on the logits and mixes of `python -m benchmarks.sampling`.

    .venv-vllm/bin/python benchmarks/peers/vllm_sampler.py [--repeats 20]

JSON lines as there; without its mix of everything, for what `min_p`, `logit_bias` and `min_tokens` do is not
in vLLM's sampler but in its engine.
"""

import argparse
import json
import os
import statistics
import time

os.environ["VLLM_NO_USAGE_STATS"] = "1"

import torch
import vllm  # type: ignore[import-not-found]
from vllm.v1.sample.logits_processor import LogitsProcessors  # type: ignore[import-not-found]
from vllm.v1.sample.metadata import SamplingMetadata  # type: ignore[import-not-found]
from vllm.v1.sample.sampler import Sampler  # type: ignore[import-not-found]

LENGTH = 1024  # tokens of each row, half of them its answer
MIXES = ("greedy", "draws", "top_p", "penalties", "logprobs")


def main() -> None:
    """Print a line for each number of rows, vocabulary and mix."""
    parser = argparse.ArgumentParser(description="Time vLLM's sampler.")
    parser.add_argument("--repeats", type=int, default=20, help="Calls, after two that warm up.")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(2)
    sampler = Sampler()
    for num_rows, vocab_size in ((16, 49_152), (16, 151_936), (256, 49_152), (256, 151_936)):
        torch.manual_seed(0)
        logits = torch.randn(num_rows, vocab_size) * 3
        for mix in MIXES:
            metadata = options(mix, num_rows, vocab_size)
            us = []
            for _ in range(repeats + 2):
                fresh = logits.clone()  # it may be changed in place
                start = time.perf_counter()
                sampler(fresh, metadata)
                us.append(1e6 * (time.perf_counter() - start))
            us = us[2:]
            line = {
                "peer": "vllm",
                "version": vllm.__version__,
                "num_rows": num_rows,
                "vocab_size": vocab_size,
            }
            spread = {"median": statistics.median(us), "min": min(us), "max": max(us)}
            line |= {"mix": mix, "us": {name: round(value, 1) for name, value in spread.items()}}
            print(json.dumps(line), flush=True)


def options(mix: str, num_rows: int, vocab_size: int) -> SamplingMetadata:
    """Return what vLLM's engine gives its sampler for rows that are all alike."""
    tokens = torch.randint(0, 2000, (num_rows, LENGTH))
    is_greedy = mix in ("greedy", "penalties", "logprobs")
    has_penalties = mix == "penalties"
    ones = torch.ones(num_rows)
    return SamplingMetadata(
        temperature=None if is_greedy else ones,
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=ones * 0.9 if mix == "top_p" else None,
        top_k=None,
        generators={row: torch.Generator().manual_seed(row) for row in range(num_rows)},
        max_num_logprobs=20 if mix == "logprobs" else None,
        no_penalties=not has_penalties,
        prompt_token_ids=tokens[:, : LENGTH // 2].contiguous() if has_penalties else None,
        frequency_penalties=ones * 0,
        presence_penalties=ones * 0.5,
        repetition_penalties=ones * 1.1,
        output_token_ids=tokens[:, LENGTH // 2 :].tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


if __name__ == "__main__":
    main()
