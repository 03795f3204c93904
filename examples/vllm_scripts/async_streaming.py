"""Streams the answers to several prompts at the same time, and gives one of them up.

python async_streaming.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

PROMPTS = ["The sea is", "The sky is", "The sun is"]


async def stream(engine: AsyncLLM, prompt: str, request_id: str, most: int | None = None) -> str:
    params = SamplingParams(
        temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    text, num_tokens = "", 0
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for answer in output.outputs:
            text += answer.text
            num_tokens += len(answer.token_ids)
            print(f"{request_id}: {answer.text!r} [{answer.finish_reason}]")
        if most is not None and num_tokens >= most and not output.finished:
            await engine.abort(request_id)
    return text


async def run(args: argparse.Namespace) -> list[str]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        asked = [stream(engine, prompt, f"request-{i}") for i, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*asked, stream(engine, PROMPTS[0], "given-up", most=4))
    finally:
        engine.shutdown()


def main(args: argparse.Namespace) -> list[str]:
    return asyncio.run(run(args))


if __name__ == "__main__":
    main(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
