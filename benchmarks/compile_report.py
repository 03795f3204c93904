"""Compile the Mosaic GPU kernels for an H200, without one, and report what they take.

    python -m benchmarks.compile_report            print the table
    python -m benchmarks.compile_report --write    and write it to benchmarks/compile_report.md
    python -m benchmarks.compile_report NAME...    one JSON line per kernel of these programs, for the tests
    python -m benchmarks.compile_report --capability=12.0 NAME...    likewise for another target
    python -m benchmarks.compile_report --targets    a table of a few programs on every target

What it needs, `cuda_compiler` says. Registers and spills are ptxas's own words, shared memory is Mosaic's.
The programs (CTAs) that share a multiprocessor follow from them: 65,536 registers in portions of 8 per
thread, 227 KiB of shared memory of which each program also takes 1 KiB, and 2,048 threads.
"""

import dataclasses
import functools
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from absl import app, flags

from benchmarks import cuda_compiler
from pallas_kernels.gpu import targets

_CAPABILITY = flags.DEFINE_string("capability", "9.0", "Compute capability to compile for.")
_TARGETS = flags.DEFINE_boolean("targets", False, "Print the table of targets.")
_WRITE = flags.DEFINE_boolean("write", False, "Write the table beside this file.")

# Seconds of processor time per program. They take one or two; layout inference that runs away takes for ever.
COMPILE_LIMIT_S = 60
SPILLS = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
TABLE = Path(__file__).with_suffix(".md")
TARGETS_TABLE = Path(__file__).with_name("compile_report_targets.md")
LAYERS = 2  # of a stack
DENSE = "bfloat16"  # weights, of which a product is told the layer
BLOCKS = "fp8"  # a scale for each 128 inputs of an output


