"""Tile sizes and pipeline depths of the Mosaic GPU kernels.

`config_for` looks a shape up in `MEASURED`, by (device kind, head_dim, block_size, cache dtype, queries of a
row that share a kv head), and falls back to `default_config`. Results depend on tile_kv alone, which changes
the order of a sum. `benchmarks/decode_attention.py --sweep` prints entries for the table.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import targets
from pallas_kernels.gpu.targets import HOPPER, Target
from pallas_kernels.support import Arrays, Options, sizes_of

SHARED_MEMORY_BYTES = HOPPER.program_bytes  # shared memory of one program of a product, at most
H200_CORES = 132


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tile size, pipeline depth and number of programs of a decode-attention kernel."""

    tile_kv: int = 64  # tokens per step, 64 or 128: the rows of a wgmma
    num_stages: int = 3  # tiles of K and V in flight or in use
    ctas_per_core: int = 2  # programs started per multiprocessor
    num_query_slots: int = 2  # units of work whose queries are there or under way

    def __post_init__(self) -> None:
        if self.tile_kv not in (64, 128):
            raise ValueError(f"{self.tile_kv=} must be 64 or 128")
        if self.num_stages < 1:
            raise ValueError(f"{self.num_stages=} must be at least 1")
        if self.ctas_per_core < 1:
            raise ValueError(f"{self.ctas_per_core=} must be at least 1")
        if self.num_query_slots < 1:
            raise ValueError(f"{self.num_query_slots=} must be at least 1")


# (device kind, head_dim, block_size, cache dtype, queries a row and kv head) -> config; nothing is measured
# yet.
MEASURED: dict[tuple[str, int, int, str, int], TuningConfig] = {}


def config_for(arrays: Arrays, options: Options, query_len: int = 1) -> TuningConfig:
    """Return the measured configuration of this device and shape, or the default one."""
    _, block_size, num_kv_heads, head_dim = sizes_of(arrays, options)
    cache_dtype, num_queries = arrays.k_cache.dtype, arrays.q.shape[1] // num_kv_heads * query_len
    key = (jax.devices()[0].device_kind, head_dim, block_size, cache_dtype.name, num_queries)
    config = MEASURED.get(key)
    if config is not None:
        return config
    extras = options.alibi_slopes, options.sinks, options.sliding_window
    has_extras = any(each is not None for each in extras)
    is_scaled = options.token_scales is not None
    return default_config(head_dim, cache_dtype, num_queries, is_scaled=is_scaled, has_extras=has_extras)


