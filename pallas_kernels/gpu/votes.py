"""Votes of a warp's threads, by which it skips work that none of its rows needs."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

# A thread has a row, as a lane of tensor memory. JAX 0.11 cannot store such rows to shared memory: there four
# threads share eight.
ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE if hasattr(plgpu, "store") else plgpu.Layout.TCGEN05
VOTE = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }"


def any_in_warp(rows: jax.Array, *, is_interpreted: bool) -> jax.Array:
    """Return whether any of a warp's rows is true: a number that the warps of a warpgroup differ in.

    What it decides may have no barrier of the warpgroup. Pallas' interpreter takes a warpgroup for one
    thread, and has the vote of all.

    rows: [rows] bool, as `ROWS` has rows.
    """
    values = jnp.where(rows, jnp.int32(1), jnp.int32(0))
    if is_interpreted:
        return jnp.max(values) > 0
    layout = ROWS.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_: Any, values: Any) -> Any:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import arith, llvm, vector

        registers = values.registers.flat
        if isinstance(values.registers.item(0).type, ir.VectorType):
            registers = [vector.extract(register, [], [0]) for register in registers]
        any_of_thread = functools.reduce(arith.ori, registers)
        word = any_of_thread.type
        voted = llvm.inline_asm(word, [any_of_thread], VOTE, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(voted, (), is_signed=True)

    any_there: jax.Array = vote(values) > 0
    return any_there
