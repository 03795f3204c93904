"""vLLM's own allocators against the oracle of their generation, from their Python files alone.

    python examples/verify_vllm.py FOLDER KIND vllm.v1.core.block_pool:BlockPool

FOLDER is where `vllm/` lies, installed for any Python or unpacked from its source distribution; KIND is that
of `jaxpaged verify allocator --as`. Of vLLM only the modules named in `REAL` are run: everything else that
they import, PyTorch too, is a stand-in. Where vLLM is installed beside us, `jaxpaged verify allocator` will
do.
"""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

from jaxpaged import cli

REAL = {
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_utils",
    "vllm.core.block_manager_v1",
    "vllm.core.block_manager_v2",
    "vllm.core.interfaces",
    "vllm.core.evictor_v1",
    "vllm.core.evictor_v2",
    "vllm.core.block.block_table",
    "vllm.core.block.common",
    "vllm.core.block.cpu_gpu_block_allocator",
    "vllm.core.block.interfaces",
    "vllm.core.block.naive_block",
    "vllm.core.block.prefix_caching_block",
    "vllm.core.block.utils",
    "vllm.block",
}
# What they use of other modules of vLLM's.
HELPERS: dict[str, object] = {
    "Device": enum.Enum("Device", "GPU CPU"),
    "SequenceStatus": enum.Enum("SequenceStatus", "WAITING RUNNING SWAPPED"),
    "cdiv": lambda a, b: -(-a // b),
    "chunk_list": lambda items, size: [items[i : i + size] for i in range(0, len(items), size)],
}


class StandIn(types.ModuleType):
    """Has whatever is asked of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in HELPERS:
            found = HELPERS[name]
        else:
            found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REAL:
            file = self.folder / f"{fullname.replace('.', '/')}.py"
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname.split(".")[0] in ("vllm", "torch"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "__main__":
    folder, kind, path = sys.argv[1:]
    sys.meta_path.insert(0, Finder(Path(folder)))
    sys.exit(cli.main(["verify", "allocator", path, "--as", kind]))
