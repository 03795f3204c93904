"""A MODEL, not a measurement: how long a step of a decoder takes if nothing keeps the GPU from its peaks."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.checks import checked_choice
from jaxpaged.memory.entries import number_through
from jaxpaged.research.lab.decoders import Decoder, tokens_read


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Roofline:
    """A GPU's peaks, as its maker gives them: dense bfloat16, and its memory's bandwidth and size.

    Or those of several together that share one copy of the weights, and add up what each has of a layer's
    two products.
    """

    flops: float  # a second
    bytes: float  # a second
    memory: float  # bytes
    num_gpus: float = 1.0
    link: float = math.inf  # bytes a second that each of them sends
    latency: float = 0.0  # seconds that a sum takes at least


def together(gpu: Roofline, num_gpus: int, link: float, latency: float) -> Roofline:
    """Combine several of these GPUs, each with its share of the heads, into one."""
    flops, num_bytes, memory = (num_gpus * peak for peak in (gpu.flops, gpu.bytes, gpu.memory))
    return Roofline(flops, num_bytes, memory, num_gpus, link, latency)


GPUS = {
    "a100": Roofline(312e12, 2.04e12, 80e9),
    "h100": Roofline(989e12, 3.35e12, 80e9),
    "h200": Roofline(989e12, 4.8e12, 141e9),
    "b200": Roofline(2250e12, 8.0e12, 180e9),
}
# 900 GB/s are both ways together. The seconds are an assumption, of what a collective library reaches.
NVLINK_BYTES, NVLINK_SECONDS = 900e9 / 2, 10e-6
GPUS["8xh200"] = together(GPUS["h200"], 8, NVLINK_BYTES, NVLINK_SECONDS)
USED = 0.9  # the share of its memory that weights and cache take


def named(gpu: str) -> Roofline:
    """Return the peaks of the GPU of this name. Raises `InputError` for an unknown one."""
    return GPUS[checked_choice("gpu", gpu, GPUS)]


def cache_tokens(gpu: Roofline, decoder: Decoder) -> int:
    """Return how many tokens' K and V, in all layers, fit into memory beside the weights."""
    return max(0, int((USED * gpu.memory - decoder.bytes_of_weights) / decoder.kv_bytes))


def seconds_of_step(
    num_new: Int[Array, " rows"],
    seq_lens: Int[Array, " rows"],
    peak: Roofline,
    decoder: Decoder,
    *,
    most_new: int = 0,
) -> Float[Array, ""]:
    """Return the seconds of one step, in which each row computes its last `num_new` of `seq_lens` tokens.

    `most_new` bounds the new tokens of a step; it is for decoders whose layers do not all read everything.

    Each new token costs two operations a parameter, and attention over itself and all before it. Weights are
    read once, and so are K and V of each row that computes something. Whichever of the two takes longer hides
    the other; nothing else costs anything. Several GPUs add up two results a layer, in a ring, hidden by
    nothing.
    """
    new, end = num_new.astype(jnp.float32), seq_lens.astype(jnp.float32)
    if decoder.specs:
        num_pairs, num_read = _of_kinds(num_new, seq_lens, decoder, most_new)
    else:
        # Pairs of a new token and a token that it sees.
        num_pairs = decoder.num_layers * jnp.sum(new * (2 * end - new + 1) / 2)
        num_read = decoder.num_layers * jnp.sum(jnp.where(num_new > 0, end, 0))
    attention = 4 * decoder.num_q_heads * decoder.head_dim * num_pairs
    flops = 2 * decoder.num_params * jnp.sum(new) + attention
    read = decoder.bytes_of_weights + decoder.layer_bytes * num_read
    alone = jnp.maximum(flops / peak.flops, read / peak.bytes)
    sent = 2 * (peak.num_gpus - 1) / peak.num_gpus * decoder.hidden_bytes * jnp.sum(new)
    return alone + 2 * decoder.num_layers * jnp.maximum(peak.latency, sent / peak.link)


def _of_kinds(
    num_new: Int[Array, " rows"], seq_lens: Int[Array, " rows"], decoder: Decoder, most_new: int
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the pairs of a new token and one that it sees, and the tokens that are read, over all layers."""
    if most_new < 1:
        raise ValueError(f"{most_new=} must be at least 1 for a decoder with kinds of layers")
    row, k, used = number_through(num_new, most_new)
    start = seq_lens - num_new
    num_pairs = num_read = jnp.float32(0)
    for spec, count in decoder.counts.items():
        seen = jnp.where(used, tokens_read(spec, start[row] + k + 1), 0)
        num_pairs += count * jnp.sum(seen, dtype=jnp.float32)
        read = jnp.where(num_new > 0, tokens_read(spec, start + 1) + num_new - 1, 0)
        num_read += count * jnp.sum(read, dtype=jnp.float32)
    return num_pairs, num_read
