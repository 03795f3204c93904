"""Answers the same prompt with the model alone and with an adapter, in one batch.

python lora.py --model HuggingFaceTB/SmolLM2-135M-Instruct --enable-lora --lora-path my-adapter
"""

import argparse

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args: argparse.Namespace) -> list[RequestOutput]:
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    adapter = LoRARequest("mine", 1, args.lora_path, base_model_name=args.model)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(["Tell me"] * 2, params, lora_request=[None, adapter])
    for output in outputs:
        name = output.lora_request.lora_name if output.lora_request else "the model"
        print(f"{name}: {output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--lora-path", required=True, help="a directory that PEFT has saved")
    main(EngineArgs.add_cli_args(parser).parse_args())
