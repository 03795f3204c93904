"""Eight answers to one prompt, beside eight requests for one: `python -m benchmarks.parallel_sampling`.

SmolLM2, a prompt of 500 random tokens, 32 new ones each, without a prefix cache. A JSON line: seconds of
`n=8`, of eight requests one after the other, and of eight at once; all must give the same answers.
"""

from typing import Any

import numpy as np
from absl import app, flags

import jaxpaged
from benchmarks import record

_REPEATS = flags.DEFINE_integer("repeats", 5, "Counted runs of each form, in turns.", lower_bound=1)

NUM_ANSWERS = 8
PROMPT_LEN = 500
OPTIONS: dict[str, Any] = {"max_tokens": 32, "temperature": 1.0, "ignore_eos": True}


def main(argv: list[str]) -> None:
    """Measure, and print the line."""
    record.start(argv)
    llm = jaxpaged.LLM("smollm2", max_num_seqs=NUM_ANSWERS, max_model_len=1024, enable_prefix_caching=False)
    prompt = np.random.default_rng(0).integers(1000, 40000, PROMPT_LEN)
    shared = jaxpaged.SamplingParams(n=NUM_ANSWERS, seed=1, **OPTIONS)
    single = [jaxpaged.SamplingParams(seed=1 + i, **OPTIONS) for i in range(NUM_ANSWERS)]

    def generate(prompts: list[np.ndarray], params: Any) -> list[list[int]]:
        results = llm.generate(prompts, params, use_tqdm=False)
        return [answer.token_ids for result in results for answer in result.outputs]

    forms = {
        "n": lambda: generate([prompt], shared),
        "one_after_the_other": lambda: [generate([prompt], params)[0] for params in single],
        "at_once": lambda: generate([prompt] * NUM_ANSWERS, single),
    }
    answers, computed = [], {}
    for name, form in forms.items():
        before = llm.engine.stats.num_prompt_tokens
        answers.append(form())
        computed[name] = llm.engine.stats.num_prompt_tokens - before
    if any(each != answers[0] for each in answers):
        raise RuntimeError("the answers must be the same in each form")
    seconds = record.in_turns(forms, _REPEATS.value)
    spreads = {name: record.spread(its) for name, its in seconds.items()}
    line = {
        "seconds": spreads,
        "times_faster_than": {
            name: round(its["median"] / spreads["n"]["median"], 2)
            for name, its in spreads.items()
            if name != "n"
        },
        "prompt_tokens": computed,
    }
    record.Results("parallel_sampling").put(line)


if __name__ == "__main__":
    app.run(main)
