"""What each of several processes runs in `test_processes.py`: answers as JSON lines, of process 0 alone."""

import json
import sys
from pathlib import Path

import numpy as np

from jaxpaged import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "goldens/families/llama"
PROMPTS = [[5, 6, 7, 8, 9] * n for n in (1, 4, 9)]


def say(**what):
    print(json.dumps(what), flush=True)


def ask(llm):
    llm_answers = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0), use_tqdm=False)
    long = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0)
    handle, other = (llm.engine.submit(PROMPTS[i], long) for i in (0, 1))
    first = next(iter(handle))
    handle.abort()
    last = handle.result()
    say(
        answers=[answer.outputs[0].token_ids for answer in llm_answers],
        aborted=[first.finish_reason.name, last.finish_reason.name, len(last.token_ids) < 100],
        other=other.result().token_ids,
        free=llm.reset_prefix_cache(),
    )


def main(arguments):
    options = json.loads(arguments)
    llm = LLM(
        GOLDEN,
        skip_tokenizer_init=True,
        generation_config="vllm",
        num_blocks=64,
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=64,
        **options,
    )
    ask(llm)
    if sys.stdin.readline() == "more\n":
        llm.engine.submit(np.array(PROMPTS[0]), SamplingParams(max_tokens=100, ignore_eos=True))
        say(more=True)
        while True:
            llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
