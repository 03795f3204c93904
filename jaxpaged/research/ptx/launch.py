"""Launches: a compiled kernel with its buffers, and what it must compute; and their files.

A file is NumPy's .npz with a description in JSON. Arrays that several launches share are there once.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.research.ptx import program
from jaxpaged.research.ptx.counts import Counts
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.machine import Machine
from jaxpaged.research.ptx.memory import Memory
from jaxpaged.research.ptx.registers import Array
from jaxpaged.research.ptx.tensor_maps import TensorMap

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A kernel's array. One that is only written has no content. One that the kernel changes and leaves as
    it was is `is_restored`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Array | None  # its bytes
    is_restored: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    """A compiled kernel and its arguments.

    parameters: a buffer's number for each parameter, or "maps".
    wanted: an array like the buffer `result`, NaN where anything is right; allowed: the error everywhere.
    is_summed: the buffer's first axis is summed before it is compared.
    """

    name: str
    target: str
    ptx: str
    grid: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[int | str, ...]
    maps: tuple[dict[str, Any], ...]
    buffers: tuple[Buffer, ...]
    result: int
    wanted: Array
    allowed: Array
    is_summed: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run: the largest error as a share of the allowed one, races, and counts."""

    share: float
    error: float
    races: list[str]
    counts: Counts
    result: Array

    @property
    def is_right(self) -> bool:
        return self.share <= 1 and not self.races


def dtype_of(name: str) -> Any:
    """Return a type by its name, also those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def run(launch: Launch, *, seed: int = 0, ptx: str | None = None, **options: Any) -> Outcome:
    """Run a launch on the machine, and compare. Raises Fault for what PTX forbids.

    ptx: another text for the kernel, with a fault in it. options: `Machine`'s.
    """
    memory = Memory()
    addresses = []
    for n, buffer in enumerate(launch.buffers):
        content, is_read = buffer.content, buffer.content is not None
        if content is None:
            content = np.zeros(int(np.prod(buffer.shape)) * dtype_of(buffer.dtype).itemsize, np.uint8)
        is_writable = not is_read or buffer.is_restored
        name = f"{n}: {buffer.name}"
        addresses.append(memory.add(name, content, is_writable=is_writable, is_written=is_read))
    maps = [
        TensorMap(
            base=addresses[each["buffer"]],
            element=each["element"],
            sizes=tuple(each["sizes"]),
            strides=tuple(each["strides"]),
            box=tuple(each["box"]),
            swizzle=each["swizzle"],
        )
        for each in launch.maps
    ]
    arguments = [maps if which == "maps" else addresses[int(which)] for which in launch.parameters]
    machine = Machine(
        program.parse(launch.ptx if ptx is None else ptx),
        memory,
        arguments,
        grid=launch.grid,
        shared_bytes=launch.shared_bytes,
        seed=seed,
        **options,
    )
    try:
        counts = machine.run()
    except Fault as fault:
        text = f"{machine.program.code[machine.at]}" if machine.program.code else ""
        raise Fault(f"{launch.name} on {launch.target}, at {text!r}: {fault}") from fault
    for n, buffer in enumerate(launch.buffers):
        if buffer.is_restored and memory.buffers[n].data.tobytes() != np.asarray(buffer.content).tobytes():
            raise Fault(f"{buffer.name} is not as it was before")
    buffer = launch.buffers[launch.result]
    result = memory.array(f"{launch.result}: {buffer.name}", dtype_of(buffer.dtype), buffer.shape)
    result = result.astype(np.float64)
    result = result.sum(0) if launch.is_summed else result
    is_compared = ~np.isnan(launch.wanted)
    error = np.abs(np.where(is_compared, result - launch.wanted, 0))
    error[np.isnan(error)] = np.inf
    share = np.divide(error, launch.allowed, out=np.where(error > 0, np.inf, 0), where=launch.allowed > 0)
    return Outcome(float(share.max()), float(error.max()), machine.described_races(), counts, result)


def save(path: str | Path, launches: Sequence[Launch]) -> None:
    """Write the recorded launches of kernels to a file."""
    arrays: dict[str, Array] = {}

    def kept(array: Array | None) -> str | None:
        if array is None:
            return None
        data = np.ascontiguousarray(array)
        key = f"a{hashlib.sha256(data.tobytes() + str(data.dtype).encode()).hexdigest()[:16]}"
        arrays[key] = data
        return key

    described = []
    for launch in launches:
        one = {f.name: getattr(launch, f.name) for f in dataclasses.fields(launch)}
        one["ptx"] = kept(np.frombuffer(launch.ptx.encode(), np.uint8))
        one["wanted"], one["allowed"] = kept(launch.wanted), kept(launch.allowed)
        one["buffers"] = [
            {f.name: getattr(b, f.name) for f in dataclasses.fields(b)} | {"content": kept(b.content)}
            for b in launch.buffers
        ]
        described.append(one)
    text = json.dumps({"format": FORMAT, "launches": described}).encode()
    np.savez_compressed(path, description=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]


def load(path: str | Path) -> list[Launch]:
    """Read the launches of a file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    described = json.loads(arrays.pop("description").tobytes())
    if described["format"] != FORMAT:
        raise ValueError(f"{path}: format={described['format']} must be {FORMAT}")
    launches = []
    for one in described["launches"]:
        buffers = [
            Buffer(**each | {"shape": tuple(each["shape"]), "content": arrays.get(each["content"])})
            for each in one["buffers"]
        ]
        one |= {name: tuple(one[name]) for name in ("grid", "parameters", "maps")}
        one |= {name: arrays[one[name]] for name in ("wanted", "allowed")}
        one |= {"buffers": tuple(buffers), "ptx": arrays[one["ptx"]].tobytes().decode()}
        launches.append(Launch(**one))
    return launches
