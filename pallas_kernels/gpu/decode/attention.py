"""Decode attention on GPUs since Ampere: one kernel for few long rows, many short ones, and all at once.

    out[row, h] = softmax over the row's tokens t of (scale * q[row, h] . k[t]), applied to v[t]

with the options of `ops.paged_attention`, for one new token a row or a few. A row is computed in partitions:

    partition p of a row:  m_p = max s[t],  l_p = sum exp(s[t] - m_p),  o_p = sum exp(s[t] - m_p) * v[t]
    the row:               sum_p exp(m_p - m) * o_p / sum_p exp(m_p - m) * l_p        with m = max m_p

A unit of work is a partition and a kv head. `plan` lists the partitions row by row. A fixed number of
programs shares the units, and a program's ring of tiles runs on from one unit to the next: `fetch` fills it,
`softmax` reads it. A row of one partition is written at once. The partitions of a longer row are kept in
memory in float32. The program that finishes last (`arrival_counter`) merges them in their order: no program
waits, and there is no second kernel.

The partitions of a row follow from its own tokens alone (`Partitioning`), so its bits depend neither on the
rest of the batch nor on the number of programs.

Not for: float32, block sizes under 8, other head_dims than those in `support.SUPPORT`. A block-sparse pattern
is served, but blocks it leaves out are read all the same.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import arrival_counter, common, cp_async, targets, tuning
from pallas_kernels.gpu.attention import Softmax
from pallas_kernels.gpu.decode import fetch, program, softmax
from pallas_kernels.gpu.partitioning import MOST_COUNTED, Partitioning, partition_list
from pallas_kernels.support import Arrays, Options, first_seen

MERGED_AT_A_TIME = 4  # partitions whose loads are in flight together; fewer if that makes more than
MERGED_NUMBERS = 4096  # numbers: 32 registers a thread
MIN_PARTITION = 512  # tokens
MAX_PARTITIONS = 64
MAX_QUERY_LEN = 16  # new tokens of a row
MAX_COLUMNS = 64  # queries that share a kv head: heads of its group x new tokens
MAX_MMA_COLUMNS = 16  # likewise, where a thread has them in registers for mma.sync
MAX_OUTPUTS = 8192  # numbers of a unit's output: 64 registers a thread
PARTIAL_COLUMNS = 2048  # partitions x kv heads x columns of a row, but at least 8 partitions


def default_partitioning(num_kv_heads: int, num_columns: int) -> Partitioning:
    """Return the default rule: partitions short enough for a lone row to keep the GPU busy, few enough to be
    merged cheaply.

    A row's partial results take at most 8 KiB for each number of head_dim: 1 MiB at 128, whatever its length.
    """
    max_partitions = PARTIAL_COLUMNS // (num_kv_heads * num_columns)
    return Partitioning(MIN_PARTITION, max(8, min(MAX_PARTITIONS, max_partitions)))


def serves(query_len: int, group_size: int, head_dim: int) -> bool:
    """Return whether rows of so many new tokens are few enough for a decode step and a consumer's
    registers.
    """
    columns, target = tuning.num_columns(group_size * query_len), targets.compiled_for()
    is_by_mma = query_len > 1 and target.kernel_multiply != "wgmma"
    fits = columns <= MAX_MMA_COLUMNS and tuning.fits(head_dim, jnp.dtype("bfloat16"), columns, target)
    if is_by_mma and not fits:
        return False
    return query_len <= MAX_QUERY_LEN and columns <= MAX_COLUMNS and columns * head_dim <= MAX_OUTPUTS


class WorkList(NamedTuple):
    """The partitions of a batch, in one list: row by row, each row's from the first to the last."""

    num_items: jax.Array  # [1]
    # [max_items, 4] int32: row + 65,536 x its row of the block tables, first token, end token, index of the
    # partition + 65,536 x the row's number of partitions
    items: jax.Array
    positions: jax.Array  # [num_rows] of each row's first new token


def finds_tables(num_rows: int, num_tables: int) -> bool:
    """Return whether rows and block tables are few enough for both numbers to fit into one number of an
    item.
    """
    return max(num_rows, num_tables) <= MOST_COUNTED


