"""The model as a step needs it."""

from collections.abc import Callable, Sequence
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
class HeadDrafter(Protocol):
    """Protocol of a head that drafts for a model from its hidden states: see `models.drafting`."""

    @property
    def cache_sizes(self) -> tuple[int, int, int]: ...  # layers, KV heads and their width

    @property
    def behind(self) -> tuple[int, ...]: ...  # numbers of layers behind which hidden states are read

    @property
    def reads_last(self) -> bool: ...  # whether it reads what comes out of the last layer

    def features(
        self, hidden: Float[Array, "num_tokens given"], taps: Sequence[Float[Array, "num_tokens given"]], /
    ) -> Float[Array, "num_tokens hidden"]: ...

    def embed(
        self, token_ids: Int[Array, " num_tokens"], of_model: Callable[[Array], Array], /
    ) -> Float[Array, "num_tokens hidden"]: ...

    def __call__(
        self,
        embedded: Float[Array, "num_tokens hidden"],
        given: Float[Array, "num_tokens hidden"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
        /,
    ) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"], KVCache]: ...

    def logits(
        self, hidden: Float[Array, "num_tokens hidden"], of_model: Callable[[Array], Array], /
    ) -> Float[Array, "num_tokens vocab"]: ...


@runtime_checkable
class DraftedModel(Model, Protocol):
    """Protocol of a model with another one, or a head, that drafts for it."""

    @property
    def draft(self) -> Drafter | HeadDrafter: ...


@runtime_checkable
class TappedModel(Model, Protocol):
    """Protocol of a model whose hidden states a head reads."""

    def tapped(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
        behind: tuple[int, ...],
        /,
    ) -> tuple[Float[Array, "num_tokens hidden"], list[Float[Array, "num_tokens hidden"]], KVCache]: ...

    def rows_of(self, token_ids: Int[Array, " num_tokens"], /) -> Float[Array, "num_tokens hidden"]: ...
