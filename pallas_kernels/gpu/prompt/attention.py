"""Attention of prompts on GPUs since Ampere: tiles of neighbouring query tokens, causal, over a paged cache.

    out[i, h] = softmax over the tokens t of the tile's sequence up to query i of (scale * q[i, h] . k[t]),
                applied to v[t]

with the options of `ops.tiled_paged_attention`. A program computes one tile for up to 128 rows of a kv head's
group, or 256 with tensor memory: for example 4 query heads of 32 tokens. Its producer warpgroup brings K and
V (`fetch`), one or two consumer warpgroups take the softmax over them (`softmax`), one more widens a
quantised cache, and one more starts the products by tcgen05 (`products`). The tiles of K and V lie on
multiples of tile_kv whatever else is computed, so a token's bits do not depend on its company.

A long context has partitions of 8,192 tokens or more, which follow from the tile's position alone. Each is a
program's, so that few tiles keep the GPU busy: `partitions`.

A quantised cache is multiplied in float16: queries are converted before. The output, still in units of the
cache, is multiplied by the scale of V and converted back after the kernel, by XLA.

Not for: float32, block sizes under 8, tiles of more than 64 tokens, other head_dims than those in
`support.SUPPORT`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import arrival_counter, common, cp_async, ptxas, targets
from pallas_kernels.gpu.attention import Softmax
from pallas_kernels.gpu.partitioning import Partitioning, PartitionList
from pallas_kernels.gpu.prompt import fetch, partitions, products, program, softmax
from pallas_kernels.gpu.prompt.program import TILE_LENS, Problem
from pallas_kernels.support import Arrays, Options


def _kernel(
    gmem: Any,  # `Arrays`, as refs, q as [num_tiles, tile_len, num_q_heads, head_dim]
    positions_gmem: Any,  # [num_tiles] positions of the tiles' first queries
    extras: common.Extras,
    work: PartitionList | None,  # None: an item is a tile
    counters: Any,  # [num_tiles * num_chunks * num_kv_heads * num_warpgroups, 1] int32, zeros; or None
    out_gmem: Any,  # like q
    partials: partitions.Partials | None,
    scratch: program.Scratch,
    *,
    problem: Problem,
    is_last: Any,
) -> None:
    """Compute one item: a tile of queries for some heads, over all its keys or one partition of them.

    Items are taken from the last to the first.
    """
    p = problem
    scratch = p.ready(program.scratch_types(p), scratch)
    place, chunk, kv_head, warpgroup = (
        lax.axis_index(name) for name in ("place", "chunk", "kv_head", "warpgroup")
    )
    # The last tile of a causal prompt has the most keys. It is first, so that no long program starts last.
    num_items = out_gmem.shape[0] if work is None else work.num_items[0]
    item = num_items - 1 - place

    def tile() -> jax.Array:
        return item if work is None else work.items[item, 0]

    def tile_and_keys() -> tuple[jax.Array, program.KeyRange]:
        """Return the program's tile, and the keys that it reads for it.

        Each warpgroup reads them for itself. If they were read before the warpgroups part, they would stay in
        registers while the producer runs, which has few.
        """
        row = tile()
        bounds = None if work is None else (work.items[item, 1], work.items[item, 2])
        return row, program.keys_of(p, positions_gmem[row], gmem.seq_lens[row], bounds)

    def run() -> None:
        @pl.when(warpgroup == p.num_warpgroups)
        def _producer() -> None:
            if p.shares_registers:
                plgpu.set_max_registers(p.registers.producer, action="decrease")
            row, keys = tile_and_keys()
            plgpu.warp_map(lambda warp: fetch.produce(p, keys, gmem, extras, row, kv_head, scratch, warp))

        if scratch.raw is not None:

            @pl.when(warpgroup == p.num_warpgroups + 1)
            def _widener() -> None:
                if p.shares_registers:
                    plgpu.set_max_registers(p.registers.widener, action="decrease")
                row, keys = tile_and_keys()
                fetch.widen(p, keys, gmem, extras, row, scratch)

        if p.has_tensor_memory:

            @pl.when(warpgroup == p.num_threads - 1)
            def _multiplier() -> None:
                if p.shares_registers:
                    plgpu.set_max_registers(p.registers.multiplier, action="decrease")
                _, keys = tile_and_keys()
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: products.start(p, keys, scratch)))

        @pl.when(warpgroup < p.num_warpgroups)
        def _consumer() -> None:
            if p.shares_registers:
                plgpu.set_max_registers(p.registers.consumer, action="increase")
            number = warpgroup if p.num_warpgroups > 1 else jnp.int32(0)  # a constant takes no register
            first_head = (chunk * p.num_warpgroups + number) * p.warpgroup_heads  # index in the group
            row, keys = tile_and_keys()
            softmax.load_queries(p, gmem.q.at[row], kv_head, first_head, scratch, number)
            state = softmax.consume(
                p, keys, extras, kv_head, kv_head * p.group_size + first_head, scratch, number
            )

            # The tile is read again where it is needed, because registers are short above.
            def write(pieces: Iterable[tuple[int, Softmax]]) -> None:
                out = out_gmem.at[tile()]
                softmax.store_output(p, pieces, extras, out, kv_head, first_head, scratch, number)

            def computed_pieces() -> Iterator[tuple[int, Softmax]]:
                return softmax.pieces(p, state, scratch, number)

            if work is None or partials is None:
                write(computed_pieces())
                return
            computed = partitions.ComputedPartition(work.items, item, partials, (kv_head, chunk, number))

            def arrive() -> jax.Array:
                index = (tile() * p.num_kv_heads + kv_head) * p.num_chunks + chunk
                counter = counters.at[index * p.num_warpgroups + number]
                # The queries' memory is free by now.
                return is_last(counter, scratch.q.at[number], computed.num_partitions, p.tiled(p.line))

            partitions.finish(p, computed, state, computed_pieces, write, arrive)

    if work is None:
        run()
    else:
        pl.when(item >= 0)(run)


def prompt_attention(
    arrays: Arrays,
    query_starts: jax.Array,
    options: Options,
    *,
    partitioning: Partitioning | None = None,
    in_registers: bool | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. `ops.tiled_paged_attention` has checked the arguments.

    arrays: with q of four axes, [num_tiles, tile_len, num_q_heads, head_dim].
    query_starts: [num_tiles] int32, the position of each tile's first query.
    partitioning: of the context of a tile, by default `partitions.partitioning_of`.
    in_registers: whether P stays in registers; by default unless it is interpreted.
    interpret: bool or plgpu.InterpretGPUParams.

    Returns: as q.
    """
    num_tiles, query_len = arrays.q.shape[:2]
    if query_len > TILE_LENS[-1]:
        raise NotImplementedError(
            f"mosaic_gpu serves tiles of at most {TILE_LENS[-1]} tokens, not {query_len}. Use 'xla'."
        )
    if not interpret:
        ptxas.refuse(ptxas.version())
    p = program.make_problem(arrays, options, in_registers=in_registers, is_interpreted=bool(interpret))
    q = jnp.pad(arrays.q, [(0, 0), (0, p.tile_len - query_len), (0, 0), (0, 0)])
    if q.dtype != p.dtype:  # bfloat16's numbers go further
        q = jnp.clip(q, -common.FLOAT16_MAX, common.FLOAT16_MAX).astype(p.dtype)

    def launch(tiles: slice) -> jax.Array:
        some = arrays._replace(
            q=q[tiles], block_tables=arrays.block_tables[tiles], seq_lens=arrays.seq_lens[tiles]
        )
        positions, num_tiles, work = query_starts[tiles], some.q.shape[0], None
        if max_partitions > 1:
            work = partitions.plan(p, positions, some.seq_lens, capacity, chosen)
        sizes = num_tiles, num_tiles * max_partitions
        run = common.kernel_of(_kernel_of, p, sizes, interpret=interpret)
        return run(some, positions, common.extras_of(options), work)

    chosen = partitioning or partitions.partitioning_of(
        p.num_kv_heads * p.num_chunks, is_interpreted=bool(interpret)
    )
    capacity = arrays.block_tables.shape[1] * p.block_size
    max_partitions = partitions.max_partitions(p, capacity, chosen)
    at_a_time = partitions.tiles_of_a_launch(p, num_tiles, max_partitions)
    outs = [launch(slice(first, first + at_a_time)) for first in range(0, num_tiles, at_a_time)]
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs)
    out = out[:, :query_len]
    if options.v_scale is None:
        return out.astype(arrays.q.dtype)
    per_head = jnp.repeat(options.v_scale, p.group_size)
    return (out * per_head[:, None]).astype(arrays.q.dtype)


