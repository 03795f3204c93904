"""Import paths that no file of ours has: vLLM's, and old ones of our own. One table of each, one finder.

`from jaxpaged.v1.engine.async_llm import AsyncLLM` works because `VLLM_PATHS` says where the class is
defined. An old path warns and leads to the new module. Both tables hold fixed names, so that no name from
outside chooses a module. The finder comes last: a file of the package always goes before it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

_OUTPUTS = "jaxpaged.api.outputs"
_POOLING_OUTPUTS = "jaxpaged.pooling.outputs"
# vLLM's modules, without the package's name: each name, and where it is defined, "module" or "module:name".
VLLM_PATHS: dict[str, dict[str, str]] = {
    "engine.arg_utils": {
        "AsyncEngineArgs": "jaxpaged.api.arg_utils",
        "EngineArgs": "jaxpaged.api.arg_utils",
    },
    "engine.async_llm_engine": {"AsyncLLMEngine": "jaxpaged.api.async_llm:AsyncLLM"},
    "engine.llm_engine": {"LLMEngine": "jaxpaged.api.llm_engine"},
    "outputs": {
        "BeamSearchOutput": _OUTPUTS,
        "BeamSearchSequence": _OUTPUTS,
        "ClassificationRequestOutput": _POOLING_OUTPUTS,
        "CompletionOutput": _OUTPUTS,
        "EmbeddingRequestOutput": _POOLING_OUTPUTS,
        "Logprob": _OUTPUTS,
        "PoolingRequestOutput": _POOLING_OUTPUTS,
        "RequestMetrics": "jaxpaged.engine.handle",
        "RequestOutput": _OUTPUTS,
        "ScoringRequestOutput": _POOLING_OUTPUTS,
    },
    "utils": {"FlexibleArgumentParser": "jaxpaged.api.argument_parser"},
    "utils.argparse_utils": {"FlexibleArgumentParser": "jaxpaged.api.argument_parser"},
    "v1.engine.async_llm": {"AsyncLLM": "jaxpaged.api.async_llm"},
    "v1.engine.llm_engine": {"LLMEngine": "jaxpaged.api.llm_engine"},
}
# Old paths of modules and packages, with everything below them, and the new ones: for one more release.
OLD_PATHS: dict[str, str] = {
    "bench": "research.bench",
    "engine.async_engine": "api.async_engine",
    "engine.async_llm": "api.async_llm",
    "engine.blocks": "handover.blocks",
    "engine.llm": "api.llm",
    "engine.outputs": "api.outputs",
    "engine.transport": "handover.transport",
    "integrations": "research.integrations",
    "lab": "research.lab",
    "learn": "research.learn",
    "ray": "batch.ray",
    "replay": "research.replay",
    "verify": "research.verify",
}


def install() -> None:
    """Let Python find the paths of both tables, behind all files; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def look_up(location: str, name: str) -> Any:
    """Return the object of a name that is defined at `location`: "module", or "module:other_name"."""
    module, _, other = location.partition(":")
    return getattr(importlib.import_module(module), other or name)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of modules that only the tables have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to make the module, or None for a path that no table has."""
        top, _, below = fullname.partition(".")
        if top != __package__ or not below:
            return None
        if below in VLLM_PATHS or any(known.startswith(f"{below}.") for known in VLLM_PATHS):
            return importlib.machinery.ModuleSpec(fullname, _NamesLoader(below), is_package=True)
        for old, new in OLD_PATHS.items():
            if f"{below}.".startswith(f"{old}."):
                loader = _MovedLoader(f"{top}.{new}{below.removeprefix(old)}")
                is_package = not below.endswith("__main__")
                return importlib.machinery.ModuleSpec(fullname, loader, is_package=is_package)
        return None


class _NamesLoader(importlib.abc.Loader):
    """A loader of a module of vLLM's, whose names are looked up when they are first used."""

    def __init__(self, path: str) -> None:
        self.names = VLLM_PATHS.get(path, {})

    def exec_module(self, module: types.ModuleType) -> None:
        def look_up_name(name: str) -> Any:
            if name not in self.names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return look_up(self.names[name], name)

        module.__doc__ = "Names at vLLM's import path; `jaxpaged.compat` says where each is defined."
        module.__all__ = sorted(self.names)  # type: ignore[attr-defined]
        module.__getattr__ = look_up_name  # type: ignore[method-assign]


class _MovedLoader(importlib.abc.InspectLoader):
    """A loader of a module at its old path: its names are those of the new module, with a warning."""

    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: types.ModuleType) -> None:
        def look_up_name(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(self.new), name)

        importlib.import_module(self.new)  # so that a path that is nowhere fails here
        warnings.warn(f"{module.__name__} has moved to {self.new}", DeprecationWarning, stacklevel=2)
        module.__doc__ = f"Old path of `{self.new}`."
        module.__getattr__ = look_up_name  # type: ignore[method-assign]

    def get_source(self, fullname: str) -> str:
        """Return a program for `python -m` with the old path: it runs the new module as the main one."""
        main = self.new.removesuffix(".__main__")
        return f"import runpy\nrunpy.run_module({main!r}, run_name='__main__', alter_sys=True)\n"
