"""Meanings that Pallas' GPU interpreter lacks, of primitives of GPUs without wgmma or without TMA.

`rule` is that of mma; `test_mosaic_mma.py` justifies it. The primitives of `cp_async` get Pallas' own, one
for one. The phase of a barrier, which Pallas follows by itself and `cp_async` is told, is counted and
compared.
"""

import contextlib
import functools
import linecache
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import pytest
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import common, cp_async, targets
from tests.kernels.interpreter import KERNELS


def rule(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return what `mma` means: acc + a @ b, with sums in acc's type."""
    return acc + jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=acc.dtype)


def traced(name: str, default: Any) -> Any:
    """Return a local variable of the kernel's function that is being traced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return default if frame is None else frame.f_locals[name]


def barrier_here() -> str:
    """Return a name of the barrier that a line of a kernel waits for, the same each time that it is traced.

    It is the function, what it calls the barrier, and whether of K or V.
    """
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.startswith(KERNELS):
        assert frame.f_back is not None
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    [name] = re.findall(r"\)\(([\w.]+)\b(?:\.at\[.*)?\)$", line.strip())
    return f"{frame.f_code.co_name} {name} {traced('array', 0)}"


def assert_used(used: Counter[str], capability: str, *, multiply: str = "mma.sync") -> None:
    """Check that a kernel multiplied, and brought its tiles, by a target's primitives, and waited for the
    right phases.
    """
    assert bool(used["mma"]) == (multiply == "mma.sync")
    assert bool(used["copy"]) == (targets.TARGETS[capability].fetch == "cp.async")
    assert not used["wrong phase"]


@contextlib.contextmanager
def interpretable(capability: str) -> Iterator[Counter[str]]:
    """Make kernels traced within for a target that has no wgmma, as the interpreter can run them.

    Yield how often each primitive was traced, and "wrong phase" for each wait that was told another phase
    than its barrier's.
    """
    used: Counter[str] = Counter()
    waits: Counter[tuple[Any, ...]] = Counter()
    axes: list[str] = []  # of the grid, and that of a program's warpgroups
    kernel = plgpu.kernel

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            used[name] += 1
            return function(*args, **kwargs)

        return call

    def named_kernel(*args: Any, **kwargs: Any) -> Any:
        axes[:] = [*kwargs["grid_names"], kwargs["thread_name"]]
        return kernel(*args, **kwargs)

    def check(parity: Any, *numbers: Any, barrier: str) -> None:
        place = barrier, *map(int, numbers)
        used["wrong phase"] += int(parity) != waits[place] % 2
        waits[place] += 1

    def wait(words: Any, parity: jax.Array) -> None:
        (slot,) = words.transforms[-1].indices if hasattr(words, "transforms") else (0,)
        place = [slot, traced("warp", 0), *map(jax.lax.axis_index, axes)]
        jax.debug.callback(functools.partial(check, barrier=barrier_here()), parity, *place)
        plgpu.barrier_wait(words)

    def store_rows(source: Any, target: Any, **_: Any) -> None:
        plgpu.copy_smem_to_gmem(source, target)
        plgpu.wait_smem_to_gmem(0)

    meanings = {
        "barrier": lambda arrivals, slots=1, **_: plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots),
        "initialise": lambda _, scratch: scratch,
        "copy": lambda source, target, words, **_: plgpu.copy_gmem_to_smem(source, target, words),
        "arrive": lambda words: plgpu.barrier_arrive(words),
        "commit": lambda: plgpu.commit_smem(),
        "wait": wait,
        "store_rows": store_rows,
    }
    mlir.register_lowering(primitives.mma_p, mlir.lower_fun(rule, multiple_results=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "compiled_for", lambda: targets.TARGETS[capability])
        for name, meaning in meanings.items():
            patch.setattr(cp_async, name, counting(name, meaning))
        patch.setattr(plgpu, "mma", counting("mma", plgpu.mma))
        patch.setattr(plgpu, "wgmma", lambda *_: pytest.fail("a wgmma, where there is none"))
        patch.setattr(plgpu, "kernel", named_kernel)
        patch.setattr(common, "as_left_operand", lambda x: x)
        yield used
    jax.effects_barrier()
