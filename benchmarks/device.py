"""The GPU under a benchmark: whether JAX uses it, what it can do, and how long its kernels take.

    python -m benchmarks.device            one JSON line of what it is; fails unless our kernels serve it

Kernels are timed by a trace of the device (CUPTI's), ours and others' alike: the sum of what a call's kernels
take, without the gaps in between and whatever the host does. Where there is no trace, as on a CPU, the host's
clock runs until the last of the calls has ended, and a result's `clock` says so.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import record
from pallas_kernels.gpu import ptxas, targets

H200_FLOPS = 790e12  # a second, of a large product in bfloat16 of random numbers


class Peak(NamedTuple):
    """The most that a card can do in a second; None: unknown."""

    num_bytes: float | None  # of memory, by its datasheet
    flops: float | None  # of bfloat16, by its datasheet, or as measured

    def share_of_bytes(self, rate: float) -> dict[str, float]:
        """Return a result line's entry about bytes a second."""
        peak = self.num_bytes
        return {f"share_of_{peak / 1e12:g}_tb_per_s": round(rate / peak, 4)} if peak else {}

    def share_of_flops(self, rate: float) -> dict[str, float]:
        """Return a result line's entry about operations a second."""
        peak = self.flops
        return {f"share_of_{peak / 1e12:g}_tflops": round(rate / peak, 4)} if peak else {}

    def floor_s(self, num_bytes: float, flops: float = 0) -> float | None:
        """Return the seconds that bytes and operations take at least."""
        return max(num_bytes / self.num_bytes, flops / self.flops) if self.num_bytes and self.flops else None


def peak() -> Peak:
    """Return the peak of the default device; an H200's on a CPU, for smoke runs."""
    used = jax.devices()[0]
    card = targets.card_of("NVIDIA H200" if used.platform == "cpu" else used.device_kind)
    if card is None:
        return Peak(None, None)
    return Peak(card.bandwidth, H200_FLOPS if card.name.startswith("H200") else card.flops)


def main() -> None:
    """Run as a module."""
    print(json.dumps(require_gpu()), flush=True)


def described(smoke: bool) -> dict[str, Any]:
    """Return a result line's entries about the device: a CPU for a smoke run, else a GPU."""
    return {"device": "cpu"} if smoke else require_gpu()


def require_gpu() -> dict[str, Any]:
    """Return what GPU and compiler there are. End the process with one line where our kernels do not serve
    the GPU that JAX uses.
    """
    try:
        device = jax.devices()[0]
        used, target = device.device_kind, targets.target_of(device)
    except RuntimeError as error:  # a backend that was asked for does not start
        used, target = f"nothing ({str(error).splitlines()[0]})", None
    if target is None:
        there = f"nvidia-smi lists {names}, but " if (names := record.gpu("name")) else ""
        sys.exit(
            f"nothing is measured: {there}JAX uses {used}, which is no NVIDIA GPU since Ampere: install "
            "jax[cuda12] or jax[cuda13]; see JAX_PLATFORMS and CUDA_VISIBLE_DEVICES (--smoke runs anywhere)"
        )
    version = ptxas.version()
    if version is None:
        sys.exit(
            "nothing is measured: there is no ptxas to compile kernels with: set CUDA_ROOT to CUDA's folder"
        )
    found = {"device": used, "target": target.architecture, "gpu": record.gpu()}
    return found | {"ptxas": ".".join(map(str, version))}


class Times(NamedTuple):
    """Durations of calls."""

    seconds: tuple[float, ...]  # of one call, once for each repeat
    clock: str  # "trace" of the device, or "host"

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        return max(self.seconds) - min(self.seconds)

    @property
    def line(self) -> dict[str, Any]:
        """Return the entries of a result line for these times."""
        us, spread = (round(seconds * 1e6, 2) for seconds in (self.median, self.spread))
        return {"us": us, "spread_us": spread, "clock": self.clock}


def times(
    run: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], repeats: int, kernel: str = ""
) -> Times:
    """Call a compiled function of JAX's with each of these arguments in turn, so many times over.

    kernel: part of the name of what is timed; all that a call launches if it is "", or nothing has that name.
    """
    jax.block_until_ready(run(*arguments[0]))
    number, traced = len(arguments), None
    cupti = _cupti()
    if cupti is not None:
        cupti._cupti_init()
    seconds = []
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready([run(*one) for one in arguments])
            seconds.append((time.perf_counter() - start) / number)
    finally:
        if cupti is not None:
            traced = cupti._cupti_get_timings(True)
    if not traced:
        return Times(tuple(seconds), "host")
    return Times(by_repeat(traced, repeats, number, kernel), "trace")


def by_repeat(
    traced: Sequence[tuple[str, float]], repeats: int, number: int, kernel: str
) -> tuple[float, ...]:
    """Return the seconds of a call in each repeat, from (kernel, milliseconds) in the order they ran."""
    named = [took for name, took in traced if kernel in name] or [took for _, took in traced]
    if len(named) % repeats:
        raise RuntimeError(f"{len(named)} kernels were traced in {repeats=}: each must launch as many")
    each = len(named) // repeats
    return tuple(sum(named[i * each : (i + 1) * each]) / number / 1e3 for i in range(repeats))


def _cupti() -> Any:
    """Return JAX's own access to CUPTI, which its Mosaic profiler uses; None without a GPU."""
    if jax.default_backend() != "gpu" or os.environ.get("JAXPAGED_NO_TRACE"):
        return None
    try:
        from jax._src.lib import mosaic_gpu

        return mosaic_gpu._mosaic_gpu_ext
    except (ImportError, AttributeError):
        return None


def read_bandwidth(num_bytes: int) -> float:
    """Return the bytes a second of summing random numbers of that size: what reading alone reaches here."""
    numbers = jax.jit(
        lambda: jax.random.bits(jax.random.key(7), (max(1, num_bytes // 4096), 1024), jnp.uint32)
    )()
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.uint32))
    return numbers.nbytes / min(times(total, [(numbers,)] * 4, 5).seconds)


if __name__ == "__main__":
    main()
