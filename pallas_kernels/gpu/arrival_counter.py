"""A counter in the GPU's memory by which the last of several programs to arrive knows that it is the last.

Each program that computes a partition of something writes its result to memory, then arrives. The last one
may read what all the others wrote, and no program ever waits for another.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils

SCALAR = plgpu.Layout.WG_SPLAT  # a number that all threads of a warpgroup have
# The thread that is chosen ($0) adds 1 to the counter ($1), or goes back to 0 after the last ($2), and stores
# whether it was the last ($3). Behind a branch, ptxas would keep the address of shared memory in memory.
ARRIVE = """{
.reg .pred is_chosen, is_last; .reg .b32 before;
setp.ne.b32 is_chosen, $0, 0;
mov.b32 before, 0;
@is_chosen atom.acq_rel.gpu.inc.u32 before, [$1], $2;
setp.eq.b32 is_last, before, $2;
selp.b32 before, 1, 0, is_last;
@is_chosen st.shared.b32 [$3], before;
}"""


def is_last(counter: Any, flag_smem: Any, count: jax.Array, transforms: tuple[Any, ...] = ()) -> jax.Array:
    """Count a warpgroup's arrival. Return whether it is the last of `count`; then all the others' writes are
    visible.

    counter: [1] int32 in the GPU's memory, 0 before the first arrival, and 0 again after the last.
    flag_smem: shared memory of this warpgroup of any type, with these transforms. Its first 4 bytes are
        overwritten, and free again afterwards.

    A fence orders every thread's own writes, a barrier those of its warpgroup; then one thread counts for
    all. A second fence lets the last warpgroup read the others' writes.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR),
    )
    def arrive(_: Any, counter: Any, flag: Any, count: Any) -> Any:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm

        int32 = ir.IntegerType.get_signless(32)
        flag = utils.memref_ptr(flag)
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()
        last = arith.subi(count.registers.item(), utils.c(1, int32))
        is_chosen = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        chosen = arith.extui(int32, is_chosen)
        utils.inline_ptx(ARRIVE, chosen, utils.memref_ptr(counter), last, flag, has_side_effects=True)
        utils.warpgroup_barrier()
        previous = llvm.load(int32, flag)
        utils.warpgroup_barrier()
        utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        return mgpu.FragmentedArray.splat(previous, (), is_signed=True)

    return arrive(counter, flag_smem, count) == 1


def is_last_in_turn(
    counter: Any, flag_smem: Any, count: jax.Array, transforms: tuple[Any, ...] = ()
) -> jax.Array:
    """Compute `is_last` for programs that run one after another, as in Pallas' interpreter, which has no
    atomics.
    """
    before = counter[0]
    counter[0] = jnp.where(before == count - 1, 0, before + 1)
    return before == count - 1
