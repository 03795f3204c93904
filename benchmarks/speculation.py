"""Drafts on SmolLM2: seconds of a batch with and without, in turns.

    python -m benchmarks.speculation --out benchmarks/results/speculation-cpu.jsonl

Two kinds of work: code of Python's own library to be repeated with a change, and open questions. The answers
with drafts must be those without. Empty slots cost time whether drafts fill them or not, so an engine without
drafts, and with just as many slots as prompts, takes its turns, too: "fitting".
"""

import functools
from typing import Any

from absl import app, flags

from benchmarks.drafted import measured
from benchmarks.record import Results, start
from benchmarks.texts import QUESTIONS, edits
from jaxpaged import LLM, SamplingParams

BATCHES = flags.DEFINE_list("batches", ["1", "4", "16"], "prompts at once")
METHOD = flags.DEFINE_enum("method", "ngram", ["ngram", "suffix", "draft_model", "eagle3"], "way to draft")
MODEL = flags.DEFINE_string("model", "smollm2", "model that answers")
DRAFT = flags.DEFINE_string("draft", "smollm2", "model or head that drafts, for draft_model and eagle3")
QUANTIZATION = flags.DEFINE_string("quantization", None, "form of the answering model's weights")
DRAFT_QUANTIZATION = flags.DEFINE_string("draft_quantization", None, "form of the drafting model's weights")
SLOTS = flags.DEFINE_integer("slots", 16, "max_num_seqs")
ROUNDS = flags.DEFINE_integer("rounds", 3, "counted turns")
CACHED = flags.DEFINE_integer("cached", 0, "past answers to draft from, for suffix")
WIDTHS = flags.DEFINE_list(
    "widths", [], "decode_widths of the engine that drafts (default: those of the others)"
)
DRAFTS = flags.DEFINE_integer("drafts", 7, "most drafts of a request in one step")
TOKENS = flags.DEFINE_integer("tokens", 96, "new tokens of each prompt")
DTYPE = flags.DEFINE_string("dtype", "float32", "number format of weights and activations")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")


def main(argv: list[str]) -> None:
    start(argv)
    settings: dict[str, Any] = {
        "method": METHOD.value,
        "drafts": DRAFTS.value,
        "slots": SLOTS.value,
        "dtype": DTYPE.value,
    }
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": SLOTS.value, "dtype": DTYPE.value}
    sizes |= {"quantization": QUANTIZATION.value, "enable_prefix_caching": False}
    plain = LLM(MODEL.value, **sizes)
    drafts: dict[str, Any] = {"method": METHOD.value, "num_speculative_tokens": DRAFTS.value}
    if METHOD.value == "suffix":
        drafts |= {"suffix_decoding_max_cached_requests": CACHED.value}
        settings |= {"cached": CACHED.value}
    if METHOD.value in ("draft_model", "eagle3"):
        drafts |= {"model": DRAFT.value, "quantization": DRAFT_QUANTIZATION.value}
        settings |= {
            "model": MODEL.value,
            "draft": DRAFT.value,
            "draft quantization": DRAFT_QUANTIZATION.value,
        }
    widths = tuple(map(int, WIDTHS.value)) or None
    drafting = LLM(MODEL.value, **sizes, speculative_config=drafts, decode_widths=widths)
    settings |= {"widths": widths} if widths else {}
    results = Results("speculation", OUT.value, **settings)
    sampling = SamplingParams(max_tokens=TOKENS.value, temperature=0, ignore_eos=True)

    def answers(llm: LLM, prompts: list[str]) -> list[list[int]]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [list(its.outputs[0].token_ids) for its in llm.chat(chats, sampling, use_tqdm=False)]

    for kind, every in (("edits", edits()), ("questions", QUESTIONS)):
        for batch in map(int, BATCHES.value):
            prompts = every[:batch]
            fitting = LLM(MODEL.value, **sizes | {"max_num_seqs": batch})
            ways = {
                "without": functools.partial(answers, plain, prompts),
                "with": functools.partial(answers, drafting, prompts),
                "fitting": functools.partial(answers, fitting, prompts),
            }
            asked = {"what": kind, "prompts": batch, "tokens": batch * TOKENS.value}
            results.put(asked | measured(drafting, ways, ROUNDS.value))


if __name__ == "__main__":
    app.run(main)
