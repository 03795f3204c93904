"""Answers several prompts in one batch.

python basic.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from vllm import LLM, EngineArgs, RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]


def main(args: argparse.Namespace) -> list[RequestOutput]:
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    params = llm.get_default_sampling_params()
    params.temperature = 0
    params.max_tokens = 16
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        answer = output.outputs[0]
        print(f"{output.prompt!r} -> {answer.text!r} [{answer.finish_reason}]")
    return outputs


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
