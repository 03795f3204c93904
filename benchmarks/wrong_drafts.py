"""Drafts that are never right, of models and heads of random weights: seconds of a batch with and without.

    python -m benchmarks.wrong_drafts --out benchmarks/results/wrong-drafts-cpu.jsonl

SmolLM2 is served, with a random Llama of a third of its layers to draft, or a random EAGLE-3 head; and a
random GLM-4.5 of SmolLM2's sizes with its MTP layer. Engines with and without take turns. Their answers must
be the same. One engine without is made first, and one last: where weights lie in memory makes 1% or 2%.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags
from safetensors.numpy import save_file

from benchmarks.drafted import measured
from benchmarks.record import Results, start
from benchmarks.texts import QUESTIONS
from jaxpaged import LLM, SamplingParams
from jaxpaged.models import loading
from jaxpaged.models.drafting import eagle3, mtp
from jaxpaged.models.families import from_hf, names_of
from jaxpaged.models.weights import random_weights

METHODS = flags.DEFINE_list("methods", ["draft_model", "eagle3", "mtp"], "ways to draft")
BATCHES = flags.DEFINE_list("batches", ["1", "4"], "prompts at once")
ALL = flags.DEFINE_bool("all", False, "draft for all answers at once, not for one alone")
SLOTS = flags.DEFINE_integer("slots", 8, "max_num_seqs")
DRAFTS = flags.DEFINE_integer("drafts", 3, "most drafts of a request in one step")
TOKENS = flags.DEFINE_integer("tokens", 64, "new tokens of each prompt")
ROUNDS = flags.DEFINE_integer("rounds", 3, "counted turns")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")

SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
LLAMA = SIZES | {"model_type": "llama", "num_hidden_layers": 10, "tie_word_embeddings": True}
HEAD = SIZES | {"model_type": "llama", "num_hidden_layers": 1}
GLM = SIZES | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 30,
    "first_k_dense_replace": 29,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def written(folder: Path, said: dict[str, Any], method: str) -> Path:
    """Write a model or a head of random weights."""
    path = folder / f"{said['model_type']} {method}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(said))
    if method == "eagle3":
        config = eagle3.described(said, {"lm_head.weight"}, loading.open_checkpoint("smollm2").config)
        tensors = random_weights(config, eagle3.NAMES, seed=0)
    else:
        config = from_hf(said)
        tensors = random_weights(config, names_of(said, config), seed=0)
    if method == "mtp":
        names = mtp.names_behind(names_of(said, config), config.num_layers)
        tensors |= random_weights(mtp.described(config), names, seed=1)
    save_file(tensors, path / "model.safetensors")
    return path


def main(argv: list[str]) -> None:
    start(argv)
    results = Results("wrong_drafts", OUT.value, drafts=DRAFTS.value, slots=SLOTS.value)
    sampling = SamplingParams(max_tokens=TOKENS.value, temperature=0, ignore_eos=True)
    tokenizer = loading.open_checkpoint("smollm2").tokenizer
    prompts = [tokenizer.encode(its) for its in QUESTIONS]

    def answers(llm: LLM, num: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": list(its)} for its in prompts[:num]]
        return [list(its.outputs[0].token_ids) for its in llm.generate(asked, sampling, use_tqdm=False)]

    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": SLOTS.value, "dtype": "float32"}
    sizes |= {"enable_prefix_caching": False, "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS.value:
            model = "smollm2" if method != "mtp" else str(written(Path(folder), GLM, method))
            drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS.value}
            if method != "mtp":
                said = LLAMA if method == "draft_model" else HEAD
                drafts |= {"model": str(written(Path(folder), said, method))}
            if ALL.value:
                drafts |= {"disable_by_batch_size": SLOTS.value}
            plain, drafting = LLM(model, **sizes), LLM(model, **sizes, speculative_config=drafts)
            last = LLM(model, **sizes)
            for num in map(int, BATCHES.value):
                ways = {
                    "without": functools.partial(answers, plain, num),
                    "with": functools.partial(answers, drafting, num),
                    "without, made last": functools.partial(answers, last, num),
                }
                asked = {"method": method, "prompts": num, "tokens": num * TOKENS.value}
                results.put(asked | measured(drafting, ways, ROUNDS.value))


if __name__ == "__main__":
    app.run(main)
