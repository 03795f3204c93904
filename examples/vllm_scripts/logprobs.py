"""Several answers to a prompt of token ids, with the log-probabilities of their tokens and of the prompt's.

python logprobs.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams, TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(args: argparse.Namespace) -> list[RequestOutput]:
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    tokenizer = llm.get_tokenizer()
    prompt = TokensPrompt(prompt_token_ids=tokenizer.encode("The capital of France is"))
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate(prompt, params)
    for answer in outputs[0].outputs:
        print(f"{answer.index}: {answer.text!r}, {answer.cumulative_logprob:.3f}")
        for token, candidates in zip(answer.token_ids, answer.logprobs or [], strict=True):
            told = {each.decoded_token: round(each.logprob, 3) for each in candidates.values()}
            print(f"  {token}, rank {candidates[token].rank}: {told}")
    return outputs


if __name__ == "__main__":
    main(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args())
