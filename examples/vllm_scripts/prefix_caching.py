"""Answers prompts that begin alike: the second time what they share is found in the cache.

python prefix_caching.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PREFIX = "You know all about the sea. Its fish, its ships, its winds and tides. "
PROMPTS = [PREFIX + "What is a cod?", PREFIX + "What is a brig?"]


def main(args: argparse.Namespace) -> list[list[RequestOutput]]:
    args.enable_prefix_caching = True
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    params = SamplingParams(temperature=0, max_tokens=8)
    found = []
    for what in ("first", "second"):
        outputs = llm.generate(PROMPTS, params)
        for output in outputs:
            total = len(output.prompt_token_ids)
            print(f"{what} time: {output.num_cached_tokens} of {total} prompt tokens were cached")
        found.append(outputs)
    llm.reset_prefix_cache()
    return found


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
