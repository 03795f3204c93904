"""Decoders for the laboratory: sizes, weights, and which tokens each layer reads. No weights are needed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkedLocal, SlidingWindow, together
from jaxpaged.memory.grouping import Grouping, grouping_of, one_group
from jaxpaged.models import families
from jaxpaged.models.names import num_weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoder:
    """A decoder's size; K and V are in bfloat16.

    num_params: those that compute a token: of experts, the chosen ones.
    weight_bytes: all weights; None: `num_params` in bfloat16.
    specs: what each layer reads; empty: each reads everything.
    kv_arrays: 2 for K and V; 1 where one vector a token is both.
    hidden_size: None: that of all query heads.
    """

    num_params: float
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float | None = None
    specs: tuple[CacheSpec, ...] = field(default=(), metadata={"static": True})
    kv_arrays: int = 2
    hidden_size: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's K and V in all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token's K and V in a layer."""
        return 2 * self.kv_arrays * self.num_kv_heads * self.head_dim

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a layer's output for a token; all query heads have the same width."""
        return 2 * (self.hidden_size or self.num_q_heads * self.head_dim)

    @property
    def bytes_of_weights(self) -> float:
        return 2 * self.num_params if self.weight_bytes is None else self.weight_bytes

    @property
    def counts(self) -> dict[CacheSpec, int]:
        """Number of layers of each kind."""
        return {spec: self.specs.count(spec) for spec in dict.fromkeys(self.specs)}

    @property
    def has_groups(self) -> bool:
        """Whether layers differ in the tokens that they keep."""
        return len(set(self.specs)) > 1

    def grouping(self, *, one_table: bool = False) -> Grouping:
        """Return the layers that share a block table, or one table for all."""
        if one_table or not self.specs:
            return one_group(together(self.specs or (FULL,)), len(self.specs))
        return grouping_of(self.specs)


def blocks_in(num_tokens: int, block_size: int, decoder: Decoder, grouping: Grouping) -> int:
    """Return the number of blocks in the memory that one block table would need for `num_tokens` tokens.

    A block has room for the layers of the widest group.
    """
    width = grouping.width if grouping.num_groups > 1 else decoder.num_layers
    return num_tokens * decoder.num_layers // (width * block_size)


@dataclass(frozen=True)
class InBlocks(CacheSpec):
    """A kind of layer that counts in blocks of `block_size` tokens, for tables whose tokens are blocks."""

    spec: CacheSpec
    block_size: int

    @property
    def first_tokens(self) -> int:  # type: ignore[override]
        """Blocks at the beginning that every block reads."""
        return self.spec.first_blocks(self.block_size)

    def first_read(self, num_tokens: Any) -> Any:
        """Return the first block that the tokens behind so many blocks read."""
        return self.spec.first_read(num_tokens * self.block_size) // self.block_size

    def most_kept(self, num_in_flight: int) -> int | None:
        """Return the most neighbouring blocks that are kept while so many are computed."""
        kept = self.spec.most_kept(num_in_flight * self.block_size)
        return None if kept is None else cdiv(kept, self.block_size) + 1


def _mixed(num_layers: int, period: int, spec: CacheSpec) -> tuple[CacheSpec, ...]:
    """Return layers of which every `period`-th reads everything, the last of the first period on."""
    return tuple(FULL if layer % period == period - 1 else spec for layer in range(num_layers))


LLAMA_8B = Decoder(8.03e9, 32, 32, 8, 128)
LLAMA_70B = Decoder(70.55e9, 80, 64, 8, 128)
# Text parts. Weights as they are served on one H200: in bfloat16; experts in MXFP4 (4.25 bits), the rest in
# bfloat16; all but the embeddings in 4 bits with a scale for 128 numbers (4.125 bits).
GEMMA_27B = Decoder(27.01e9, 62, 32, 16, 128, 54.0e9, _mixed(62, 6, SlidingWindow(1024)))
COMMAND_R7B = Decoder(8.03e9, 32, 32, 8, 128, None, _mixed(32, 4, SlidingWindow(4096)))
GPT_OSS_20B = Decoder(3.6e9, 24, 64, 8, 64, 13.8e9, _mixed(24, 2, SlidingWindow(128)))
SCOUT = Decoder(17.2e9, 48, 40, 8, 128, 58.6e9, _mixed(48, 4, ChunkedLocal(8192)))
DECODERS = {
    "Llama 3.1 8B": LLAMA_8B,
    "Llama 3.1 70B": LLAMA_70B,
    "command-r7b": COMMAND_R7B,
    "gemma-3-27b": GEMMA_27B,
    "gpt-oss-20b": GPT_OSS_20B,
    "llama-4-scout": SCOUT,
}


def named(name: str) -> Decoder:
    """Return a decoder of this name, or that of a local config.json, or of a folder with one.

    Raises `InputError`.
    """
    if name in DECODERS:
        return DECODERS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    rule = f"one of {', '.join(DECODERS)}, or a local config.json, or a folder with one"
    check("decoder", name, rule, path.is_file())
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"decoder={name!r} cannot be read: {error}") from error
    check("decoder", name, "a config.json: a JSON object", isinstance(said, dict))
    return of_config(said)


def of_config(said: Mapping[str, Any]) -> Decoder:
    """Return the decoder that a model's config.json describes, its weights in bfloat16.

    Raises `InputError` for a model that is not served.
    """
    c = families.from_hf(said)
    total = num_weights(c)
    active = total
    if c.experts is not None:
        one = 3 * c.hidden_size * c.intermediate_size
        layers = c.num_layers - len(c.experts.dense_layers)
        active -= layers * (c.experts.num_experts - c.experts.num_chosen) * one
    specs = tuple(c.layers[i].cache_spec for i in range(c.num_layers) if c.layers[i].shares_kv is None)
    return Decoder(
        float(active), len(specs), c.num_q_heads, c.num_kv_heads, c.head_dim, 2.0 * total,
        () if set(specs) == {FULL} else specs, 2 if c.latent is None else 1, c.hidden_size,
    )  # fmt: skip


def with_kinds(decoder: Decoder, kinds: Any) -> Decoder:
    """Return the decoder with kinds of layers from outside (`jaxpaged.contracts`)."""
    specs = decoder.specs or (FULL,) * decoder.num_layers
    each = kinds.each(len(specs), tuple(spec == FULL for spec in specs))
    return replace(
        decoder, specs=tuple(given_spec or spec for given_spec, spec in zip(each, specs, strict=True))
    )


def tokens_read(spec: CacheSpec, end: jax.Array) -> jax.Array:
    """Return how many tokens a layer keeps for the token before each `end`, itself among them."""
    first = spec.first_read(end - 1)
    return end - first + jnp.minimum(spec.first_tokens, first)
