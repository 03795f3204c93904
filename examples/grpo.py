"""GRPO in one process: an engine that answers, a learner with its bits, and new weights without a copy.

A tiny Llama of random weights learns a task that a rule can check: each token of an answer must be odd where
the token before it is odd, and even where that is even. The mean reward of random answers is 0.5. Run it from
the checkout with `python -m examples.grpo`; `--out` names the folder for the picture and the results.
"""

import argparse
import json
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from safetensors.numpy import save_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.models.families import from_hf
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import random_weights
from jaxpaged.research.learn.learner import padded

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NUM_PROMPTS, NUM_ANSWERS, PROMPT_LEN, ANSWER_LEN = 8, 8, 6, 8
MODEL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Write a tiny Llama of random weights as a directory of Hugging Face's form."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file(random_weights(from_hf(MODEL), NAMES, seed=0), folder / "model.safetensors")
    return folder


def reward(prompt: list[int], answer: list[int]) -> float:
    """Return the share of the answer's tokens that are odd or even as the token before them is."""
    is_odd = np.array([prompt[-1], *answer]) % 2
    return float(np.mean(is_odd[1:] == is_odd[:-1]))


def main() -> None:
    """Train, print a line for each tenth step, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="docs/drawings")
    parser.add_argument("--steps", type=int, default=100)
    args, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            write_model(pathlib.Path(folder)),
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=4,
            block_size=8,
            num_blocks=128,
        )
    learner, optimiser = llm.learner(), optax.adam(1e-2)
    weights = llm.weights
    state = optimiser.init(weights)

    def loss(weights, tokens, lengths, old, advantages, is_answer):
        """Return GRPO's loss, and the least and the largest importance ratio."""
        ratio = jnp.where(is_answer, jnp.exp(learner.log_probs(weights, tokens, lengths) - old), 1)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -jnp.sum(gain * is_answer) / jnp.sum(is_answer), (jnp.min(ratio), jnp.max(ratio))

    @jax.jit
    def train(weights, state, *batch):
        """Return weights and state after an update, and the ratios before it."""
        gradients, ratios = jax.grad(loss, has_aux=True)(weights, *batch)
        updates, state = optimiser.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, ratios

    rng, rewards, first_ratios = np.random.default_rng(0), [], None
    began = time.perf_counter()
    for step in range(args.steps):
        prompts = rng.integers(0, MODEL["vocab_size"], (NUM_PROMPTS, PROMPT_LEN)).tolist()
        params = SamplingParams(
            n=NUM_ANSWERS,
            max_tokens=ANSWER_LEN,
            temperature=1,
            seed=step,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        groups, sequences, told = [], [], []
        for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            groups.append([reward(prompt, answer.token_ids) for answer in result.outputs])
            for answer in result.outputs:
                sequences.append([*prompt, *answer.token_ids])
                pairs = zip(answer.logprobs, answer.token_ids, strict=True)
                told.append([its[token].logprob for its, token in pairs])
        by_group = np.array(groups, np.float32)
        rewards.append(float(by_group.mean()))
        spread = by_group.std(axis=1, keepdims=True)
        advantages = ((by_group - by_group.mean(axis=1, keepdims=True)) / (spread + 1e-4)).reshape(-1)
        tokens, lengths = padded(sequences)
        old = np.zeros((len(sequences), PROMPT_LEN + ANSWER_LEN - 1), np.float32)
        old[:, PROMPT_LEN - 1 :] = told
        is_answer = np.broadcast_to(np.arange(old.shape[1]) >= PROMPT_LEN - 1, old.shape)
        weights, state, ratios = train(weights, state, tokens, lengths, old, advantages, is_answer)
        ratios = [float(each) for each in ratios]
        if first_ratios is None:
            first_ratios = ratios
            print(f"step 0: importance ratios in [{ratios[0]!r}, {ratios[1]!r}]")
        llm.update_weights(weights)
        if step % 10 == 9:
            print(f"step {step + 1}: mean reward of the last ten steps {np.mean(rewards[-10:]):.3f}")

    out = pathlib.Path(args.out)
    line = {
        "command": f"python -m examples.grpo --steps {args.steps}",
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "seconds": round(time.perf_counter() - began, 1),
        "ratios at step 0": first_ratios,
        "rewards": [round(each, 4) for each in rewards],
    }
    (out / "grpo.jsonl").write_text(json.dumps(line) + "\n")
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(rewards)
    axes.axhline(0.5, color="grey", linestyle="--", label="random answers")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0.4, 1.02))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(out / "grpo.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
