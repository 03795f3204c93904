"""What the engine will use on this machine: dtype, lengths, and the size of its cache."""

import ctypes
import functools
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from jaxpaged import disk_cache
from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check
from jaxpaged.config import AUTO, PREFILL_TILE, EngineConfig
from jaxpaged.engine import gpu_flags
from jaxpaged.memory import kv_cache, sizing
from jaxpaged.memory.sizing import Budget, CacheSize
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.names import num_weights
from jaxpaged.parallel.mesh import mesh_of
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, create_state, create_tables
from pallas_kernels import layouts, native, support
from pallas_kernels.compilation_cache import compilation_cache_dir
from pallas_kernels.gpu.decode.attention import partial_bytes
from pallas_kernels.gpu.prompt.attention import partial_bytes as prompt_partial_bytes
from pallas_kernels.layouts import Layout
from pallas_kernels.ops import TiledImplementation, choice

# Share of a CPU's memory that the cache may take: there, other programs live beside us.
CPU_MEMORY_SHARE = 0.05
# Bytes of JAX's memory on a GPU for what runs beside the loop: requests written into rows, reports read, and
# what is lost between arrays.
GPU_BYTES_FREE = 256 * 2**20
# What glibc's `mallopt` calls its parameters, and the threshold up to which it learns by itself what to keep.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
_kept_bytes = 32 * 2**20
# The share of blocks that stays free, as vLLM's, when a request is admitted beside running ones.
WATERMARK = 0.01


def resolve_dtype(config: EngineConfig) -> jnp.dtype:
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


def mesh(config: EngineConfig) -> Mesh | None:
    """The devices that share the model, in groups; None where it is on one."""
    size, groups = config.tensor_parallel_size, config.data_parallel_size
    return None if size == groups == 1 else mesh_of(size, groups, config.num_processes)


def layout(config: EngineConfig, model_config: ModelConfig) -> Layout:
    """The layout of the cache. Raises `InputError` for options that mean nothing together or for this
    model.
    """
    try:
        chosen = layouts.choose(
            config.kv_layout, config.kv_cache_dtype, measures_scales=config.calculate_kv_scales
        )
        layouts.check(chosen, config.block_size, model_config.head_dim, resolve_dtype(config))
    except ValueError as error:
        raise InputError(str(error)) from error
    return chosen.on_several() if config.tensor_parallel_size > 1 else chosen


def refuse_other_heads(config: EngineConfig, whole: ModelConfig) -> None:
    """Raise `InputError` if the cache's layout is for another number of kv heads than this model's."""
    chosen = layout(config, whole)
    if rule := chosen.why_not_heads(whole.num_kv_heads):
        raise InputError(f"kv_layout={chosen}: {rule}")


def max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens that a row of the state has places for; at most what the model was made for.

    A request may have fewer, where that depends on the cache's size: see `served_len`.
    """
    if config.max_model_len is None or config.max_model_len == AUTO:
        return model_config.max_model_len
    check(
        "max_model_len",
        config.max_model_len,
        f"at most the model's {model_config.max_model_len}",
        config.max_model_len <= model_config.max_model_len,
    )
    return config.max_model_len


def attention(config: EngineConfig, model_config: ModelConfig) -> tuple[TiledImplementation, str]:
    """The implementation of attention on this machine, of prompts and of answers, and why.

    Raises `InputError` if the one asked for does not serve the model, or the native target not the processor.
    """
    dtype, kv_layout = resolve_dtype(config), layout(config, model_config)
    try:
        no_native = native.why_not_cache(kv_layout, dtype)
    except ValueError as error:
        raise InputError(str(error)) from error
    if config.attention == "auto":
        wanted = choice.default_tiled_implementation(dtype, tile_len=1)
    else:
        wanted = config.attention
    if why := _why_not(wanted, dtype, config, model_config):
        if config.attention != "auto":
            raise InputError(f"attention={config.attention!r} must serve the model: {why}")
        return "xla", why
    if config.attention != "auto":
        return wanted, "asked for"
    if wanted == "xla":
        if jax.default_backend() != "cpu":
            no_native = None
        return wanted, no_native or "the kernels are for Hopper GPUs"
    return wanted, "a Hopper GPU" if wanted == "mosaic_gpu" else native.instructions()


def refuse_loop(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise `InputError` if layers cannot be computed in a loop here: on a GPU XLA cannot multiply there."""
    if not config.loop_over_layers or jax.default_backend() == "cpu":
        return
    dtype, (kernel, _) = resolve_dtype(config), attention(config, model_config)
    serves = form_of(dtype).stacked == "mosaic_gpu" and kernel == "mosaic_gpu"
    rule = (
        f"None or False with {dtype} and attention by {kernel} on this device: on a GPU a loop over layers "
        "needs Hopper's kernels for both, and 16 bits"
    )
    check("loop_over_layers", True, rule, serves)


