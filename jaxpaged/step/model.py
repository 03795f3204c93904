"""The model as a step needs it."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch

Hidden = Float[Array, "max_num_seqs hidden"]


@runtime_checkable
class Model(Protocol):
    """Protocol of a model, as a step needs it; `models.decoder.Decoder` is one."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> jnp.dtype: ...

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
        /,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]: ...

    def logits(self, hidden: Hidden, /) -> Float[Array, "max_num_seqs vocab"]: ...


@runtime_checkable
class Drafter(Model, Protocol):
    """Protocol of a model that drafts for another, whose cache has its K and V beside the other's."""

    @property
    def cache_sizes(self) -> tuple[int, int, int]: ...  # layers, KV heads and their width


@runtime_checkable
class DraftedModel(Model, Protocol):
    """Protocol of a model with another one that drafts for it."""

    @property
    def draft(self) -> Drafter: ...
