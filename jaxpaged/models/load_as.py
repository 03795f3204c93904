"""LoadAs: the form in which a model's weights are loaded."""

import dataclasses

import jax.numpy as jnp

from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.models.layer_form import LayerForm, form_of
from jaxpaged.models.shards import Shard


@dataclasses.dataclass(frozen=True)
class LoadAs:
    """The form in which weights are loaded: dtype, quantisation, shard, a loop over layers, their kinds."""

    dtype: jnp.dtype  # data type of weights and activations
    quantization: str | None = None  # as `EngineConfig.quantization`
    shard: Shard | None = None  # None: the whole model
    loop_over_layers: bool | None = None  # as `EngineConfig.loop_over_layers`
    kinds: tuple[CacheSpec | None, ...] = ()  # kind from outside of each layer; empty: none has one

    @property
    def form(self) -> LayerForm:
        """The way layers are computed on this machine."""
        return form_of(jnp.dtype(self.dtype), self.loop_over_layers)
