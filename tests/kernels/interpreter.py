"""Pallas' GPU interpreter, used so that mistakes in the kernels' synchronisation show.

The interpreter does not see what a wgmma reads. While a kernel is traced, `shadow_reads` gives each wgmma
reads of its shared-memory operands that the race detector sees, and each arrival the fence that ordinary
reads would need. `without_call` leaves out one synchronising call. `unfenced_wgmmas` finds the one mistake
that no run shows.
"""

import contextlib
import faulthandler
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

from pallas_kernels.gpu import arrival_counter, common, cp_async


@contextlib.contextmanager
def recorded_blocks(*cache_shapes: tuple[int, ...]) -> Iterator[set[int]]:
    """Record the blocks that copies from caches of these shapes fetch, for kernels traced within."""
    fetched: set[int] = set()
    copy = plgpu.copy_gmem_to_smem

    def recording_copy(source: Any, target: Any, barrier: Any) -> None:
        if source.ref.aval.shape in cache_shapes:
            jax.debug.callback(lambda block: fetched.add(int(block)), source.transforms[-1].indices[0])
        copy(source, target, barrier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "copy_gmem_to_smem", recording_copy)
        yield fetched
    jax.effects_barrier()


@contextlib.contextmanager
def shadow_reads() -> Iterator[None]:
    """Read every wgmma's operands once more in a way that the race detector sees, for kernels traced
    within.
    """
    wgmma, arrive = plgpu.wgmma, plgpu.barrier_arrive

    def seen_wgmma(acc: Any, a: Any, b: Any) -> None:
        for operand in (a, b):
            plgpu.load(operand, optimized=False)
        wgmma(acc, a, b)

    def seen_arrive(barrier: Any) -> None:
        plgpu.commit_smem()
        arrive(barrier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", seen_wgmma)
        patch.setattr(plgpu, "barrier_arrive", seen_arrive)
        yield


@pytest.fixture
def fresh_interpreter() -> Iterator[None]:
    """Reset the interpreter before and after a test."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


THREADS, THREADS_LIMIT_S = 16, 900


def is_run_with_more_threads(request: pytest.FixtureRequest) -> bool:
    """Run the test that asks in a process of its own, in which XLA has enough threads; False if this is it.

    XLA has a thread for each core of the machine. Where a program has more warpgroups and warps that wait for
    each other, none goes on.
    """
    if os.environ.get("NPROC") == str(THREADS):
        return False
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-m", "", request.node.nodeid]
    environment = os.environ | {"NPROC": str(THREADS)}
    done = subprocess.run(
        command,
        cwd=request.config.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=THREADS_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return True


def races_found(capsys: pytest.CaptureFixture[str]) -> bool:
    """Return whether a race was reported since the last call (JAX keeps the last kernel's verdict only)."""
    return "RACE DETECTED" in capsys.readouterr().out


WAIT_SECONDS = 400  # a case takes two


@contextlib.contextmanager
def several_programs(*, last: bool = True, ordered: bool = True) -> Iterator[None]:
    """Run programs at the same time, for kernels traced within, and tell the one that arrives last that it
    is.

    The interpreter has no atomics, and runs programs one after another, unless they are of one cluster. Here
    they are one cluster, arrivals are counted in place of the atomic, and the race detector's clocks are
    joined as its acquire and release do.

    last: False tells the first one instead.
    ordered: False lets an arrival order nothing, as if its fences were gone.

    If more threads wait for each other than XLA has, none goes on; then this process ends.
    """
    arrived: dict[int, int] = {}
    clocks: dict[int, Any] = {}
    axes: dict[str, int] = {}  # of the grid, and at the end that of a program's warpgroups
    lock, kernel = threading.Lock(), plgpu.kernel
    faulthandler.dump_traceback_later(WAIT_SECONDS, exit=True, file=sys.__stderr__)

    def arrive(index: Any, count: Any, program: Any, warpgroup: Any, _: Any) -> np.bool_:
        index, memory = int(index), gpu_callbacks._get_shared_memory()
        thread = shared_memory.Warpgroup(
            device_id=0, cluster_id=0, block_id=int(program), warpgroup_id=int(warpgroup)
        )
        with lock:
            before = arrived.get(index, 0)
            arrived[index] = (before + 1) % int(count)
            if ordered:
                own = memory.clocks[thread]
                clocks.setdefault(index, own.copy()).update(own)
                own.update(clocks[index])
        return np.bool_(before == (int(count) - 1 if last else 0))

    def is_last(counter: Any, flag_smem: Any, count: jax.Array, _: Any = ()) -> jax.Array:
        (index,) = counter.transforms[-1].indices[:1]
        *programs, warpgroup = (jax.lax.axis_index(name) for name in axes)
        program = jnp.int32(0)
        for number, size in zip(programs, axes.values(), strict=False):
            program = program * size + number
        # Reading the counter keeps the call behind the stores that come before it.
        arguments = index, count, program, warpgroup, counter[0]
        return io_callback(arrive, jax.ShapeDtypeStruct((), bool), *arguments)

    def one_cluster(*args: Any, grid: Any, grid_names: Any, **kwargs: Any) -> Any:
        axes.clear()
        axes.update(zip((*grid_names, kwargs["thread_name"]), (*grid, kwargs["num_threads"]), strict=True))
        return kernel(*args, cluster=grid, cluster_names=grid_names, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "kernel", one_cluster)
        patch.setattr(arrival_counter, "is_last_in_turn", is_last)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


SYNCHRONISING: tuple[tuple[Any, str], ...] = (
    *((plgpu, name) for name in ("barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem")),
    *((plgpu, name) for name in ("wgmma_wait", "commit_tmem", "wait_load_tmem")),
    *((cp_async, name) for name in ("wait", "arrive", "commit")),
)
KERNELS = str(Path(cp_async.__file__).parent)


@contextlib.contextmanager
def without_call(number: int, shadows: bool = True) -> Iterator[list[tuple[str, str]]]:
    """Leave out the synchronising call of that number, for kernels traced within. Yield (name, caller) of
    each call.

    A call is a line of a kernel's source: one that is traced several times counts once, and is left out each
    time. Calls by what stands for a primitive are not the kernel's.
    """
    met: list[tuple[str, str]] = []
    lines: list[tuple[str, str, int]] = []

    def dropping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            caller = frame.f_code.co_name
            if not frame.f_code.co_filename.startswith(KERNELS):
                return original(*args, **kwargs)
            if (line := (name, caller, frame.f_lineno)) not in lines:
                lines.append(line)
                met.append((name, caller))
            return None if lines.index(line) == number else original(*args, **kwargs)

        return call

    common.jitted_kernel.cache_clear()  # to be traced anew
    with pytest.MonkeyPatch.context() as patch:
        for module, name in SYNCHRONISING:
            patch.setattr(module, name, dropping(name, getattr(module, name)))
        with shadow_reads() if shadows else contextlib.nullcontext():
            if shadows:  # count an arrival where the kernel makes it, not where its shadow does
                patch.setattr(plgpu, "barrier_arrive", dropping("barrier_arrive", plgpu.barrier_arrive))
            yield met
    common.jitted_kernel.cache_clear()


def unnoticed_calls(
    run: Callable[[], None],
    deadlocks: Callable[[tuple[str, str]], bool],
    capsys: pytest.CaptureFixture[str],
    *,
    shadows: bool = True,
) -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """Return all synchronising calls of what `run` traces, runs and checks, and those whose absence shows
    nowhere.

    An error, a race or a failing check shows it. Calls without which a thread `deadlocks` are not tried.

    shadows: whether there are wgmmas, whose reads the race detector must be shown.
    """
    with without_call(-1, shadows) as calls:
        run()
    assert not races_found(capsys)
    unnoticed = set()
    for number, call in enumerate(calls):
        if deadlocks(call):
            continue
        gpu_callbacks.reset_gpu_interpret_mode_state()
        try:
            with without_call(number, shadows) as met:
                run()
            assert met[number] == call
            if not races_found(capsys):
                unnoticed.add(call)
        except (AssertionError, jax.errors.JaxRuntimeError):
            capsys.readouterr()
    return calls, unnoticed


# Missed by jax 0.11's interpreter only, and by nothing on a GPU: what `unnoticed_calls` may find or not.
OPTIONAL = {("barrier_wait", "_see_arrival")}


class Slot(NamedTuple):
    """The slot of a ring, as a function of a kernel names it."""

    full: Any  # barriers of all slots: it may be read
    free: Any  # it has been
    number: Any


def slot_of_scratch(
    *functions: str, barriers: Callable[[Any], tuple[Any, Any]] = lambda scratch: (scratch.full, scratch.free)
) -> Callable[[FrameType], Slot | None]:
    """Return a function that finds the slot of `scratch` that these functions read.

    barriers: what is full and what is free, of the scratch memory.
    """

    def slot_in(frame: FrameType) -> Slot | None:
        if frame.f_code.co_name not in functions:
            return None
        return Slot(*barriers(frame.f_locals["scratch"]), frame.f_locals["slot"])

    return slot_in


def is_race_to_release_early(
    run: Callable[[], Any], slot_in: Callable[[FrameType], Slot | None], capsys: pytest.CaptureFixture[str]
) -> bool:
    """Return whether a race is reported when a slot is handed back as soon as it is full.

    slot_in: from the frame of a kernel's function, the slot that it waits for or hands back; else None.
    """
    with shadow_reads(), pytest.MonkeyPatch.context() as patch:
        wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive

        def wait_and_release(barrier: Any) -> None:
            wait(barrier)
            if (slot := slot_in(sys._getframe(1))) and getattr(barrier, "ref", None) is slot.full:
                arrive(slot.free.at[slot.number])

        def arrive_unless_released(barrier: Any) -> None:
            slot = slot_in(sys._getframe(1))
            if not (slot and getattr(barrier, "ref", None) is slot.free):
                arrive(barrier)

        patch.setattr(plgpu, "barrier_wait", wait_and_release)
        patch.setattr(plgpu, "barrier_arrive", arrive_unless_released)
        error = ""
        try:
            run()
        except (AssertionError, jax.errors.JaxRuntimeError) as raised:
            error = str(raised)  # jax 0.12 stops at a race; jax 0.11 tells it, goes on, and may then fail
        return races_found(capsys) or "RACE DETECTED" in error


def unfenced_wgmmas(
    jaxpr: core.Jaxpr, dirty: bool = False, readers: tuple[str, ...] = ("wgmma_ref",)
) -> tuple[int, bool]:
    """Count wgmmas that may follow a store to shared memory without a commit_smem between. Also return
    whether a store is still unfenced at the end.

    readers: what else must not follow: "barrier_arrive", where another thread's wgmma reads what this one
        stored.
    """

    def is_store(equation: Any) -> bool:
        return equation.primitive.name == "swap" and "smem" in str(equation.invars[0].aval)

    return _not_parted(jaxpr, is_store, "commit_smem", readers, dirty)


def unwaited_wgmmas(jaxpr: core.Jaxpr) -> int:
    """Count arrivals, which give away what a wgmma reads, that may follow a wgmma without a wait between."""

    def is_wgmma(equation: Any) -> bool:
        return bool(equation.primitive.name == "wgmma_ref")

    return _not_parted(jaxpr, is_wgmma, "wgmma_wait", ("barrier_arrive",))[0]


def _not_parted(
    jaxpr: core.Jaxpr,
    is_first: Callable[[Any], bool],
    parting: str,
    readers: tuple[str, ...],
    dirty: bool = False,
) -> tuple[int, bool]:
    """Count readers that may follow what is first without a `parting` between. Also return whether one still
    may.
    """
    count = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if is_first(equation):
            dirty = True
        elif name == parting:
            dirty = False
        elif name in readers:
            count += dirty
        bodies = [
            getattr(body, "jaxpr", body)
            for body in jax.tree.leaves(
                equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            )
            if hasattr(getattr(body, "jaxpr", body), "eqns")
        ]
        ends = []
        for body in bodies:
            found, end = _not_parted(body, is_first, parting, readers, dirty)
            if name == "while":  # the second time round begins where the first ended
                found, end = _not_parted(body, is_first, parting, readers, dirty or end)
            count += found
            ends.append(end)
        if ends:
            dirty = any(ends)
    return count, dirty
