"""Kinds of attention layers, and what each needs of a KV cache (vLLM 0.33, `v1/kv_cache_interface.py`).

A spec describes one layer, and also a group of layers that share a block table. Left out: latent (MLA) and
recurrent (Mamba) layers, circular buffers, cross attention, quantised and compressed pages, context
parallelism, and the tokens that several draft modules keep alive behind a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ..v0.cache_engine import get_dtype_size


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class AttentionSpec:
    """The cache of one attention layer.

    block_size: tokens per block.
    num_kv_heads, head_size: KV heads, and the dimension of a key.
    dtype: see `get_dtype_size`.
    head_size_v: the dimension of a value; that of a key when None.
    page_size_padded: bytes that a block takes, when more than its content.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    head_size_v: int | None = field(default=None, kw_only=True)
    page_size_padded: int | None = field(default=None, kw_only=True)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of the K and V of one block in this layer."""
        head_size_v = self.head_size if self.head_size_v is None else self.head_size_v
        num_elements = self.block_size * self.num_kv_heads * (self.head_size + head_size_v)
        return num_elements * get_dtype_size(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block takes in this layer, padding included."""
        if self.page_size_padded is None:
            return self.unpadded_page_size_bytes
        assert self.page_size_padded >= self.unpadded_page_size_bytes, (
            f"{self.page_size_padded=} must be at least {self.unpadded_page_size_bytes=}"
        )
        return self.page_size_padded

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that one request holds: ceil(max_model_len / block_size).

        Sizing a pool and admitting a prompt use this one number. vLLM's issue 39734 was a deadlock of two.

        max_in_flight_tokens: tokens scheduled and not yet processed, whose windows are still read.
        """
        return cdiv(max_model_len, self.block_size)

    def is_uniform_with(self, specs: Sequence["AttentionSpec"]) -> bool:
        """Return whether one block table serves this layer and all of these, because the same tokens stay."""
        raise NotImplementedError

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """Return the spec of a group of such layers.

        Raises: ValueError when they do not share a block table and a page.
        """
        if any(spec != specs[0] for spec in specs):
            raise ValueError(f"the layers of one group must have one spec, not {specs}")
        return specs[0]

    def with_page_size(self, page_size: int) -> Self:
        """Return this layer with pages of `page_size` bytes, by larger blocks if that fits, or padded."""
        if self.page_size_bytes == page_size:
            return self
        if self.page_size_padded is None and page_size % self.page_size_bytes == 0:
            return replace(self, block_size=self.block_size * (page_size // self.page_size_bytes))
        return replace(self, page_size_padded=page_size)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """The cache of one layer that keeps every token.

    sliding_window, attention_chunk_size: what the layer reads of it, when it is a local layer whose cache is
        kept whole (see `planning.promote_local_specs`). Memory does not depend on them.
    """

    sliding_window: int | None = field(default=None, kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)

    def is_uniform_with(self, specs: Sequence[AttentionSpec]) -> bool:
        return all(isinstance(spec, FullAttentionSpec) for spec in specs)

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """Return the spec of a group of these layers; layers without a window join layers with one."""
        windows = {s.sliding_window for s in specs if isinstance(s, FullAttentionSpec)} - {None}
        chunks = {s.attention_chunk_size for s in specs if isinstance(s, FullAttentionSpec)} - {None}
        if len(windows) + len(chunks) > 1:
            raise ValueError(f"one group has {windows=} and {chunks=}; together they must be one")
        window, chunk = next(iter(windows), None), next(iter(chunks), None)
        alike = [
            replace(s, sliding_window=window, attention_chunk_size=chunk)
            if isinstance(s, FullAttentionSpec)
            else s
            for s in specs
        ]
        return super().merge(alike)


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """The cache of one layer that keeps every token and has `sink_len` learned tokens in front.

    They must fill whole blocks (AssertionError). vLLM keeps their K and V outside of tables, so that the
    manager is that of full attention.
    """

    sink_len: int

    def __post_init__(self) -> None:
        assert self.sink_len > 0, f"{self.sink_len=} must be at least 1"
        assert self.sink_len % self.block_size == 0, f"{self.sink_len=} must be a multiple of block_size"


@dataclass(frozen=True)
class RSWASpec(FullAttentionSpec):
    """The cache of one layer that keeps the prompt and the last `rswa_window` generated tokens.

    The blocks between them leave the middle of the table ("reference sliding window attention").
    """

    rswa_window: int


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """The cache of one layer in which a token attends to itself and `sliding_window - 1` tokens before."""

    sliding_window: int

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks one request holds: ceil((sliding_window - 1 + in flight) / block_size) + 1.

        The tokens are at most `max_model_len`. One block more, as a window may begin inside of a block.
        """
        num_tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(num_tokens, self.block_size) + 1

    def is_uniform_with(self, specs: Sequence[AttentionSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in specs
        )


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Cache spec of one layer whose tokens attend to themselves and earlier tokens of their chunk.

    Token p is in chunk p // attention_chunk_size.
    """

    attention_chunk_size: int

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that one request holds: ceil((chunk + in flight) / block_size).

        The tokens are at most `max_model_len`.
        """
        return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)

    def is_uniform_with(self, specs: Sequence[AttentionSpec]) -> bool:
        return all(
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size == self.attention_chunk_size
            for spec in specs
        )


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    """The caches of layers that keep the same tokens in one block table, with pages of several sizes."""

    block_size: int
    kv_cache_specs: dict[str, AttentionSpec]

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block takes in all these layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def first_spec(self) -> AttentionSpec:
        """Spec of the first layer, which has the block size and the rule of all."""
        return next(iter(self.kv_cache_specs.values()))

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that one request holds."""
        return self.first_spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)

    @classmethod
    def from_specs(cls, kv_cache_specs: dict[str, AttentionSpec]) -> Self | None:
        """Return the specs as one, or None when one block table does not serve all these layers."""
        specs = list(kv_cache_specs.values())
        if len({spec.block_size for spec in specs}) > 1 or not specs[0].is_uniform_with(specs):
            return None
        return cls(specs[0].block_size, kv_cache_specs)


KVCacheSpec = AttentionSpec | UniformTypeKVCacheSpecs


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """The layers that share one block table.

    is_eagle_group: whether a draft model's layers are among them, so that hits drop their last block.
    """

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False


@dataclass(frozen=True)
class KVCacheConfig:
    """`num_blocks` blocks, the null block included, for these groups. Tensors are not looked at.

    prefix_cache_retention_interval: where window groups keep the end of a prefix findable. None: at every
        place where a hit may end. k: every k tokens. 0: only at the prompt's end. With k and 0 also at
        `Request.shared_prefix_boundary`.
    """

    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]
    prefix_cache_retention_interval: int | None = None


def scheduling_spec(group: KVCacheGroupSpec) -> AttentionSpec:
    """Return the spec that a group's manager follows: the layers' spec, or the first of several kinds."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