@dataclasses.dataclass(frozen=True)
class Program:
    """One compilation: an operation at a shape."""

    version: str = "decode"  # or "v1", or "tiles" of several tokens
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    kv_layout: str = "token_major"
    alibi: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    block_sparse: bool = False
    tile_len: int = 1
    num_seqs: int = 16
    capacity: int = 8192  # tokens a row can have
    # Whose blocks the arrays have: of several the pool is a part, and rows say which table is theirs, as the
    # engine has it.
    num_layers: int = 1

    def __str__(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads}"
        options = [
            word
            for word, used in [
                ("alibi", self.alibi),
                ("window", self.sliding_window is not None),
                ("soft_cap", self.soft_cap is not None),
                ("sinks", self.sinks),
                ("block_sparse", self.block_sparse),
                (f"{self.tile_len} tokens a tile", self.tile_len > 1),
                (f"{self.num_seqs} rows of {self.capacity}", (self.num_seqs, self.capacity) != (16, 8192)),
                (self.kv_layout, self.kv_layout != "token_major"),
                (f"one of {self.num_layers} layers", self.num_layers > 1),
            ]
            if used
        ]
        cache = self.cache_dtype or self.dtype
        return " ".join(
            [self.version, f"{heads}/{self.head_dim}", f"bs{self.block_size}", self.dtype, cache, *options]
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """One compilation of a product with a quantised weight of one of GGUF's kinds, or of fp8 in blocks; or
    with a layer of a stack of weights in a dtype.
    """

    kind: str = "Q4_0"
    num_rows: int = 16
    num_outputs: int = 4096
    num_inputs: int = 4096

    def __str__(self) -> str:
        return f"product {self.num_rows} rows {self.kind} {self.num_outputs} x {self.num_inputs}"


def programs() -> list[Program | Product]:
    """Return the table's programs: the base shape, then one property changed at a time; then products."""
    products = [
        Product(kind, num_rows)
        for kind in ("Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q6_K", BLOCKS)
        for num_rows in (8, 16, 64)
    ]
    products += [Product("Q4_K", 32), Product("Q4_0", 128), Product("Q4_0", num_outputs=28672)]
    products += [Product(DENSE, num_rows) for num_rows in (8, 16, 64, 128, 256, 512)]
    products += [Product(DENSE, num_rows, num_outputs=28672) for num_rows in (16, 256)]
    products += [Product(DENSE, 256, 576, 1536), Product("float16", 16)]
    return [*attention_programs(), *products]


def attention_programs() -> list[Program]:
    """Return the programs of attention, each with its kernel."""
    found = [Program(), Program(num_seqs=256, capacity=131072), Program(num_layers=32)]
    found += [Program(head_dim=d) for d in (64, 80, 96, 112, 192, 256)]
    found += [Program(num_q_heads=8 * g) for g in (1, 3, 5, 7, 8, 16)]
    found += [Program(block_size=b) for b in (8, 32, 64, 128, 256)]
    found += [
        Program(dtype="float16"),
        *(Program(kv_layout=name) for name in ("head_major", "fused")),
        Program(cache_dtype="float8_e4m3fn"),
        Program(cache_dtype="float8_e4m3fn", block_size=8, head_dim=256, num_q_heads=128),
        Program(cache_dtype="float8_e5m2"),
        Program(cache_dtype="int8"),
        *(Program(kv_layout="int8_per_token", block_size=b) for b in (32, 128)),
        Program(kv_layout="int8_per_token", block_size=32, head_dim=256),
        *(Program(kv_layout="int4_grouped", block_size=64, head_dim=d) for d in (64, 128)),
        Program(kv_layout="int4_grouped", block_size=256),
        Program(
            kv_layout="int4_grouped",
            block_size=64,
            alibi=True,
            sliding_window=4096,
            soft_cap=50.0,
            sinks=True,
        ),
        Program(block_sparse=True),
        Program(alibi=True, sliding_window=4096, soft_cap=50.0, sinks=True),
    ]
    found += [Program("v1"), Program("v1", head_dim=256), Program("v1", cache_dtype="float8_e4m3fn")]
    # Tiles of several tokens: a few, which the kernel for decode steps takes, and prompts.
    found += [Program("tiles", tile_len=n) for n in (2, 4, 8, 16)]
    found += [Program("tiles", tile_len=8, head_dim=256), Program("tiles", tile_len=16, num_q_heads=8)]
    prompt = Program("tiles", tile_len=32)
    found += [prompt, *(dataclasses.replace(prompt, head_dim=d) for d in (64, 80, 96, 112, 192, 256))]
    found += [dataclasses.replace(prompt, num_q_heads=8 * g) for g in (1, 3, 5, 7, 8, 16)]
    found += [dataclasses.replace(prompt, block_size=b) for b in (8, 64, 256)]
    found += [
        dataclasses.replace(prompt, tile_len=16, num_q_heads=64),
        dataclasses.replace(prompt, tile_len=64),
        dataclasses.replace(prompt, dtype="float16"),
        dataclasses.replace(prompt, num_layers=32),
        *(dataclasses.replace(prompt, kv_layout=name) for name in ("head_major", "fused")),
        dataclasses.replace(prompt, sliding_window=4096),
        dataclasses.replace(prompt, head_dim=256, sliding_window=4096),
        dataclasses.replace(prompt, sliding_window=128, sinks=True, head_dim=64, num_q_heads=64),
        dataclasses.replace(prompt, alibi=True, sliding_window=4096, soft_cap=50.0, sinks=True),
    ]
    eight_bits = dataclasses.replace(prompt, cache_dtype="float8_e4m3fn")
    found += [dataclasses.replace(eight_bits, head_dim=d) for d in (64, 128, 192, 256)]
    found += [
        dataclasses.replace(eight_bits, cache_dtype="float8_e5m2"),
        dataclasses.replace(eight_bits, cache_dtype="int8"),
        dataclasses.replace(eight_bits, cache_dtype="int8", head_dim=256, block_size=8),
        *(
            dataclasses.replace(prompt, kv_layout="int8_per_token", block_size=b, head_dim=d)
            for b, d in ((32, 64), (32, 128), (128, 128), (32, 256))
        ),
        *(
            dataclasses.replace(prompt, kv_layout="int4_grouped", block_size=64, head_dim=d)
            for d in (64, 128)
        ),
        dataclasses.replace(prompt, kv_layout="int4_grouped", block_size=256),
        dataclasses.replace(prompt, kv_layout="int4_grouped", block_size=64, sliding_window=4096),
        dataclasses.replace(
            prompt,
            kv_layout="int4_grouped",
            block_size=64,
            alibi=True,
            sliding_window=4096,
            soft_cap=50.0,
            sinks=True,
        ),
        dataclasses.replace(eight_bits, sliding_window=4096),
        dataclasses.replace(eight_bits, head_dim=256, sliding_window=4096),
        dataclasses.replace(eight_bits, alibi=True, sliding_window=4096, soft_cap=50.0, sinks=True),
    ]
    # Where sequences may be longer than a part. Windows must be longer than two.
    int8, int4 = (
        dataclasses.replace(prompt, block_size=64, kv_layout=name)
        for name in ("int8_per_token", "int4_grouped")
    )
    long = [dataclasses.replace(prompt, head_dim=d) for d in (128, 64, 80, 192, 256)]
    long += [dataclasses.replace(prompt, num_q_heads=heads) for heads in (8, 24)]
    long += [dataclasses.replace(prompt, num_q_heads=8, num_kv_heads=1)]
    long += [dataclasses.replace(eight_bits, head_dim=d) for d in (64, 128, 192, 256)]
    long += [dataclasses.replace(int8, head_dim=d) for d in (128, 256)]
    long += [dataclasses.replace(int4, head_dim=d) for d in (64, 128)]
    wide = [dataclasses.replace(program, head_dim=256) for program in (prompt, eight_bits, int8)]
    long += [
        dataclasses.replace(program, alibi=True, sliding_window=32768, soft_cap=50.0, sinks=True)
        for program in (prompt, eight_bits, int4, *wide)
    ]
    long += [dataclasses.replace(prompt, sliding_window=32768)]
    return found + [dataclasses.replace(program, capacity=131072) for program in long]


@dataclasses.dataclass(frozen=True)
class Report:
    """Resources of one kernel of a program."""

    program: str
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int  # of a thread's frame
    shared_memory_bytes: int
    threads: int
    ctas_per_core: int
    temp_bytes: int
    conversions: int  # instructions that make a float of one integer of 8 or 16 bits, in the program's text
    seconds: float


def main(argv: list[str]) -> None:
    """Run as a module."""
    if names := argv[1:]:
        cuda_compiler.print_lines(map(dataclasses.asdict, _reports_here(names)))
        return
    if _TARGETS.value:
        text, table = targets_markdown(), TARGETS_TABLE
    else:
        text, table = markdown(run([str(program) for program in programs()])), TABLE
    print(text)
    if _WRITE.value:
        table.write_text(text)


def run(names: list[str], capability: str = "9.0") -> list[Report]:
    """Compile the programs of these names for a target in a process of its own, and report."""
    arguments = [f"--capability={capability}", *names]
    return [Report(**line) for line in cuda_compiler.run("benchmarks.compile_report", arguments)]


def markdown(reports: list[Report]) -> str:
    """Return the table as a page."""
    import jax

    lines = [
        "# What the kernels take on an H200",
        "",
        f"Made by `python -m benchmarks.compile_report --write` with jax {jax.__version__}: compiled for",
        "sm_90a, not run.",
        "Heads are query heads / kv heads / head_dim. CTAs: programs that fit on one multiprocessor.",
        "Temporary memory is of 16 rows of 8,192 tokens, or as said. Products are of rows in bfloat16",
        "with weights of a GGUF kind, or of fp8 in blocks of 128, outputs x inputs; or with a layer of a",
        "stack of weights in bfloat16 or float16.",
        "",
        "| program | kernel | registers | spilled bytes | shared memory, KiB | CTAs | temporary, MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in reports:
        memory, spilled = f"{r.shared_memory_bytes / 1024:.1f}", r.spill_bytes + r.stack_bytes
        lines.append(
            f"| {r.program} | {r.kernel} | {r.registers} | {spilled} | {memory} | {r.ctas_per_core} "
            f"| {r.temp_bytes / 1e6:.1f} |"
        )
    return "\n".join([*lines, ""])


def targets_programs() -> list[Program | Product]:
    """Return the programs of the table of targets."""
    prompt = Program("tiles", tile_len=32)
    attention = [
        p for one in (Program(), prompt) for p in (one, dataclasses.replace(one, cache_dtype="int8"))
    ]
    return [*attention, *(Product(kind, rows) for kind in ("Q4_0", BLOCKS, DENSE) for rows in (16, 64))]


def targets_markdown() -> str:
    """Return a page of a few programs on every target of `pallas_kernels.gpu.targets`."""
    import jax

    lines = [
        "# What the kernels take on every target",
        "",
        f"Made by `python -m benchmarks.compile_report --targets --write` with jax {jax.__version__}:",
        "compiled, not run. Columns are those of compile_report.md.",
        "",
        "| target | tiles, products | program | registers | spilled bytes | shared memory, KiB | CTAs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for target in targets.TARGETS.values():
        for r in run([str(p) for p in targets_programs()], target.capability):
            multiply = target.multiply if r.kernel.startswith("prompt") else target.kernel_multiply
            how = f"{target.fetch}, {multiply}"
            memory, spilled = f"{r.shared_memory_bytes / 1024:.1f}", r.spill_bytes + r.stack_bytes
            cells = target.architecture, how, r.program, r.registers, spilled, memory, r.ctas_per_core
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def _reports_here(names: list[str]) -> Iterator[Report]:
    wanted = [p for p in programs() if str(p) in names]
    if unknown := set(names) - {str(p) for p in wanted}:
        raise ValueError(f"{unknown=} must be among the programs: {[str(p) for p in programs()]}")
    for program in wanted:
        with tempfile.TemporaryDirectory() as folder, _time_limit(COMPILE_LIMIT_S, str(program)):
            os.environ["MOSAIC_GPU_DUMP_TO"] = folder
            start = time.perf_counter()
            compiled = compile_for_gpu(program, _CAPABILITY.value)
            seconds = time.perf_counter() - start
            temp_bytes = compiled.memory_analysis().temp_size_in_bytes
            yield from _read_dump(program, Path(folder), temp_bytes, seconds)


def compile_for_gpu(program: Program | Product, capability: str) -> Any:
    """Return the compiled executable of a program; needs the environment that `cuda_compiler.run` sets."""
    operation, arguments = _product(program) if isinstance(program, Product) else _attention(program)
    return cuda_compiler.compiled(operation, *arguments, capability=capability)


def _product(p: Product) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    from jaxpaged.models.files.gguf.blocks import FORMATS
    from jaxpaged.models.quantised.codes import CodeFormat, SegmentSpec, zeros
    from pallas_kernels import ops
    from pallas_kernels.gpu import dense_product

    if p.kind in dense_product.DTYPES:
        shapes = (p.num_rows, p.num_inputs), (LAYERS, p.num_inputs, p.num_outputs)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(p.kind)) for shape in shapes]
        operation = functools.partial(ops.product, implementation="mosaic_gpu")
        return operation, (*arrays, jax.ShapeDtypeStruct((), jnp.int32))
    blocks = CodeFormat(8, 128, "float32", has_minima=False, is_float=True)
    dtype, segment = jnp.dtype("bfloat16"), SegmentSpec((FORMATS | {BLOCKS: blocks})[p.kind], p.num_outputs)
    [weight] = jax.eval_shape(lambda: zeros([segment], p.num_inputs, dtype, "mosaic_gpu")).segments
    return ops.quantised_product, (jax.ShapeDtypeStruct((p.num_rows, p.num_inputs), dtype), weight)


def _attention(program: Program) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import layouts, ops
    from pallas_kernels.support import BlockSparse

    p, num_seqs, num_blocks = program, program.num_seqs, 1024
    kv_layout, dtype = layouts.named(p.kv_layout), jnp.dtype(p.cache_dtype or p.dtype)
    sizes = (num_blocks * p.num_layers, p.block_size, p.num_kv_heads, p.head_dim)
    pool = jax.eval_shape(lambda: layouts.create(kv_layout, *sizes, dtype))
    if p.num_layers > 1:
        blocks = jax.eval_shape(lambda: layouts.BlockSlice(jnp.int32(0), p.num_layers, num_blocks))
        pool = dataclasses.replace(pool, blocks=blocks)
    # Two arrays with scales as options, or a pool of another kind.
    is_pair = isinstance(kv_layout, layouts.Dense) and kv_layout.names == ("k", "v") and pool.blocks is None
    caches = (pool.arrays["k"], pool.arrays["v"]) if is_pair else (pool, None)
    is_tiled = p.version == "tiles" or p.num_layers > 1
    rows = (num_seqs, p.tile_len) if is_tiled else (num_seqs,)
    arrays: dict[str, Any] = {
        "q": jax.ShapeDtypeStruct((*rows, p.num_q_heads, p.head_dim), jnp.dtype(p.dtype)),
        **dict(zip(("k_cache", "v_cache"), caches, strict=True)),
        "block_tables": jax.ShapeDtypeStruct((num_seqs, p.capacity // p.block_size), jnp.int32),
        "seq_lens": jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    }
    per_head = jax.ShapeDtypeStruct((p.num_q_heads,), jnp.float32)
    arrays |= {name: per_head for name, used in (("alibi_slopes", p.alibi), ("sinks", p.sinks)) if used}
    if p.cache_dtype is not None:
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct((p.num_kv_heads,), jnp.float32))
    options: dict[str, Any] = {"sliding_window": p.sliding_window, "soft_cap": p.soft_cap}
    operation: Any = ops.tiled_paged_attention
    if is_tiled:
        options |= {"scale": p.head_dim**-0.5, "kv_layout": p.kv_layout}
        arrays["query_starts"] = arrays["seq_lens"]
        arrays |= {"table_rows": arrays["seq_lens"]} if p.num_layers > 1 else {}
    else:
        operation = ops.paged_attention if p.version == "decode" else ops.paged_attention_v1
        options |= {"kv_layout": p.kv_layout}
        options["block_sparse"] = BlockSparse(64, 16, 8, head_sliding_step=1) if p.block_sparse else None
    operation = functools.partial(operation, **options, implementation="mosaic_gpu")
    names = list(arrays)
    return lambda *args: operation(**dict(zip(names, args, strict=True))), tuple(arrays.values())


def _read_dump(program: Program | Product, folder: Path, temp_bytes: int, seconds: float) -> Iterator[Report]:
    """Return a report per kernel compiled; jax 0.12 compiles none again that it has seen in this process."""
    for file in sorted(folder.glob("*.ptxas")):
        name = re.sub(r"_\d+$", "", file.stem)
        (resources,) = folder.glob(f"{name}_*.resources.txt")
        ptxas, ptx = file.read_text(), file.with_suffix(".ptx").read_text()
        registers = int(_only(r"Used (\d+) registers", ptxas))
        # A warning before says the spills again.
        spills = sum(sum(map(int, its)) for its in re.findall(SPILLS, ptxas))
        stack = int(_only(r"(\d+) bytes stack frame", ptxas))
        memory = int(_only(r"smem_scratch_bytes=(\d+)", resources.read_text()))
        threads = int(_only(r"\.(?:reqntid|maxntid) (\d+)", ptx))
        by_registers = 65536 // (-(-registers // 8) * 8 * threads)
        target = targets.TARGETS[_CAPABILITY.value]
        by_memory = target.core_bytes // (memory + 1024)
        yield Report(
            program=str(program),
            kernel=name,
            registers=registers,
            spill_bytes=spills,
            stack_bytes=stack,
            shared_memory_bytes=memory,
            threads=threads,
            ctas_per_core=min(by_registers, by_memory, target.core_threads // threads, 32),
            temp_bytes=temp_bytes,
            conversions=len(re.findall(r"\bcvt\.rn\.f\d+\.[su](?:8|16)\b", ptx)),
            seconds=round(seconds, 2),
        )


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{pattern!r} is not in:\n{text[:2000]}")
    return found.group(1)


@contextmanager
def _time_limit(seconds: int, what: str) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"compiling {what} took more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    app.run(main)
