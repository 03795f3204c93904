"""Generation: answer a batch, look at the tokens' probabilities, and see that company changes no bit.

Run it from the checkout with `python -m examples.generation`, or cell by cell in an editor. `--out` names the
folder for the picture. `--model` names another model.
"""

# %% Load a model. The first start compiles the serving loop; later starts read it from the disk.
import argparse

import matplotlib
import numpy as np

from jaxpaged import LLM, SamplingParams

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="smollm2")
parser.add_argument("--out", default="docs/drawings")
args, _ = parser.parse_known_args()
sizes = {"max_num_seqs": 4, "block_size": 8, "num_blocks": 65, "max_num_batched_tokens": 132}
llm = LLM(args.model, dtype="float32", max_model_len="auto", **sizes)

# %% Answer three prompts in one batch.
prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
greedy = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
results = llm.generate(prompts, greedy, use_tqdm=False)
for result in results:
    print(repr(result.prompt), "->", repr(result.outputs[0].text))

# %% A request gets the same bits alone as in the batch.
for prompt, together in zip(prompts, results, strict=True):
    [alone] = llm.generate([prompt], greedy, use_tqdm=False)
    assert alone.outputs[0].token_ids == together.outputs[0].token_ids
    assert alone.outputs[0].cumulative_logprob == together.outputs[0].cumulative_logprob
print("each answer has the same bits alone")

# %% Several answers to one prompt share its blocks. A seed makes them repeatable.
params = SamplingParams(temperature=0.8, n=3, seed=7, max_tokens=16)
[result] = llm.generate(["The sea is"], params, use_tqdm=False)
for answer in result.outputs:
    print(answer.index, repr(answer.text))

# %% The second time, the prompt's full blocks come from the prefix cache.
story = "The old man looked at the sea. " * 2
for _ in range(2):
    [result] = llm.generate([story], greedy, use_tqdm=False)
    print(len(result.prompt_token_ids), "prompt tokens,", result.num_cached_tokens, "cached")

# %% Draw the probability of each chosen token.
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for result in results:
    answer = result.outputs[0]
    chosen = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    axes.plot(np.arange(1, len(chosen) + 1), np.exp(chosen), marker="o", label=result.prompt)
axes.set(xlabel="token of the answer", ylabel="probability", ylim=(0, 1.05))
figure.legend(loc="outside upper center", ncols=3, frameon=False)
figure.savefig(f"{args.out}/generation.png", dpi=110)
llm.engine.close()
