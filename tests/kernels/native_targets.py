"""The native kernels as XLA calls them, and in a program of their own for each target."""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native, ops
from pallas_kernels.layouts import TOKEN_MAJOR, Pool, Sizes
from pallas_kernels.native import attention, library
from pallas_kernels.quantised import Quantised
from tests.marks import slow_and_nightly
from tests.once import one_at_a_time

DRIVER = Path(__file__).parent / "native_driver.cc"
CACHE = Path(__file__).parents[2] / ".pytest_cache"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = "qemu-aarch64", "qemu-aarch64-static"
# Compiling a driver takes 10 to 25 seconds. Every run has the kernels as XLA calls them. Slow tests have a
# driver of this processor's fastest target, too, which fails at memory behind an array, and that of AVX2.
SLOW = [*library.targets()[:1], "avx2"]
EACH = slow_and_nightly(library.TARGETS, [name for name in library.TARGETS if name in SLOW])


class Kernels(Protocol):
    def product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray: ...
    def quantised_product(self, x: np.ndarray, weight: Quantised) -> np.ndarray: ...
    def add_low_rank(self, y: np.ndarray, *arrays: np.ndarray | int | tuple[int, ...]) -> np.ndarray: ...
    def attend(self, *arrays: np.ndarray, scale: float, **options: Any) -> np.ndarray: ...
    def attend_to(
        self, q: np.ndarray, pool: Pool, *arrays: np.ndarray, scale: float, **options: Any
    ) -> np.ndarray: ...


class Called:
    """The kernels as XLA calls them, compiled for this processor."""

    def product(self, x, weight):
        return np.asarray(native.product(jnp.asarray(x), native.pack(jnp.asarray(weight)), len(weight)))

    def quantised_product(self, x, weight):
        return np.asarray(native.quantised_product(jnp.asarray(x), weight))

    def add_low_rank(self, y, x, a, b, choices, layer, widths):
        native.serves(x.dtype, "low_rank")
        y, x, a, b, choices = map(jnp.asarray, (y, x, a, b, choices))
        return np.asarray(native.add_low_rank(y, x, a, b, choices, layer, widths))

    def attend(self, *arrays, scale, window=None, chunk=None, **biases):
        options = {"sliding_window": window, "attention_chunk": chunk, **biases}
        arrays = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays)
        return np.asarray(ops.tiled_paged_attention(*arrays, scale=scale, implementation="native", **options))

    def attend_to(self, q, pool, *arrays, **options):
        return self.attend(q, pool, None, *(x.astype(np.int32) for x in arrays), **options)