def plan(
    seq_lens: jax.Array,
    positions: jax.Array,
    query_len: int,
    window: int | None,
    partitioning: Partitioning,
    capacity: int,
    table_rows: jax.Array | None = None,
    chunk: int | None = None,
) -> WorkList:
    """List the partitions of a batch: 16 bytes each, computed by XLA.

    seq_lens, positions: [num_rows] int32, tokens in the cache, and the position of each row's first new
        token.
    query_len: new tokens of a row.
    window, chunk: what bounds attention, a sliding window or chunks. Tokens before the bound are in no
        partition, so that nothing reads them.
    table_rows: [num_rows] int32, each row's row of the block tables; None: in their order.

    A row without tokens has one partition, which writes zeros.
    """
    end = jnp.minimum(seq_lens, positions + query_len)
    first = first_seen(jnp.asarray(positions), window, chunk)
    start = jnp.zeros_like(end) if first is None else jnp.clip(first, 0, end)
    size = partitioning.sizes(start, end, capacity)
    partitions = partition_list(start, end, size, seq_lens.shape[0] * partitioning.bound(capacity))
    items = partitions.items
    if table_rows is not None:
        items = items.at[:, 0].add(table_rows[items[:, 0]] << 16)
    return WorkList(partitions.num_items, items, positions)


class PlanSizes(NamedTuple):
    """The static sizes that a plan depends on."""

    num_rows: int
    query_len: int  # new tokens of a row
    num_kv_heads: int
    group_size: int
    capacity: int  # tokens that a row of the block tables can hold
    sliding_window: int | None
    attention_chunk: int | None
    has_table_rows: bool  # whether rows name their row of the block tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPlan:
    """A plan for several calls that differ in queries and caches alone: those of a model's layers."""

    plan: WorkList
    sizes: PlanSizes = dataclasses.field(metadata={"static": True})


def shared_plan(
    sizes: PlanSizes,
    seq_lens: jax.Array,
    query_starts: jax.Array | None = None,
    table_rows: jax.Array | None = None,
    partitioning: Partitioning | None = None,
) -> SharedPlan:
    """Make the plan of calls of these sizes; the arrays are those of `paged_attention`.

    Raises: NotImplementedError if a row may have more partitions than an item can count.
    """
    num_columns = tuning.num_columns(sizes.group_size * sizes.query_len)
    partitioning = partitioning or default_partitioning(sizes.num_kv_heads, num_columns)
    if partitioning.bound(sizes.capacity) > MOST_COUNTED:
        raise NotImplementedError(
            f"mosaic_gpu cuts a row into {MOST_COUNTED} partitions at most, not "
            f"{partitioning.bound(sizes.capacity)}: use longer ones, or implementation='xla'."
        )
    positions = seq_lens - 1 if query_starts is None else query_starts
    made = plan(
        *(
            seq_lens,
            positions,
            sizes.query_len,
            sizes.sliding_window,
            partitioning,
            sizes.capacity,
            table_rows,
        ),
        chunk=sizes.attention_chunk,
    )
    return SharedPlan(made, sizes)


def partial_bytes(num_rows: int, capacity: int, num_kv_heads: int, group_size: int, head_dim: int) -> int:
    """Return the bytes of the partial results of a decode step, partitioned by default.

    capacity: the most tokens of a row.
    """
    columns = tuning.num_columns(group_size)
    count = default_partitioning(num_kv_heads, columns).bound(capacity)
    kept = head_dim if head_dim % 64 == 0 else 128
    return num_rows * count * num_kv_heads * columns * (kept + 2) * 4 if count > 1 else 0


class Partials(NamedTuple):
    """The partial results of rows with several partitions, in the GPU's memory."""

    out: Any  # [max_items, num_kv_heads, pieces * piece_rows, num_columns] float32
    stats: Any  # [max_items, num_kv_heads, 2, num_columns] float32, maximum and sum


