"""Host functions of Mosaic GPU kernels, read from the dump of its passes: how a kernel is launched.

With MOSAIC_GPU_DUMP_TO set, Mosaic writes the module after each pass. The last that still has its launch
says which buffer each parameter is, how many blocks there are, and what is in the tensor maps.
"""

import dataclasses
import re

from jaxpaged.research.ptx.faults import Fault


@dataclasses.dataclass
class Call:
    """A kernel launch as the host function makes it. Maps are arguments of `TensorMap`, with a buffer for the
    base.
    """

    parameters: list[int | str]  # a buffer's number, or "maps"
    maps: list[dict[str, object]]
    grid: tuple[int, int, int]
    shared_bytes: int


def read(passes: str) -> Call:
    """Read the launch of the one kernel in a dump."""
    end = passes.rindex("gpu.launch_func <")
    text = passes[passes.rindex("func.func @", 0, end) : passes.index("\n", end)]
    values = _constants(text)
    base = re.search(r"func\.func @\w+\(%\w+: !llvm\.ptr[^,]*, (%\w+): !llvm\.ptr", text)
    if base is None:
        raise Fault("the host function must take a pointer to its buffers")
    pointers = {
        name: int(number)
        for name, number in re.findall(
            rf"(%\w+) = llvm\.getelementptr (?:inbounds )?{base.group(1)}\[(\d+)\]", text
        )
    }
    loads: dict[str, int | str] = {
        name: pointers[pointer]
        for name, pointer in re.findall(r"(%\w+) = llvm\.load (%\w+) ", text)
        if pointer in pointers
    }
    loads |= dict.fromkeys(re.findall(rf"(%\w+) = llvm\.load {base.group(1)} ", text), 0)
    launch = text[text.rindex("gpu.launch_func <") :]
    blocks = re.search(r"blocks in \((%\w+), (%\w+), (%\w+)\)", launch)
    shared = re.search(r"dynamic_shared_memory_size (%\w+)", launch)
    if blocks is None or "clusters in" in launch:
        raise Fault("no launch: it must have blocks, and no clusters")
    x, y, z = (values[name] for name in blocks.groups())
    names = re.findall(r"(%\w+) : ", launch[launch.index("args(") :])
    return Call(
        [loads.get(name, "maps") for name in names],
        _tensor_maps(text, values),
        (x, y, z),
        values[shared.group(1)] if shared else 0,
    )


def _constants(text: str) -> dict[str, int]:
    pairs = re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : (?:i\d+|index)\)", text)
    values = {name: int(number) for name, number in pairs}
    for name, source in re.findall(
        r"(%\w+) = builtin\.unrealized_conversion_cast (%\w+) : i\d+ to index", text
    ):
        if source in values:
            values[name] = values[source]
    for name, source in re.findall(r"(%\w+) = llvm\.(?:trunc|sext|zext) (%\w+) : i\d+ to i\d+", text):
        if source in values:
            values[name] = values[source]
    return values


def _tensor_maps(text: str, values: dict[str, int]) -> list[dict[str, object]]:
    arrays: dict[str, dict[int, int]] = {}
    for value, array, at in re.findall(r"memref\.store (%\w+), (%\w+)\[(%\w+)\]", text):
        arrays.setdefault(array, {})[values[at]] = values[value]
    made = dict(re.findall(r"^\s*(%\w+) = ([^\n]*)", text, re.MULTILINE))

    def source(name: str) -> str:
        """Follow first operands to an array of this function, or to the line of a kernel's buffer."""
        while name not in arrays:
            line = made[name]
            if "from_kernel_arg_idx" in line:
                return line
            if "memref.reinterpret_cast" in line and "offset: [0]" not in line:
                raise Fault(f"a tensor map must begin at its buffer: {line}")
            first = re.search(r"%\w+", line)
            assert first is not None
            name = first.group()
        return name

    maps: list[dict[str, object]] = []
    for call in re.findall(r"call @mosaic_gpu_init_tma_desc\(([^)]*)\)", text):
        _, base, _, rank, sizes, strides, swizzle, box = (name.strip() for name in call.split(","))
        lists = [
            tuple(arrays[source(name)][n] for n in range(values[rank])) for name in (sizes, strides, box)
        ]
        line = source(base)
        bits = re.search(r"memref<[\dx]*[a-z]+(\d+)", line)
        number = re.search(r"from_kernel_arg_idx = (\d+)", line)
        assert bits is not None
        assert number is not None
        maps.append(
            {
                "buffer": int(number.group(1)),
                "element": max(1, int(bits.group(1)) // 8),
                **dict(zip(("sizes", "strides", "box"), lists, strict=True)),
                "swizzle": values[swizzle],
            }
        )
    return maps
