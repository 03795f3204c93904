"""Looks for the likeliest answers to prompts, one prompt at a time.

python beam_search.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from vllm import LLM, EngineArgs, TextPrompt
from vllm.outputs import BeamSearchOutput
from vllm.sampling_params import BeamSearchParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args: argparse.Namespace) -> list[BeamSearchOutput]:
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    params = BeamSearchParams(beam_width=2, max_tokens=8, include_stop_str_in_output=True)
    prompts = [TextPrompt(prompt="The moon"), TextPrompt(prompt="The stars")]
    outputs = llm.beam_search(prompts, params, concurrency_limit=1)
    for output in outputs:
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.3f} {sequence.text!r}")
    return outputs


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