def _kernel(
    gmem: Any,  # `Arrays`, as refs, q as [num_rows * query_len, num_q_heads, head_dim]
    plan: WorkList,
    extras: common.Extras,
    counters: Any,  # [num_rows * num_kv_heads, 1] int32, zeros; None without partials
    out_gmem: Any,  # like q
    partials: Partials | None,
    out_smem: Any,  # [pieces, num_columns, piece_rows] a unit's output, until it is copied out
    flag_smem: Any,  # [1] int32, for the arrival
    scratch: program.Scratch,
    *,
    problem: program.Problem,
    num_programs: int,
    is_last: Any,
) -> None:
    """Compute the program's units of work: the second warpgroup fetches, the first takes the softmax.

    A partition's item in the plan names its row; the unit's kv head is the remainder of its number.
    """
    p = problem
    scratch = p.ready(program.scratch_types(p), scratch)
    program_id, thread = lax.axis_index("program"), lax.axis_index("thread")
    num_units = plan.num_items[0] * p.num_kv_heads
    num_mine = pl.cdiv(jnp.maximum(num_units - program_id, 0), jnp.int32(num_programs))

    def unit(i: jax.Array) -> tuple[jax.Array, program.WorkUnit]:
        """Return the program's i-th unit of work, and its partition's index in the list."""
        number = program_id + i * num_programs
        item, kv_head = lax.div(number, jnp.int32(p.num_kv_heads)), lax.rem(number, jnp.int32(p.num_kv_heads))
        row, start, end = (plan.items[item, k] for k in range(3))
        table = row
        if p.has_table_rows:
            row, table = lax.rem(row, 1 << 16), lax.div(row, 1 << 16)
        return item, program.WorkUnit(row, table, kv_head, plan.positions[row], start, end)

    @pl.when(thread == 1)
    def _producer() -> None:
        @plgpu.warp_map
        def _fetch(warp: jax.Array) -> None:
            def produce(i: jax.Array, done: jax.Array) -> jax.Array:
                return fetch.produce(p, unit(i)[1], i, gmem, extras, scratch, done, warp)

            done = lax.fori_loop(0, num_mine, produce, jnp.int32(0))
            p.drain(scratch.ring.k_free, p.num_stages, done)
            pl.when(warp == 0)(lambda: p.drain(scratch.q_free, p.num_query_slots, num_mine))

    @pl.when(thread == 0)
    def _consumer() -> None:
        def consume(i: jax.Array, done: jax.Array) -> jax.Array:
            item, work = unit(i)
            state, done = softmax.consume(p, work, i, gmem, extras, scratch, done)

            def write(state: Softmax) -> None:
                softmax.store_outputs(
                    p, softmax.normalised(p, state, extras, work.kv_head), work, out_smem, out_gmem
                )

            if partials is None:
                write(state)
                return done
            index, count = lax.rem(plan.items[item, 3], 1 << 16), lax.div(plan.items[item, 3], 1 << 16)
            pl.when(count == 1)(lambda: write(state))

            @pl.when(count > 1)
            def _keep() -> None:
                _store(p, partials, item, work.kv_head, state)
                counter = counters.at[work.row * p.num_kv_heads + work.kv_head]

                @pl.when(is_last(counter, flag_smem, count))
                def _merge() -> None:
                    write(_merged(p, partials, item - index, count, work.kv_head))

            return done

        lax.fori_loop(0, num_mine, consume, jnp.int32(0))
        p.wait_smem_to_gmem(0)


def _store(
    p: program.Problem, partials: Partials, item: jax.Array, kv_head: jax.Array, state: Softmax
) -> None:
    """Store a partition's result, straight from the registers."""
    for i, piece in enumerate(state.out):
        common.store(partials.out.at[item, kv_head, pl.ds(i * p.piece_rows, p.piece_rows)], piece)
    common.store(partials.stats.at[item, kv_head, 0], state.max)
    common.store(partials.stats.at[item, kv_head, 1], state.sum)


