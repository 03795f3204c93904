"""Turns the engine by hand: adds a request before each step, and prints what has finished.

python engine_steps.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

ASKED = [
    ("To be or not to be,", SamplingParams(temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=1)),
    ("What is life?", SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=12, presence_penalty=0.2)),
    ("It is no use", SamplingParams(temperature=0.8, top_k=5, max_tokens=100, ignore_eos=True)),
]


def main(args: argparse.Namespace) -> dict[str, RequestOutput]:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    left = list(enumerate(ASKED))
    finished: dict[str, RequestOutput] = {}
    while left or engine.has_unfinished_requests():
        if left:
            number, (prompt, params) = left.pop(0)
            engine.add_request(str(number), prompt, params)
            if not left:
                engine.abort_request([str(number)])
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                finished[output.request_id] = output
                print(f"{output.request_id}: {output.prompt!r} -> {output.outputs[0].text!r}")
    return finished


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
