"""What a trace says by itself, and what a roofline would make of it: NumPy, on the host."""

from dataclasses import dataclass

import numpy as np

from jaxpaged.arithmetic import cdiv, next_power_of_two
from jaxpaged.checks import checked_choice
from jaxpaged.lab.traces import Trace, blocks

WASTE_SIZES = tuple(2**i for i in range(11))  # tokens a block


def waste(trace: Trace) -> dict[int, float]:
    """By block size: the share of places in the blocks of finished requests that hold no token."""
    lens = trace.input_lens + trace.output_lens
    places = {size: int((cdiv(lens, size) * size).sum()) for size in WASTE_SIZES}
    return {size: 1 - int(lens.sum()) / total for size, total in places.items()}


@dataclass(frozen=True)
class Reuse:
    """Of each time a block's content is asked for again."""

    tokens: (
        np.ndarray
    )  # of the distinct blocks asked for since, this one included: the LRU cache that hits it
    seconds: np.ndarray  # since then
    num_asked: int  # times blocks were asked for in all


def reuse(trace: Trace) -> Reuse | None:
    """Reuse distances and times of the trace's own full blocks; None where nothing is known of content."""
    if trace.content is None:
        return None
    cut = blocks(trace, trace.block_size)
    arrival = np.repeat(trace.arrival_s, cut.num_findable)
    order = np.argsort(cut.symbols, kind="stable")
    is_again = np.append(False, cut.symbols[order][1:] == cut.symbols[order][:-1])
    before = np.full(len(order), -1)
    before[order[is_again]] = order[np.flatnonzero(is_again) - 1]
    again = np.flatnonzero(before >= 0)
    # Of the blocks asked for in between, those that were asked for in between already are no new ones.
    since = again - before[again] - num_larger_before(before)[again]
    return Reuse(since * trace.block_size, arrival[again] - arrival[before[again]], len(order))


def num_larger_before(values: np.ndarray) -> np.ndarray:
    """Of each value, how many of those before it are larger: by halves, all pairs of a size at once."""
    size = next_power_of_two(len(values))
    bound = len(values) + 1
    padded = np.pad(values.astype(np.int64), (0, size - len(values)), constant_values=bound)
    counts = np.zeros(size, np.int64)
    half = 1
    while half < size:
        pairs = padded.reshape(-1, 2, half)
        offset = np.arange(len(pairs))[:, None] * (bound + 2)
        left = np.sort(pairs[:, 0], axis=1) + offset
        place = np.searchsorted(left.ravel(), (pairs[:, 1] + offset).ravel(), side="right")
        not_larger = place.reshape(-1, half) - np.arange(len(pairs))[:, None] * half
        counts.reshape(-1, 2, half)[:, 1] += half - not_larger
        half *= 2
    return counts[: len(values)]


@dataclass(frozen=True)
class Roofline:
    """A GPU's peaks, as its maker gives them: dense bfloat16, and its memory's bandwidth."""

    flops: float  # a second
    bytes: float  # a second


GPUS = {
    "a100": Roofline(312e12, 2.04e12),
    "h100": Roofline(989e12, 3.35e12),
    "h200": Roofline(989e12, 4.8e12),
    "b200": Roofline(2250e12, 8.0e12),
}


@dataclass(frozen=True)
class Decoder:
    """A decoder's size, in bfloat16; by default that of Llama 3.1 8B."""

    num_params: float = 8.03e9
    num_layers: int = 32
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """A token's."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def model_times(
    trace: Trace, hit_tokens: np.ndarray, gpu: str, decoder: Decoder | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A MODEL, not a measurement: seconds to the first token and for each later one, [requests] each.

    Prompts are computed one after the other in the order in which they came, at the roofline of the GPU, and
    nothing else runs; hits cost nothing. Each later token reads the weights and its own K and V alone.
    """
    peak = GPUS[checked_choice("gpu", gpu, GPUS)]
    decoder = Decoder() if decoder is None else decoder
    lens, hits = trace.input_lens.astype(float), hit_tokens.astype(float)
    attended = (lens * lens - hits * hits) / 2  # pairs of a new token and one that it sees
    attention = 4 * decoder.num_layers * decoder.num_q_heads * decoder.head_dim * attended
    flops = 2 * decoder.num_params * (lens - hits) + attention
    weights = 2 * decoder.num_params
    seconds = np.maximum(flops / peak.flops, (weights + decoder.kv_bytes * lens) / peak.bytes)
    ttft = np.empty_like(seconds)
    free_at = 0.0
    for r, (arrival, needed) in enumerate(zip(trace.arrival_s, seconds, strict=True)):
        free_at = max(free_at, arrival) + needed
        ttft[r] = free_at - arrival
    context = lens + trace.output_lens / 2
    return ttft, (weights + decoder.kv_bytes * context) / peak.bytes
