"""Small kernels in PTX by hand, run on the machine."""

import dataclasses
from typing import Any

import numpy as np

from jaxpaged.research.ptx import program
from jaxpaged.research.ptx.machine import Machine
from jaxpaged.research.ptx.memory import Memory
from jaxpaged.research.ptx.tensor_maps import TensorMap

HEAD = """
.visible .entry small(
{parameters}
)
.maxntid {threads}, 1, 1
{{
    .reg .pred %p<20>;
    .reg .b16 %h<40>;
    .reg .b32 %r<100>;
    .reg .b64 %rd<60>;
    .shared .align 16 .b8 memory;
{loads}
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd50, %r0, 4;
{body}
    ret;
}}
"""


@dataclasses.dataclass
class Ran:
    """Results of a kernel, its races, and the machine."""

    outputs: list[Any]
    races: list[str]
    machine: Machine


def run(
    body: str,
    inputs: list[Any],
    outputs: list[tuple[tuple[int, ...], Any]],
    *,
    threads: int = 32,
    grid: int = 1,
    shared: int = 1024,
    written: bool = False,
    maps: list[dict[str, Any]] = (),  # type: ignore[assignment]
    **options: Any,
) -> Ran:
    """Run a kernel whose parameters are the addresses of arrays, in %rd0, %rd1, ...; maps' are in %rd40.

    %r0 is the thread's number, %rd50 four times that. `maps` are of input `buffer`. `written`: outputs are
    zeros that may be read.
    """
    memory = Memory()
    addresses = [memory.add(f"in{n}", array) for n, array in enumerate(inputs)]
    for n, (shape, dtype) in enumerate(outputs):
        addresses.append(memory.add(f"out{n}", np.zeros(shape, dtype), is_writable=True, is_written=written))
    names = [f"    .param .u64 p{n}" for n in range(len(addresses))]
    loads = [f"    ld.param.b64 %rd{n}, [p{n}];" for n in range(len(addresses))]
    arguments: list[Any] = [*addresses]
    if maps:
        names.append(f"    .param .align 64 .b8 maps[{128 * len(maps)}]")
        loads.append("    mov.b64 %rd40, maps;")
        arguments.append(
            [TensorMap(addresses[m["buffer"]], **{k: v for k, v in m.items() if k != "buffer"}) for m in maps]
        )
    text = HEAD.format(parameters=",\n".join(names), threads=threads, loads="\n".join(loads), body=body)
    machine = Machine(
        program.parse(text), memory, arguments, grid=(grid, 1, 1), shared_bytes=shared, **options
    )
    machine.run()
    results = [memory.array(f"out{n}", dtype, shape) for n, (shape, dtype) in enumerate(outputs)]
    return Ran(results, machine.described_races(), machine)


def words(start: int, count: int, source: int, scratch: int = 51) -> str:
    """Return loads of registers %r(start)...: word n of lane l is at 4 * (32 * n + l) of an array.

    The array is of one warp's words: its threads have the same.
    """
    lines = [
        "    mov.u32 %r99, %laneid;",
        "    mul.wide.u32 %rd52, %r99, 4;",
        f"    add.s64 %rd{scratch}, %rd{source}, %rd52;",
    ]
    lines += [f"    ld.global.b32 %r{start + n}, [%rd{scratch}+{128 * n}];" for n in range(count)]
    return "\n".join(lines)


def stored(start: int, count: int, target: int, scratch: int = 53) -> str:
    """Return stores of registers: word n of thread t at 4 * (threads * n + t) of an array, by %ntid."""
    lines = [
        "    mov.u32 %r98, %ntid.x;",
        "    mul.wide.u32 %rd54, %r98, 4;",
        f"    add.s64 %rd{scratch}, %rd{target}, %rd50;",
    ]
    for n in range(count):
        lines += [
            f"    st.global.b32 [%rd{scratch}], %r{start + n};",
            f"    add.s64 %rd{scratch}, %rd{scratch}, %rd54;",
        ]
    return "\n".join(lines)


def registers(start: int, count: int) -> str:
    """Return a list of registers in braces."""
    return "{" + ", ".join(f"%r{start + n}" for n in range(count)) + "}"
