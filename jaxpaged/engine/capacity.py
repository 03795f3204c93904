"""Capacity: how many blocks the cache gets, and how long a request may be, by shapes alone."""

import bisect
import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
from absl import logging

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError
from jaxpaged.config import AUTO, PREFILL_TILE
from jaxpaged.engine import machine
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache, sizing
from jaxpaged.memory.sizing import Budget, CacheSize
from jaxpaged.models.names import num_weights
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, create_state, create_tables
from pallas_kernels.gpu.decode.attention import partial_bytes
from pallas_kernels.gpu.prompt.attention import partial_bytes as prompt_partial_bytes

# Fraction of a CPU's memory that the cache may take, beside other programs.
CPU_MEMORY_SHARE = 0.05


def cache_size(setup: Setup) -> CacheSize:
    """Return how many blocks the cache gets on this machine, by shapes alone.

    On a GPU this is an estimate, which `start.fitted` corrects: there the cache gets all that is left.
    """
    config = setup.config
    size = sizing.cache_size(
        num_blocks=config.num_blocks,
        bytes_per_block=bytes_per_block(setup),
        state_bytes_per_block=state_bytes(setup)[1],
        block_size=config.block_size,
        num_layers=setup.num_places,
        budget=budget(setup, weight_bytes(setup)) if config.num_blocks is None else None,
        further_bytes=functools.partial(further_bytes, setup),
    )
    return with_further(setup, size)


def with_further(setup: Setup, size: CacheSize) -> CacheSize:
    """Return a cache's size with the blocks of further size classes that go with its number of blocks."""
    more = more_blocks(setup, size.num_blocks)
    return dataclasses.replace(size, more_blocks=more, more_bytes=(bytes_of_states(setup),) if more else ())