def partial_bytes(
    num_tiles: int, tile_len: int, capacity: int, num_kv_heads: int, group_size: int, head_dim: int
) -> int:
    """Return the most bytes of the partial results of a call.

    capacity: the most tokens of a sequence.
    """
    max_rows = program.MAX_WARPGROUPS * program.rows_of(program.multiply_of(targets.compiled_for(), head_dim))
    num_chunks = -(-group_size * tile_len // max_rows)
    num_programs = num_kv_heads * num_chunks
    count = partitions.partitioning_of(num_programs).bound(capacity)
    if count == 1:
        return 0
    rows = num_programs * max_rows
    return min(partitions.bytes_of(num_tiles * count, rows, head_dim), partitions.PARTIAL_BYTES)


def _kernel_of(p: Problem, sizes: tuple[int, int], interpret: Any) -> Callable[..., jax.Array]:
    """Return a function (arrays, positions, extras, work) -> output, for (tiles, partitions at most)."""
    num_tiles, max_items = sizes
    partials = partitions.partials_of(p, max_items) if max_items > num_tiles else None

    def prompt_attention_kernel(*refs: Any) -> None:
        is_last = arrival_counter.is_last_in_turn if interpret else arrival_counter.is_last
        _kernel(*refs, problem=p, is_last=is_last)

    shape = (num_tiles, p.tile_len, p.num_kv_heads * p.group_size, p.head_dim)
    kernel = plgpu.kernel(
        prompt_attention_kernel,
        out_type=(jax.ShapeDtypeStruct(shape, p.dtype), partials),
        grid=(max_items, p.num_chunks, p.num_kv_heads),
        grid_names=("place", "chunk", "kv_head"),
        num_threads=p.num_threads,
        thread_name="warpgroup",
        scratch_types=[cp_async.memory_of(program.scratch_types(p))],
        # No maximum or sum goes beyond a warp, for which memory would be kept.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=common.interpret_params(interpret),
    )

    def run(
        arrays: Arrays, positions: jax.Array, extras: common.Extras, work: PartitionList | None
    ) -> jax.Array:
        counters = None
        if work is not None:
            num_counters = num_tiles * p.num_chunks * p.num_kv_heads * p.num_warpgroups
            counters = jax.new_ref(jnp.zeros((num_counters, 1), jnp.int32))
        out, _ = kernel(arrays, positions, extras, work, counters)
        return out

    return run
