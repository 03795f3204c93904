"""A Llama small enough to compute without a cache in NumPy, and engines over it."""

import functools
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig, SamplingParams
from jaxpaged.engine.engine import Answer, Engine
from jaxpaged.models import llama
from jaxpaged.models.config import ModelConfig
from reference import model as reference_model

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_model_len=128,
    tie_word_embeddings=True,
)


@functools.cache
def weights(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    return llama.random_weights(config, seed)


@functools.cache
def reference_answer(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """The greedy answer of the oracle."""
    return reference_model.generate(CONFIG, weights(), list(prompt), max_tokens)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


def engine(**options: Any) -> Engine:
    """A float32 engine over the tiny model; options are those of `EngineConfig`.

    Engines of the same sizes share one compiled loop: leave the defaults where a test does not care.
    """
    defaults = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8}
    return Engine(EngineConfig(**defaults | options), CONFIG, weights())


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """The answers' token ids, in the prompts' order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add_request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    answers = {answer.request_id: answer for answer in drain(engine)}
    return [answers[i].token_ids for i in ids]


def drain(engine: Engine) -> list[Answer]:
    answers: list[Answer] = []
    while engine.has_work:
        answers += engine.run()[0]
    return answers


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)
