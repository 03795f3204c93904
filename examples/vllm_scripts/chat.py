"""Answers conversations by the model's chat template, or by another, and continues an answer that was begun.

python chat.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from typing import Any

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def main(args: dict[str, Any]) -> list[RequestOutput]:
    llm = LLM(**args)
    params = SamplingParams(temperature=0, max_tokens=16)
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "am I?"}]}
    ]
    others = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    outputs = llm.chat([asked, others], params, use_tqdm=False)
    outputs += llm.chat(asked, params, use_tqdm=False, chat_template=PLAIN)
    begun = [*others, {"role": "assistant", "content": "Hi, I am"}]
    outputs += llm.chat(
        begun, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    return outputs


if __name__ == "__main__":
    main(vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()))
