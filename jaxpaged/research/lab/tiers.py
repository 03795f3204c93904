"""Tiers below the device in the laboratory: a trace through the engine's own stores, without content.

The device's hits are those of its cache alone: what is fetched takes the place of what would be computed, so
its cache is the same. Stores count a byte a token. The time to the first token is a MODEL: the decoder at a
GPU's peaks for what is computed, and the bandwidths below for what is fetched; nobody waits for others.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.research.lab import sweep
from jaxpaged.research.lab.combination import UNBOUNDED, Combination
from jaxpaged.research.lab.decoders import Decoder
from jaxpaged.research.lab.serving.roofline import Roofline, seconds_of_step
from jaxpaged.research.lab.traces import Blocks, Trace, blocks
from jaxpaged.tiers.host import HostStore
from jaxpaged.tiers.tiers import DISK, HOST, Promotion, Tiers

DEVICE = "device"
NAMES = (DEVICE, HOST, DISK)
WITHOUT_END = 2**62  # tokens
# Assumed bytes a second: a PCIe 5 link of 16 lanes, and a solid-state disk on 4 of them, at their peaks.
BANDWIDTH = {HOST: 63e9, DISK: 15e9}


@dataclasses.dataclass(frozen=True)
class TierResult:
    """Hits of a trace by tier; requests of the warm-up are left out."""

    tokens: Mapping[str, int | None]  # size of each tier; None: without end
    hit_tokens: Mapping[str, int]  # found in each tier, and in none above it
    input_tokens: int
    read_bytes: Mapping[str, int]  # K and V that were read from each tier below the device
    stored_bytes: int  # K and V that were copied from the device
    ttft_s: np.ndarray  # [requests] seconds to the first token, of a model
    computed_s: np.ndarray  # [requests] as if nothing were cached

    def line(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "tiers": {name: UNBOUNDED if size is None else size for name, size in self.tokens.items()},
            "hit_tokens": dict(self.hit_tokens),
            "hit_rate": sum(self.hit_tokens.values()) / self.input_tokens,
            "input_tokens": self.input_tokens,
            "read_bytes": dict(self.read_bytes),
            "stored_bytes": self.stored_bytes,
            "modelled_ttft_s": {"mean": float(self.ttft_s.mean()), "p50": float(np.median(self.ttft_s))},
            "modelled_ttft_uncached_s": {
                "mean": float(self.computed_s.mean()),
                "p50": float(np.median(self.computed_s)),
            },
        }


def sizes_of(text: str) -> dict[str, int | None]:
    """Return the tokens of each tier by "device=TOKENS,host=TOKENS,disk=unbounded". Raises `InputError`."""
    rule = "device=TOKENS,host=TOKENS and perhaps disk=TOKENS, each a positive int or 'unbounded'"
    pairs = [each.strip().partition("=") for each in text.split(",")]
    names = tuple(name for name, _, _ in pairs)
    check("tiers", text, rule, names in (NAMES, NAMES[:2]))
    made: dict[str, int | None] = {}
    for name, _, size in pairs:
        if size == UNBOUNDED:
            made[name] = None
            continue
        if not (size.isascii() and size.isdigit()):
            raise InputError(f"tiers={text!r} must be {rule}")
        made[name] = checked_int("tiers", int(size), rule, 1, WITHOUT_END)
    return made


def replay(
    trace: Trace,
    sizes: Mapping[str, int | None],
    *,
    policy: str,
    block_size: int,
    warmup: float,
    peak: Roofline,
    decoder: Decoder,
) -> TierResult:
    """Send a trace through a device's cache and the tiers below it. Raises `InputError`."""
    rule = "one whose layers all read the same tokens, with tiers"
    check("decoder", decoder, rule, not decoder.has_groups)
    combination = Combination(policy, block_size, sizes[DEVICE])
    [device] = sweep.sweep(trace, [combination], warmup=warmup, decoder=decoder)
    cut = blocks(trace, block_size, partial=False)
    capacities = {name: WITHOUT_END if size is None else size for name, size in sizes.items()}
    below = HostStore(capacities[DISK]) if DISK in sizes else None
    stack = Tiers(HostStore(capacities[HOST]), below, DISK)
    first = trace.num_requests - device.num_counted
    hits, stored = _hits(cut, device.hit_tokens // block_size, stack)
    hits, counted = hits[first:] * block_size, slice(first, None)
    names = [name for name in NAMES if name in sizes]
    its_bytes = hits * decoder.kv_bytes
    from_below = its_bytes[:, 2] if DISK in sizes else np.zeros(len(hits))
    fetch_s = (its_bytes[:, 1] + from_below) / BANDWIDTH[HOST] + from_below / BANDWIDTH[DISK]
    lens = trace.input_lens[counted]
    return TierResult(
        tokens=dict(sizes),
        hit_tokens={name: int(hits[:, i].sum()) for i, name in enumerate(names)},
        input_tokens=int(lens.sum()),
        read_bytes={name: int(its_bytes[:, i].sum()) for i, name in enumerate(names) if i},
        stored_bytes=int(stored[counted].sum()) * block_size * decoder.kv_bytes,
        ttft_s=_compute_seconds(lens - hits.sum(1), lens, peak, decoder) + fetch_s,
        computed_s=_compute_seconds(lens, lens, peak, decoder),
    )


def _hits(cut: Blocks, on_device: Sequence[int] | np.ndarray, stack: Tiers) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks hit by device, host memory and below [requests, 3], and those stored [requests].

    What is asked of the stores, and when, is what an engine asks of them: see
    `jaxpaged.engine.services.offloading`.
    """
    size = cut.block_size
    nothing = np.zeros((), np.uint8)
    block = StoredBlock((True,), {"tokens": np.broadcast_to(nothing, (1, size))})
    made: dict[int, BlockKey] = {}
    hits, stored = np.zeros((len(cut.starts), 3), np.int64), np.zeros(len(cut.starts), np.int64)
    for r, start in enumerate(cut.starts.tolist()):
        symbols = cut.symbols[start : start + int(cut.num_findable[r])].tolist()
        keys = [made.setdefault(each, _key(each)) for each in symbols]
        wanted, here = keys[: int(cut.num_lookup[r])], int(on_device[r])
        num_found = stack.num_cached(wanted)
        job = Promotion([key for key in stack.below_only(wanted[:num_found]) if key in wanted[here:]], np.inf)
        if job.keys:
            stack.read(job)
        values = [stack.get(key) for key in reversed(wanted)][::-1]
        end = here
        while end < len(wanted) and values[end] is not None:
            end += 1
        brought = len(job.promoted.intersection(wanted[here:end]))
        hits[r] = here, end - here - brought, brought
        new = [key for key in reversed(keys) if not stack.has(key)]
        for key in new:
            stack.put(key, block)
        stored[r] = len(new)
    return hits, stored


def _key(symbol: int) -> BlockKey:
    """Return a key for a block that is known by a number."""
    number = symbol.to_bytes(8, "little")
    return BlockKey(b"", b"", number, number)


def _compute_seconds(
    num_new: np.ndarray, seq_lens: np.ndarray, peak: Roofline, decoder: Decoder
) -> np.ndarray:
    """Return the seconds of each request alone, its new tokens in one step."""

    def one(new: jax.Array, end: jax.Array) -> jax.Array:
        return seconds_of_step(new[None], end[None], peak, decoder)

    return np.asarray(jax.vmap(one)(jnp.asarray(num_new, jnp.int32), jnp.asarray(seq_lens, jnp.int32)))