class Driven:
    """The kernels in `native_driver.cc`, compiled for some target. It fails if memory behind an array is
    touched.
    """

    def __init__(self, program: list[str]) -> None:
        self.program = program

    def product(self, x, weight):
        packed = np.asarray(native.pack(jnp.asarray(weight)))
        steps, values = packed.shape[1], packed.shape[3]
        x = np.pad(x, ((0, 0), (0, steps * values - x.shape[1])))
        y = self._run("product", x.dtype, x.dtype, [len(x), steps, len(weight)], [x, packed])
        return np.frombuffer(y, np.float32).reshape(len(x), len(weight))

    def quantised_product(self, x, weight):
        scales = weight.scales
        minima = np.zeros(0, scales.dtype) if weight.minima is None else weight.minima
        sizes = [
            len(x),
            weight.codes.shape[1],
            scales.shape[1],
            weight.out_features,
            weight.bits,
            minima.size > 0,
            weight.is_float,
        ]
        arrays = [x, weight.codes, scales, minima]
        y = self._run("quantised_product", x.dtype, scales.dtype, map(int, sizes), arrays)
        return np.frombuffer(y, np.float32).reshape(len(x), weight.out_features)

    def add_low_rank(self, y, x, a, b, choices, layer, widths):
        sizes = [len(x), x.shape[1], b.shape[3], y.shape[1], a.shape[1], *widths]
        y = self._run("low_rank", x.dtype, x.dtype, sizes, [y, x, a[layer], b[layer], choices])
        return np.frombuffer(y, np.float32).reshape(len(x), sum(widths))

    def attend(self, q, k, v, tables, starts, lens, **options):
        pool = Pool({"k": k, "v": v}, TOKEN_MAJOR, Sizes(*k.shape))
        return self.attend_to(q, pool, tables, starts, lens, **options)

    def attend_to(
        self, q, pool, tables, starts, lens, *, scale, window=None, chunk=None,
        soft_cap=0, alibi_slopes=(), sinks=(),
    ):  # fmt: skip
        at = [*(x.astype(np.int32) for x in (tables, starts, lens))]
        at += [np.asarray(x, np.float32) for x in (scale, soft_cap, alibi_slopes, sinks)]
        of_rows = [chunk or 2**31 - 1, len(alibi_slopes), len(sinks)]
        if pool.layout.packed_view():
            arrays, (num_heads, block_size, *steps) = attention.packed_operands(pool)
            sizes = [*q.shape, num_heads, block_size, tables.shape[1], window or 2**31 - 1]
            sizes += [pool.sizes.num_blocks, *steps, *of_rows]
            out = self._run("attention", q.dtype, arrays[0].dtype, sizes, [q, *map(np.asarray, arrays), *at])
            return np.frombuffer(out, q.dtype).reshape(q.shape)
        k, v, k_scales, v_scales, places = attention.operands(pool)
        k, v, k_scales, v_scales = map(np.asarray, (k, v, k_scales, v_scales))
        num_heads, block_size, _, v_first, *steps, _, v_scale_first, a, b, c, _ = places
        if v_scale_first:  # both in one array: the program takes two
            v_scales = v_scales.reshape(-1)[v_scale_first:]
            k_scales = k_scales.reshape(-1)[: len(v_scales)]
        sizes = [*q.shape, num_heads, block_size, tables.shape[1], k.nbytes, window or 2**31 - 1]
        sizes += [v_first, *steps, k_scales.size, a, b, c, *of_rows]
        caches = [k] if v_first else [k, v]
        numbers = attention.numbers_of(pool.layout, q.dtype)
        out = self._run("attention", q.dtype, numbers, sizes, [q, *caches, k_scales, v_scales, *at])
        return np.frombuffer(out, q.dtype).reshape(q.shape)

    def _run(self, function, dtype, cache_dtype, sizes, arrays) -> bytes:
        command = [*self.program, function, dtype.name, cache_dtype.name, *map(str, sizes)]
        data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


def kernels(target: str) -> Kernels:
    """Return the kernels for a target, or as XLA calls them. Skip the test where this machine has none."""
    if target == "xla":
        if why := why_not("float32"):
            pytest.skip(f"no native kernels: {why}")
        return Called()
    if target in library.targets():
        compiler, emulator = library.find_compiler(), []
        missing = compiler is None and "C++ compiler"
    elif target == "neon":
        compiler, emulator = CROSS_COMPILER, [tool for tool in EMULATORS if shutil.which(tool)][:1]
        missing = CROSS_COMPILER if shutil.which(CROSS_COMPILER) is None else not emulator and EMULATORS[0]
    else:
        pytest.skip(f"no native kernels: this {platform.machine()} lacks {library.TARGETS[target].words}")
    if missing:
        pytest.skip(f"no native kernels: there is no {missing}")
    return Driven([*emulator, _driver(target, compiler)])


def why_not(dtype: str) -> str | None:
    """Return `native.why_not`, one process at a time, so that only one of them compiles."""
    with one_at_a_time(CACHE / "native.lock"):
        return native.why_not(jnp.dtype(dtype))


def _driver(target: str, compiler: str) -> str:
    """Return the driver, compiled unless it has been before."""
    sources = [DRIVER, *library.SOURCES.glob("*.h")]
    command = library.compile_command(library.TARGETS[target], compiler)
    command += ["-static", "-I", str(library.SOURCES), str(DRIVER)]
    key = hashlib.sha256("\0".join([*command, *(file.read_text() for file in sources)]).encode()).hexdigest()
    program = CACHE / f"native-{target}-{key[:16]}"
    with one_at_a_time(CACHE / "native.lock"):
        if not program.exists():
            subprocess.run([*command, "-o", f"{program}.new"], check=True)
            os.replace(f"{program}.new", program)
    return str(program)
