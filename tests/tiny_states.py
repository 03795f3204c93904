"""Tiny models with layers of states, and engines over them."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import STATE, LayerKind, ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families import llama
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.mixers.description import Mixer
from jaxpaged.models.mixers.gated_delta import GatedDelta
from jaxpaged.models.mixers.lightning import Lightning
from jaxpaged.models.mixers.mamba1 import Mamba1
from jaxpaged.models.mixers.mamba2 import Mamba2
from jaxpaged.models.mixers.short_convolution import ShortConvolution
from jaxpaged.models.names import Names
from jaxpaged.models.weights import StoredWeights, random_weights
from tests import tiny

# Numbers of heads and widths that 16 divides, as those of all models: see docs/research/states.md.
DELTA = GatedDelta(num_heads=16, num_key_heads=8, k_dim=16, v_dim=16, kernel_size=4)
MAMBA = Mamba2(num_heads=16, head_dim=16, state_size=16, num_groups=2, kernel_size=4, norm_groups=2)
MAMBA_1 = Mamba1(width=32, state_size=16, dt_rank=16, kernel_size=4, norms="weighted")
DECAYS = tuple(tuple(-0.5 / 2**head * (2 - layer) for head in range(4)) for layer in range(2))
LIGHTNING = Lightning(num_heads=4, head_dim=16, log_decays=DECAYS)
CONVOLUTION = ShortConvolution(width=32, kernel_size=3, bias=True)
FULL, WINDOW = tiny.CONFIG.layers[0], dataclasses.replace(tiny.CONFIG.layers[0], sliding_window=11)
BOTH = dataclasses.replace(FULL, has_state=True)  # side by side
# Layers of one part each, as in Nemotron-H.
ONE_PART = (
    *(dataclasses.replace(STATE, feeds=False), dataclasses.replace(FULL, attends=False)),
    *(dataclasses.replace(FULL, feeds=False), dataclasses.replace(STATE, feeds=False)),
)
ROLES = ("in", "ba", "conv", "a_log", "d", "dt_bias", "norm", "out")
ROLES += ("gate", "x", "dt", "dt_norm", "b_norm", "c_norm")
NAMES = Names(table=llama.TABLE | {f"mixer.{role}": f"{llama.LAYER}.mixer.{role}" for role in ROLES})


def config(mixer: Mixer, *kinds: LayerKind) -> ModelConfig:
    """Return the tiny model with these layers; by default one with attention between two with states."""
    return dataclasses.replace(tiny.CONFIG, mixer=mixer, layers=kinds or (STATE, FULL, STATE))


def load(load_as: LoadAs, config: ModelConfig) -> Decoder:
    """Load the model with random weights."""
    return Decoder(StoredWeights(config, NAMES, random_weights(config, NAMES, 0), load_as))


def model(config: ModelConfig) -> Decoder:
    """Return the model with random weights, in float32."""
    return load(LoadAs(jnp.dtype("float32")), config)


def driver(mixer: Mixer, *kinds: LayerKind, draft: Draft | None = None, **options: Any) -> Driver:
    """Create an engine over such a model."""
    its, said = config(mixer, *kinds), EngineConfig(**tiny.DEFAULTS | options)
    return Driver(said, its, functools.partial(load, config=its), adapter_names=NAMES, draft=draft)