def more_blocks(setup: Setup, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks of each further size class that go with so many of the first: those of states.

    States get as many bytes as K and V, so no workload has less than half of what the best division of the
    memory would give it. They have at least what one request needs, with a given number of blocks what
    `max_num_seqs` rows need; and no more blocks than K and V have.
    """
    if setup.model_config.mixer is None:
        return ()
    of_kv, of_states = bytes_per_block(setup), bytes_of_states(setup)
    share = num_blocks * min(of_kv, of_states) // of_states if of_kv else num_blocks
    return (max(share, min(_least_state_blocks(setup), num_blocks)),)


@functools.cache  # asked for often while the cache is sized
def _least_state_blocks(setup: Setup) -> int:
    """Return the blocks of states, the null block included, that one request of full length needs; where the
    number of blocks is given, with two for each other row, which has a state and the rows of an open chunk.
    """
    config = setup.config
    needs = setup.step_config(2, (2,)).blocks_by_class(setup.max_model_len - 1, config.block_size)
    return needs[1] + 1 + (0 if config.num_blocks is None else 2 * (config.max_num_seqs - 1))


def further_bytes(setup: Setup, num_blocks: int) -> int:
    """Return the bytes of the blocks of further size classes that go with so many of the first."""
    return sum(count * bytes_of_states(setup) for count in more_blocks(setup, num_blocks))


def longest_that_fits(setup: Setup, size: CacheSize) -> int:
    """Return how many tokens a request may have for the cache to hold it: at most `max_model_len`.

    The request has the cache for itself. An answer's last token is never written to the cache.
    """
    config = setup.step_config(size.num_blocks, size.more_blocks)
    return bisect.bisect_left(
        range(setup.max_model_len), True, key=lambda num_tokens: bool(_shortage(config, size, num_tokens))
    )


def _shortage(config: StepConfig, size: CacheSize, num_tokens: int) -> tuple[int, int] | None:
    """Return a size class that has too few blocks for a request with so many tokens in the cache, and how
    many it needs; None if all have enough.
    """
    needs = config.blocks_by_class(num_tokens, size.block_size)
    for size_class, (need, blocks) in enumerate(zip(needs, size.blocks_by_class, strict=True)):
        if need > blocks - 1:
            return size_class, need
    return None


def served_len(setup: Setup, size: CacheSize) -> int:
    """Return how many tokens a request may have in an engine with a cache of this size.

    The length is `max_model_len` if the cache holds so many. Otherwise it is what fits, where that was asked
    for with "auto", or where neither the length nor the cache's size was chosen, on a CPU. A shorter length
    is logged. Raises `InputError` if the cache is too small for the length that was asked for.
    """
    config = setup.config
    longest, fits = setup.max_model_len, longest_that_fits(setup, size)
    if fits == longest:
        return longest
    is_ours = config.max_model_len is None and config.num_blocks is None and machine.memory_stats() is None
    if is_ours or config.max_model_len == AUTO:
        logging.warning(
            "max_model_len is %d, not the model's %d: what fits into %d blocks of %d tokens",
            *(fits, longest, size.num_blocks - 1, size.block_size),
        )
        return fits
    whose = ", the model's own," if config.max_model_len is None else ""
    shortage = _shortage(setup.step_config(size.num_blocks, size.more_blocks), size, longest - 1)
    assert shortage is not None  # it does not fit
    size_class, need = shortage
    usable, num_bytes = size.blocks_by_class[size_class] - 1, size.bytes_by_class[size_class]
    what = " of states" if size_class else ""
    if config.num_blocks is not None:
        leaves = f"num_blocks={size.num_blocks} leaves {usable}{what} for use"
        has, or_more = leaves, "" if size_class else f", or num_blocks={need + 1}"
    else:
        has = f"the cache has {usable} for use, {usable * num_bytes} bytes: {size.reason}"
        or_more = ", or more memory (gpu_memory_utilization)"
    raise InputError(
        f"max_model_len={longest}{whose} needs {need} blocks{what} of {size.block_size} tokens, "
        f"{need * num_bytes} bytes, but {has}; give max_model_len={fits}, or 'auto' for what fits{or_more}"
    )


def budget(setup: Setup, bytes_to_load: int) -> Budget:
    """Estimate the bytes that the cache may take.

    On a CPU these are a fraction of the physical memory. On a GPU they are what `gpu_memory_utilization`
    gives, less the weights that are still to be loaded. The engine's state and the activations of the widest
    step are subtracted, both by their shapes.
    """
    beside = ("of state", state_bytes(setup)[0]), ("of activations", activation_bytes(setup))
    stats = machine.memory_stats()
    if stats is None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        what = f"{CPU_MEMORY_SHARE:.0%} of this machine's {physical} bytes"
        size = setup.config.tensor_parallel_size * setup.config.data_parallel_size
        if size > 1:
            what += f", shared by {size} devices"
        return Budget(int(physical * CPU_MEMORY_SHARE) // size, what, beside)
    return machine.gpu_budget(setup.config, stats).less(("of weights", bytes_to_load), *beside)


def bytes_per_block(setup: Setup) -> int:
    """Return the bytes of a block: K and V of the widest group and of what drafts, and a head's features.

    States lie in blocks of their own: see `bytes_of_states`.
    """
    block_size, draft = setup.config.block_size, setup.draft
    sizes = [(setup.grouping.width, *setup.cache_heads)]
    sizes += [] if draft is None else [draft.cache_sizes]
    width = 0 if draft is None or draft.draft_head is None else draft.hidden_size  # of a head's features
    return block_size * width * setup.dtype.itemsize + sum(
        sizing.bytes_per_block(
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=setup.dtype,
            layout=setup.layout,
        )
        for num_layers, num_kv_heads, head_dim in sizes
    )


def bytes_of_states(setup: Setup) -> int:
    """Return the bytes of the states of all layers in a block; 0 without any."""
    c = setup.model_config
    if c.mixer is None:
        return 0
    arrays = c.mixer.arrays(setup.config.block_size, setup.dtype).values()
    return len(c.state_layers) * sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


def weight_bytes(setup: Setup) -> int:
    """Return the bytes of all weights, if all had the engine's dtype."""
    its = 0 if setup.draft is None else num_weights(setup.draft)
    return (num_weights(setup.model_config) + its) * setup.dtype.itemsize


@functools.cache  # asked for twice, and it traces what creates the state
def state_bytes(setup: Setup) -> tuple[int, int]:
    """Return the bytes of the engine's state beside K and V: those of its rows, and those of each block."""
    config, max_len = setup.config, setup.max_model_len

    def of_blocks(num_blocks: int) -> int:
        def create() -> EngineState:
            caching = config.enable_prefix_caching
            width = cdiv(max_len, config.block_size)
            sizes = num_blocks, config.num_rows, width, config.block_size
            tables = create_tables(
                *sizes,
                prefix_caching=caching,
                num_groups=setup.grouping.num_groups,
                classes=setup.grouping.classes,
                more_blocks=more_blocks(setup, num_blocks),
            )
            nothing = kv_cache.create(0, 0, 1, 1, 1, jnp.dtype("float32"))
            vocab_size = setup.model_config.vocab_size
            return create_state(tables, nothing, max_len, vocab_size, on=setup.features)

        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(create)))

    few, step = of_blocks(1024), 1024
    per_block = (of_blocks(1024 + step) - few) // step
    return few - 1024 * per_block, per_block


def activation_bytes(setup: Setup) -> int:
    """Return an upper bound of the bytes that one step needs beside weights and cache.

    A model that drafts has as many more, whose sizes are taken for the model's: it is smaller.
    In float32 there are four copies of the widest intermediate of a layer, three of the logits (in a step
    with filters; penalties take a little more), and the partial results of a GPU's kernels for long rows.
    """
    c, config = setup.model_config, setup.config
    tokens = max(config.num_prefill_tiles * PREFILL_TILE, config.max_num_seqs)
    widest = max(2 * c.widest_mlp, (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)
    partials = 0
    if setup.attention == "mosaic_gpu":
        group_size, max_len = c.num_q_heads // c.num_kv_heads, setup.max_model_len
        heads = c.num_kv_heads, group_size, c.head_dim
        partials = partial_bytes(config.max_num_seqs, max_len, *heads)
        partials += prompt_partial_bytes(setup.tiles_per_pass, PREFILL_TILE, max_len, *heads)
    num_models = 1 if setup.draft is None else 2
    return num_models * (4 * (4 * tokens * widest + 3 * config.max_num_seqs * c.vocab_size) + partials)
