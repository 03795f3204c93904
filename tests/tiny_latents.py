"""Tiny models with latent attention, and engines over them."""

import dataclasses
import functools
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families import deepseek
from jaxpaged.models.latents import Latent
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.ropes import Rope
from jaxpaged.models.weights import StoredWeights, random_weights
from tests import tiny

LATENT = Latent(q_rank=16, rank=24, k_dim=8, rope_dim=8, v_dim=16)
FULL = LayerKind(rope=Rope(theta=100.0, dim=LATENT.rope_dim))
WINDOW = dataclasses.replace(FULL, sliding_window=11)


def config(*kinds: LayerKind) -> ModelConfig:
    """Return the tiny model with latents, and with these layers; by default two that see all."""
    return dataclasses.replace(
        tiny.CONFIG,
        num_kv_heads=1,
        head_dim=LATENT.width,
        attention_scale=LATENT.head_dim**-0.5,
        latent=LATENT,
        layers=kinds or (FULL, FULL),
    )


def load(load_as: LoadAs, config: ModelConfig) -> Decoder:
    """Load the model with random weights."""
    names = deepseek.names_of_halves(config)
    return Decoder(StoredWeights(config, names, random_weights(config, names, 0), load_as))


ITSELF = Draft(config(), functools.partial(load, config=config()), cost=tiny.CHEAP)


def driver(*kinds: LayerKind, draft: Draft | None = None, **options: Any) -> Driver:
    """Create an engine over such a model."""
    its, said = config(*kinds), EngineConfig(**tiny.DEFAULTS | options)
    names = deepseek.names_of_halves(its)
    return Driver(said, its, functools.partial(load, config=its), adapter_names=names, draft=draft)