def _merged(
    p: program.Problem, partials: Partials, first: jax.Array, count: jax.Array, kv_head: jax.Array
) -> Softmax:
    """Merge the partitions of a row: `count` items of the list from `first` on."""

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    numbers = len(p.pieces) * p.piece_rows * p.num_columns
    at_a_time = max(1, min(MERGED_AT_A_TIME, MERGED_NUMBERS // numbers))

    def merge(i: jax.Array, state: Softmax) -> Softmax:
        loaded = []
        for k in range(at_a_time):
            number = i * at_a_time + k
            item = first + jnp.minimum(number, count - 1)  # past the end: the last one again, with no weight
            largest, total = (load(partials.stats.at[item, kv_head, k], softmax.PER_HEAD) for k in range(2))
            out = tuple(
                load(partials.out.at[item, kv_head, pl.ds(i * p.piece_rows, p.piece_rows)], common.WGMMA)
                for i in range(len(p.pieces))
            )
            loaded.append(Softmax(out, largest + jnp.where(number < count, 0.0, common.LOWEST), total))
        new_max = state.max
        for partition in loaded:
            new_max = jnp.maximum(new_max, partition.max)
        rescale = jnp.exp2(state.max - new_max)
        out = tuple(piece * lax.broadcast_in_dim(rescale, piece.shape, [1]) for piece in state.out)
        total = state.sum * rescale
        for partition in loaded:
            weight = jnp.exp2(partition.max - new_max)
            total = total + partition.sum * weight
            weights = lax.broadcast_in_dim(weight, out[0].shape, [1])
            out = tuple(piece + new * weights for piece, new in zip(out, partition.out, strict=True))
        return Softmax(out, new_max, total)

    return lax.fori_loop(0, pl.cdiv(count, jnp.int32(at_a_time)), merge, softmax.nothing(p))


def paged_attention(
    arrays: Arrays,
    options: Options,
    *,
    partitioning: Partitioning | None = None,
    query_starts: jax.Array | None = None,
    shared: SharedPlan | None = None,
    config: tuning.TuningConfig | None = None,
    num_programs: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. `ops` has checked the arguments.

    query_starts: [num_rows] int32 where rows have several new tokens, the position of the first; q is then
        [num_rows * query_len, num_q_heads, head_dim], row by row.
    shared: by `shared_plan` of the same rows, partitioning and query_starts; None: it is made for this call.
    num_programs: how many programs share the units of work; by default what fills the GPU, and one in the
        interpreter. Results do not depend on it.
    interpret: bool or plgpu.InterpretGPUParams.

    Returns: as q, [num_rows * query_len, num_q_heads, head_dim].
    """
    num_rows = arrays.seq_lens.shape[0]
    query_len = arrays.q.shape[0] // num_rows
    config = config or tuning.config_for(arrays, options, query_len)
    p = program.make_problem(arrays, options, config, query_len, is_interpreted=bool(interpret))
    capacity = arrays.block_tables.shape[1] * p.block_size
    plan_sizes = PlanSizes(
        *(num_rows, query_len, p.num_kv_heads, p.group_size, capacity, p.sliding_window, p.attention_chunk),
        has_table_rows=p.has_table_rows,
    )
    shared = shared or shared_plan(plan_sizes, arrays.seq_lens, query_starts, arrays.table_rows, partitioning)
    if shared.sizes != plan_sizes:
        raise ValueError(f"plan must be made for {plan_sizes}, not for {shared.sizes}")
    work = shared.plan
    max_items = work.items.shape[0]
    if interpret:
        num_programs = num_programs or 1
    num_programs = min(num_programs or tuning.num_cores() * config.ctas_per_core, max_items * p.num_kv_heads)
    sizes = num_rows, max_items, num_programs
    run = common.kernel_of(_kernel_of, p, sizes, interpret=interpret)
    return run(arrays._replace(table_rows=None), work, common.extras_of(options))


def _kernel_of(p: program.Problem, sizes: tuple[int, int, int], interpret: Any) -> Callable[..., jax.Array]:
    """Return a function (arrays, plan, extras) -> output, for (rows, partitions at most, programs)."""
    num_rows, max_items, num_programs = sizes
    partials = None
    if max_items > num_rows:
        partials = Partials(
            jax.ShapeDtypeStruct(
                (max_items, p.num_kv_heads, len(p.pieces) * p.piece_rows, p.num_columns), jnp.float32
            ),
            jax.ShapeDtypeStruct((max_items, p.num_kv_heads, 2, p.num_columns), jnp.float32),
        )

    def paged_attention_kernel(*refs: Any) -> None:
        is_last = arrival_counter.is_last_in_turn if interpret else arrival_counter.is_last
        _kernel(*refs, problem=p, num_programs=num_programs, is_last=is_last)

    shape = (num_rows * p.query_len, p.num_kv_heads * p.group_size, p.head_dim)
    kernel = plgpu.kernel(
        paged_attention_kernel,
        out_type=(jax.ShapeDtypeStruct(shape, p.dtype), partials),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM((len(p.pieces), p.num_columns, p.piece_rows), p.dtype),
            plgpu.SMEM((1,), jnp.int32),
            cp_async.memory_of(program.scratch_types(p)),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=common.interpret_params(interpret),
    )

    def run(arrays: Arrays, work: WorkList, extras: common.Extras) -> jax.Array:
        counters = None
        if partials is not None:
            counters = jax.new_ref(jnp.zeros((num_rows * p.num_kv_heads, 1), jnp.int32))
        out, _ = kernel(arrays, work, extras, counters)
        return out

    return run
