"""Heads that draft for the tiny model."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.drafting import eagle3
from jaxpaged.models.drafting.stored import StoredHead
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights, by_role, random_weights
from tests import tiny

WIDTH = tiny.CONFIG.hidden_size
CHOSEN = np.array([token for token in range(tiny.CONFIG.vocab_size) if token % 3])  # by a head
SAID = {
    "model_type": "llama",
    "vocab_size": tiny.CONFIG.vocab_size,
    "hidden_size": tiny.CONFIG.hidden_size,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "draft_vocab_size": len(CHOSEN),
    eagle3.TAPS: [0, 1, 2],
}
DRAFTS: dict[str, Any] = {"method": "eagle3", "model": "tiny", "num_speculative_tokens": 3}
BY_HEAD = {"speculative_config": DRAFTS | {"disable_by_batch_size": 4}}


def config(**said: Any) -> ModelConfig:
    return eagle3.described(SAID | said, {"lm_head.weight", eagle3.OFFSETS}, tiny.CONFIG)


@functools.cache
def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    made = random_weights(config(), eagle3.NAMES, seed)
    return made | {eagle3.OFFSETS: CHOSEN - np.arange(len(CHOSEN))}


def reference_weights() -> dict[str, np.ndarray]:
    """Return the weights by their roles, as the oracle takes them."""
    return by_role(config(), eagle3.NAMES, tensors())


def draft(given: dict[str, np.ndarray] | None = None) -> Draft:
    """Return a head of these tensors, or of random ones."""
    its = given or tensors()
    head = StoredHead(Path("tiny"), config(), eagle3.NAMES, its, targets=eagle3.targets_of(config(), its))
    return Draft(head.config, head.load, head.abstract, tiny.CHEAP)


def driver(given: dict[str, np.ndarray] | None = None, **options: Any) -> Driver:
    return tiny.driver(**BY_HEAD | options, draft=draft(given))


def bigrams() -> tuple[Callable[[LoadAs], Decoder], dict[str, np.ndarray]]:
    """Make a model whose next token depends on the last one alone, and a head that knows how.

    The first 32 tokens have a dimension each, and each is followed by another one in a ring.
    """
    model = {name: np.zeros_like(weight) for name, weight in tiny.weights().items()}
    head = {name: np.zeros_like(weight) for name, weight in tensors().items()}
    one_hot, follows = np.eye(WIDTH, dtype=np.float32), (np.arange(WIDTH) * 5 + 3) % WIDTH
    size = np.float32(WIDTH**0.5)  # of a normed vector
    wide = size / (1 + np.exp(-size)) * size  # of gate and up together
    for weights in (model, head):
        for name in weights:
            if name.endswith("norm.weight"):
                weights[name] = np.ones_like(weights[name])
    for weights, prefix in ((model, "model.layers.0.mlp"), (head, "layers.0.mlp")):
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}.{name}.weight"][:WIDTH] = one_hot
        weights[f"{prefix}.down_proj.weight"][:, :WIDTH] = (one_hot[follows] - one_hot).T * 4 / wide
    model["model.embed_tokens.weight"][:WIDTH] = 4 * one_hot
    head["fc.weight"][:, WIDTH : 2 * WIDTH] = one_hot  # of what lies behind the first layer
    count = len(CHOSEN)
    targets = np.arange(count)[::-1]
    head[eagle3.OFFSETS] = targets - np.arange(count)
    head["lm_head.weight"] = model["model.embed_tokens.weight"][targets]

    def load(load_as: LoadAs) -> Decoder:
        return Decoder(StoredWeights(tiny.CONFIG, NAMES, model, load_as))

    return load, head
