"""The primitives that a kernel is written in: Pallas' own, or those of `cp_async` in their place.

`Primitives` is the base of each kernel's problem. What brings a tile, and what multiplies, is chosen once,
from the target (`targets`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import cp_async
from pallas_kernels.gpu.targets import Fetch, Multiply, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Primitives:
    """Instructions that bring a kernel's tiles and multiply them, with the functions that follow."""

    is_interpreted: bool
    fetch: Fetch = "tma"
    multiply: Multiply = "wgmma"

    @staticmethod
    def fields_of(target: Target) -> dict[str, Any]:
        """Return the fields `fetch` and `multiply` of kernels for a target."""
        return {"fetch": target.fetch, "multiply": target.kernel_multiply}

    @property
    def has_tma(self) -> bool:
        return self.fetch == "tma"

    @property
    def has_wgmma(self) -> bool:
        return self.multiply == "wgmma"

    @property
    def has_tensor_memory(self) -> bool:
        """Whether products add up in tensor memory."""
        return self.multiply == "tcgen05"

    def barrier(
        self,
        num_arrivals: int,
        num_barriers: int = 1,
        *,
        of_copies: bool = False,
        of_tensor_core: bool = False,
    ) -> Any:
        """Return the type of a ring's barriers.

        of_copies, of_tensor_core: whether a warp's copies arrive, or products of tcgen05, not warpgroups.
        """
        if self.has_tma:
            options = {"orders_tensor_core": True} if of_tensor_core else {}
            return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers, **options)
        threads = cp_async.WARP if of_copies else cp_async.WARPGROUP
        return cp_async.barrier(num_arrivals, num_barriers, threads=threads)

    def ready(self, types: Any, scratch: Any) -> Any:
        """Return a kernel's scratch memory, of these types, with barriers that are ready. All threads call
        it, first.
        """
        return scratch if self.has_tma else cp_async.initialise(types, scratch)

    def copier(
        self, transforms: tuple[Any, ...] = (), *, by_warp: bool = True
    ) -> Callable[[Any, Any, Any], None]:
        """Return the function (source, target, barrier) by which a warp, or a warpgroup, copies to memory so
        transformed.
        """
        if self.has_tma:
            return plgpu.copy_gmem_to_smem
        threads = cp_async.WARP if by_warp else cp_async.WARPGROUP
        return functools.partial(cp_async.copy, transforms=transforms, threads=threads)

    def copy_out(self, source: Any, target: Any, transforms: tuple[Any, ...] = ()) -> None:
        """Start to copy rows from shared memory, so transformed, to the GPU's."""
        if self.has_tma:
            plgpu.copy_smem_to_gmem(source, target)
        else:
            cp_async.store_rows(source, target, transforms=transforms)

    @property
    def wait_smem_to_gmem(self) -> Callable[..., None]:
        """Function that waits until the copies of `copy_out` have written, or at least read, their rows."""
        return plgpu.wait_smem_to_gmem if self.has_tma else lambda *_, **__: cp_async.commit()

    def waiter(self, num_slots: int, *number: jax.Array, is_refill: bool = False) -> Callable[[Any], None]:
        """Return the function that waits for the barrier of a ring's slot.

        number: summands of the number of the tile that is waited for, or is to be fetched next (is_refill).
        """
        if self.has_tma:
            return plgpu.barrier_wait
        phase = lax.div(sum(number[1:], start=number[0]), jnp.int32(num_slots)) - int(is_refill)
        return functools.partial(cp_async.wait, parity=lax.rem(phase, jnp.int32(2)))

    @property
    def barrier_arrive(self) -> Callable[[Any], None]:
        return plgpu.barrier_arrive if self.has_tma else cp_async.arrive

    @property
    def commit_smem(self) -> Callable[[], None]:
        return plgpu.commit_smem if self.has_tma else cp_async.commit

    def drain(self, free: Any, num_slots: int, done: jax.Array) -> None:
        """Wait for the last arrivals at a ring's slots. The GPU does not need it; JAX's interpreter wants
        each seen.

        free: barriers [num_slots]; done: how many tiles went through the ring.
        """
        if not (self.has_tma or self.is_interpreted):
            return
        for k in range(num_slots):

            @pl.when(done > k)
            def _see_arrival(k: int = k) -> None:
                plgpu.barrier_wait(free.at[lax.rem(done - 1 - k, jnp.int32(num_slots))])

    def fill_ring(
        self,
        free: Any,
        num_stages: int,
        num_steps: jax.Array,
        fetch: Callable[[jax.Array, jax.Array], None],
    ) -> None:
        """Fill a ring step by step: call fetch(step, slot) whenever the step's slot is free.

        free: barriers [num_stages], at which readers of a slot arrive.
        """

        def fill(i: jax.Array, _: None) -> None:
            slot = lax.rem(i, jnp.int32(num_stages))

            @pl.when(i >= num_stages)
            def _wait() -> None:
                self.waiter(num_stages, i, is_refill=True)(free.at[slot])

            fetch(i, slot)

        lax.fori_loop(0, num_steps, fill, None)
        self.drain(free, num_stages, num_steps)