def default_config(
    head_dim: int,
    cache_dtype: jnp.dtype,
    num_queries: int,
    *,
    is_scaled: bool = False,
    has_extras: bool = False,
    target: Target | None = None,
) -> TuningConfig:
    """Return a configuration with tiles of 64 tokens and 2 to 4 stages: as many as let two programs share a
    multiprocessor's memory and registers.

    Where that is not possible, one program gets the stages that fit: of long heads on GPUs with little
    shared memory a single one, with which it does not fetch while it multiplies. Of many queries with the
    longest heads it then also has one slot for queries: those of a unit of work come once the unit before has
    taken its own into registers.

    has_extras: whether there are slopes, sinks or a window.
    target: None stands for `targets.compiled_for`.
    """
    target, columns = target or targets.compiled_for(), num_columns(num_queries)
    stage = 2 * 64 * (head_dim * jnp.dtype(cache_dtype).itemsize + (4 if is_scaled else 0))
    slots = next((n for n in (2, 1) if fits(head_dim, cache_dtype, num_queries, target, query_slots=n)), 1)
    other = _bytes_beside_stages(head_dim, cache_dtype, columns, slots, is_scaled=is_scaled, target=target)
    shared, alone = ((target.core_bytes // n - 1024 - other) // stage for n in (2, 1))
    have_registers = two_have_registers(head_dim, cache_dtype, columns, target, has_extras=has_extras)
    if shared >= 2 and have_registers:
        return TuningConfig(num_stages=min(4, shared))
    return TuningConfig(num_stages=max(1, min(4, alone)), ctas_per_core=1, num_query_slots=slots)


def fits(
    head_dim: int, cache_dtype: jnp.dtype, num_queries: int, target: Target, *, query_slots: int = 1
) -> bool:
    """Return whether a program with a single stage has the memory on a target."""
    columns, itemsize = num_columns(num_queries), jnp.dtype(cache_dtype).itemsize
    other = _bytes_beside_stages(head_dim, cache_dtype, columns, query_slots, is_scaled=True, target=target)
    return other + 2 * 64 * head_dim * itemsize <= target.program_bytes


def _bytes_beside_stages(
    head_dim: int, cache_dtype: jnp.dtype, columns: int, query_slots: int, *, is_scaled: bool, target: Target
) -> int:
    """Return a bound of a program's shared memory besides its ring of tiles."""
    widened = 64 * head_dim * 2 if jnp.dtype(cache_dtype).itemsize == 1 else 0
    in_registers = widens_in_registers(head_dim, cache_dtype, is_scaled=is_scaled, target=target)
    widened *= 1 if in_registers or target.multiply != "wgmma" else 2
    queries, output = (query_slots + 1) * columns * head_dim * 2, columns * head_dim * 2
    # Each array begins at a multiple of 1,024 bytes; barriers are an array where there is no TMA.
    weights, rounding = columns * 64 * 2, 4096 if target.fetch == "tma" else 5120
    return widened + queries + output + weights + rounding


def two_have_registers(
    head_dim: int, cache_dtype: jnp.dtype, columns: int, target: Target = HOPPER, *, has_extras: bool = False
) -> bool:
    """Return whether a multiprocessor has registers for two programs, at 128 for each thread.

    The kernel was compiled with JAX 0.11.2 and 0.12.0.1; `test_compile_h200.py` and `test_mosaic_mma.py` hold
    it. Without TMA a narrow cache takes 128, and up to 138 with slopes, sinks or a window.
    """
    if jnp.dtype(cache_dtype).itemsize == 1:
        is_full = has_extras and target.fetch != "tma" and head_dim > 64
        return columns <= 8 and head_dim <= 128 and not is_full
    return columns <= 16


def widens_in_registers(
    head_dim: int, cache_dtype: jnp.dtype, *, is_scaled: bool, target: Target = HOPPER
) -> bool:
    """Return whether K goes from the ring through registers into its product, not through shared memory
    again.

    That saves accesses to shared memory where two programs a multiprocessor have the registers; longer heads
    need too many. Numbers with a scale for each token, and codes of 4 bits (uint8), go by way of shared
    memory. So do all for mma.sync.
    """
    is_narrow = jnp.dtype(cache_dtype).itemsize == 1 and cache_dtype != jnp.uint8
    return target.multiply == "wgmma" and is_narrow and not is_scaled and head_dim <= 128


# Of a consumer with tensor memory: instructions for each exponent (the row's maximum, the difference to it,
# the exponent, the sum, half of a conversion), and more of them for one by polynomial.
INSTRUCTIONS, POLYNOMIAL_INSTRUCTIONS = 4.5, 7


def one_by_polynomial_in(target: Target) -> int:
    """Return of how many exponents of a prompt one is computed by polynomial; 0: none.

    While one tile's softmax is taken, the tensor cores multiply another's. A column of 128 rows takes 128 /
    core_exponents cycles of the exponent units, and a cycle for each of a warp's instructions on four
    schedulers: so many by polynomial that both take equally long.
    """
    if target.multiply != "tcgen05":
        return 0
    by_unit = 128 / target.core_exponents
    share = (by_unit - INSTRUCTIONS) / (by_unit + POLYNOMIAL_INSTRUCTIONS)
    return round(1 / share) if share > 0 else 0


def num_columns(num_queries: int) -> int:
    """Return the number of queries, padded to what a wgmma takes as columns: a multiple of 8."""
    return -(-num_queries // 8) * 8


def num_cores() -> int:
    """Return the multiprocessors of the default device; an H200's where there is no GPU (tests, compiling
    ahead).
    """
    return getattr(jax.devices()[0], "core_count", None) or H200_CORES