def _why_not(
    implementation: TiledImplementation, dtype: jnp.dtype, config: EngineConfig, model_config: ModelConfig
) -> str | None:
    kv_layout = layout(config, model_config)
    if implementation == "native":
        extras = ", ".join(model_config.attention_extras)
        why_not = native.why_not_cache(kv_layout, dtype)
        return why_not or (f"the native kernel has no {extras}" if extras else None)
    view = kv_layout.view()
    numbers = None if view is None else kv_layout.arrays(1, 1, 1, 1, dtype)[view.k.array].dtype
    try:
        support.refuse_unserved(
            implementation,
            dtype=dtype,
            cache_dtype=jnp.dtype(numbers or dtype),
            head_dim=model_config.head_dim,
            block_size=config.block_size,
            group_size=model_config.num_q_heads // model_config.num_kv_heads,
            options=support.Options(
                scale=1.0, sliding_window=model_config.sliding_window, kv_layout=kv_layout
            ),
        )
    except NotImplementedError as error:
        return str(error)
    return None


def tiles_per_pass(config: EngineConfig) -> int:
    """Prompt tiles in one forward pass, a fixed number so that a token's bits are, too.

    A wide pass computes long prompts faster, a narrow one wastes less on short ones: 16 tokens for each row
    that can run, at least 64, and at most what makes a product efficient (LOG.md: 256 on two CPU cores).
    """
    widest = 256 if jax.default_backend() == "cpu" else 512
    tokens = min(max(16 * config.max_num_seqs, 64), widest)
    return min(tokens // PREFILL_TILE, config.num_prefill_tiles)


def step_config(config: EngineConfig, model_config: ModelConfig, num_blocks: int) -> StepConfig:
    """What the loop is compiled for, over so many blocks."""
    return StepConfig(
        max_num_seqs=config.max_num_seqs,
        num_tiles=config.num_prefill_tiles,
        tiles_per_pass=tiles_per_pass(config),
        attention=attention(config, model_config)[0],
        watermark_blocks=int(WATERMARK * num_blocks),
        sliding_window=model_config.sliding_window,
        reuse_answers=config.reuse_answers,
        decode_widths=config.decode_widths,
    )


def longest_that_fits(config: EngineConfig, model_config: ModelConfig, size: CacheSize) -> int:
    """Return how many tokens a request may have for the cache to hold it, at most `max_model_len`.

    What a row holds at most has to fit beside nothing else; an answer's last token is never written to the
    cache.
    """
    longest, usable = max_model_len(config, model_config), size.num_blocks - 1
    fits = (
        step_config(config, model_config, size.num_blocks).blocks_of(longest - 1, size.block_size) <= usable
    )
    return longest if fits else usable * size.block_size + 1


def served_len(config: EngineConfig, model_config: ModelConfig, size: CacheSize) -> int:
    """Return the tokens that a request may have in an engine with such a cache.

    That is `max_model_len`, which the cache must hold, or else what fits: if that was asked for, or if nobody
    has chosen the length nor the cache's size, which on a CPU is a share of its memory. Then it is logged.
    Raises `InputError` if the cache is too small.
    """
    longest, fits = max_model_len(config, model_config), longest_that_fits(config, model_config, size)
    if fits == longest:
        return longest
    is_ours = config.max_model_len is None and config.num_blocks is None and memory_stats() is None
    if is_ours or config.max_model_len == AUTO:
        logging.warning(
            "max_model_len is %d, not the model's %d: what fits into %d blocks of %d tokens",
            *(fits, longest, size.num_blocks - 1, size.block_size),
        )
        return fits
    whose = ", the model's own," if config.max_model_len is None else ""
    need = step_config(config, model_config, size.num_blocks).blocks_of(longest - 1, size.block_size)
    usable = size.num_blocks - 1
    if config.num_blocks is not None:
        has, or_more = f"num_blocks={size.num_blocks} leaves {usable} for use", f", or num_blocks={need + 1}"
    else:
        has = f"the cache has {usable} for use, {usable * size.bytes_per_block} bytes: {size.reason}"
        or_more = ", or more memory (gpu_memory_utilization)"
    raise InputError(
        f"max_model_len={longest}{whose} needs {need} blocks of {size.block_size} tokens, "
        f"{need * size.bytes_per_block} bytes, but {has}; give max_model_len={fits}, or 'auto' for what fits"
        f"{or_more}"
    )


def bytes_per_block(config: EngineConfig, model_config: ModelConfig) -> int:
    """Of K and V in all layers."""
    return sizing.bytes_per_block(
        block_size=config.block_size,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=resolve_dtype(config),
        layout=layout(config, model_config),
    )


def cache_size(config: EngineConfig, model_config: ModelConfig) -> CacheSize:
    """How many blocks the cache gets on this machine, reckoned from shapes alone.

    Of a GPU that is a guess, which `startup` puts right: there the cache gets all that is left.
    """
    weights = weight_bytes(config, model_config)
    return sizing.cache_size(
        num_blocks=config.num_blocks,
        bytes_per_block=bytes_per_block(config, model_config),
        state_bytes_per_block=state_bytes(config, model_config)[1],
        block_size=config.block_size,
        num_layers=model_config.num_layers,
        budget=budget(config, model_config, weights) if config.num_blocks is None else None,
    )


def keep_on_disk(keep: bool = True) -> None:
    """Keep on disk what is compiled, the loop whole and the rest by JAX, and models as programs read them.

    Nothing is kept, or found, where there is no folder for it, or without `keep`: for the process as a whole.
    """
    folder = compilation_cache_dir() if keep else None
    disk_cache.keep_in(folder)
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def keep_freed(num_bytes: int) -> None:
    """Let the C library keep pieces of memory of up to so many bytes when they are freed, for the next use.

    They are what the loop takes on a CPU while it runs. glibc gives pieces of more than 32 MiB back to the
    system at once, which has to zero their pages in each run of the loop anew. It does so with pieces of more
    than 64 MiB in any case, for its threads cannot keep them. Who has set MALLOC_MMAP_THRESHOLD_ or
    GLIBC_TUNABLES has chosen already.
    """
    global _kept_bytes
    is_told = not {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}.isdisjoint(os.environ)
    threshold = num_bytes + 2**20  # a piece is somewhat more than was asked for
    if is_told or threshold <= _kept_bytes or jax.default_backend() != "cpu" or os.name != "posix":
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        _kept_bytes = threshold
        mallopt(M_MMAP_THRESHOLD, min(threshold, 2**31 - 1))
        mallopt(M_TRIM_THRESHOLD, min(2 * threshold, 2**31 - 1))  # as where glibc learns by itself


def weight_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """Of all weights, in one dtype."""
    return num_weights(model_config) * resolve_dtype(config).itemsize


def budget(config: EngineConfig, model_config: ModelConfig, bytes_to_load: int) -> Budget:
    """Bytes the cache may take: a share of a CPU's physical memory, or what `gpu_memory_utilization` leaves
    on a GPU beside weights that are still to be loaded; less the engine's state and the activations of the
    widest step, both reckoned from shapes.
    """
    beside = (
        (f"of {what}", num_bytes)
        for what, num_bytes in (
            ("state", state_bytes(config, model_config)[0]),
            ("activations", activation_bytes(config, model_config)),
        )
    )
    stats = memory_stats()
    if stats is None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        what = f"{CPU_MEMORY_SHARE:.0%} of this machine's {physical} bytes"
        size = config.tensor_parallel_size * config.data_parallel_size
        if size > 1:
            what += f", shared by {size} devices"
        return Budget(int(physical * CPU_MEMORY_SHARE) // size, what, tuple(beside))
    return gpu_budget(config, stats).less(("of weights", bytes_to_load), *beside)


def memory_stats() -> Mapping[str, int] | None:
    """What JAX says of its GPU's memory, in bytes; None on a CPU, where other programs live beside us."""
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else device.memory_stats() or {}


def may_fail_to_launch(error: Exception) -> bool:
    """Whether a device that raised this may still run a step, if not the loop: a GPU, and it has memory."""
    return jax.default_backend() == "gpu" and "RESOURCE_EXHAUSTED" not in str(error)


def gpu_budget(config: EngineConfig, stats: Mapping[str, int]) -> Budget:
    """The memory that `gpu_memory_utilization` gives to JAX on its GPU, as far as there is so much, less what
    it has in use.
    """
    if "bytes_limit" not in stats:
        raise InputError(
            "num_blocks=None must be an int where JAX does not say how much memory its device has "
            "(XLA_PYTHON_CLIENT_ALLOCATOR is other than 'default', perhaps)"
        )
    limit, share = stats["bytes_limit"], gpu_flags.memory_share()
    total = round(limit / share)
    most = min(limit, int(total * config.gpu_memory_utilization))
    what = f"{most / total:.0%} of the GPU's {total} bytes"
    if config.gpu_memory_utilization > share:
        name = gpu_flags.MEMORY_SHARE_NAMES[0]
        what += f" (JAX has no more: set {name}={config.gpu_memory_utilization} before it starts)"
    pool = stats.get("pool_bytes", 0)
    if gpu_flags.preallocates() and 0 < pool < most:  # somebody else has the rest
        most, what = pool, f"the {pool} bytes of the GPU that were free when JAX started"
    in_use = stats.get("bytes_in_use", 0)
    return Budget(most, what).less(("in use", in_use), ("kept free", GPU_BYTES_FREE))


@functools.cache  # it is asked for twice, and traces what makes the state
def state_bytes(config: EngineConfig, model_config: ModelConfig) -> tuple[int, int]:
    """Bytes of the engine's state beside K and V: of its rows, and of each block."""
    max_len = max_model_len(config, model_config)

    def of_blocks(num_blocks: int) -> int:
        def create() -> EngineState:
            caching = config.enable_prefix_caching
            width = cdiv(max_len, config.block_size)
            tables = create_tables(
                num_blocks, config.num_rows, width, config.block_size, prefix_caching=caching
            )
            nothing = kv_cache.create(0, 0, 1, 1, 1, jnp.dtype("float32"))
            return create_state(tables, nothing, max_len, model_config.vocab_size)

        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(create)))

    few, step = of_blocks(1024), 1024
    per_block = (of_blocks(1024 + step) - few) // step
    return few - 1024 * per_block, per_block


def activation_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """An upper estimate of what one step needs beside weights and cache.

    In float32: four copies of the widest intermediate of a layer, three of the logits (of a step with
    filters; penalties take a little more), and what a GPU's kernels keep of long rows.
    """
    tokens = max(config.num_prefill_tiles * PREFILL_TILE, config.max_num_seqs)
    c = model_config
    widest = max(2 * c.widest_mlp, (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)
    partials = 0
    if attention(config, model_config)[0] == "mosaic_gpu":
        group_size, max_len = c.num_q_heads // c.num_kv_heads, max_model_len(config, model_config)
        heads = c.num_kv_heads, group_size, c.head_dim
        partials = partial_bytes(config.max_num_seqs, max_len, *heads)
        partials += prompt_partial_bytes(tiles_per_pass(config), PREFILL_TILE, max_len, *heads)
    return 4 * (4 * tokens * widest + 3 * config.max_num_seqs * c.vocab_size) + partials
