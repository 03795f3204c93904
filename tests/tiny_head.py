"""Heads that draft for the tiny model."""

import functools
from typing import Any

import numpy as np

from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.drafting import eagle3
from jaxpaged.models.weights import by_role, random_weights
from tests import tiny

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
    head = eagle3.Eagle3(eagle3.Path("tiny"), config(), given or tensors(), None)
    return Draft(head.config, head.load, head.abstract)


def driver(given: dict[str, np.ndarray] | None = None, **options: Any) -> Driver:
    return tiny.driver(**BY_HEAD | options, draft=draft(given))
