"""Import paths that no file of ours has: vLLM's, and old ones of our own. One table of each, one finder.

`from jaxpaged.v1.engine.async_llm import AsyncLLM` works because `VLLM_PATHS` says where the class is
defined. A module of vLLM's that is not served is refused in a sentence. An old path warns and leads to the
new module. The tables hold fixed names, so that no name from outside chooses a module. The finder comes last:
a file of the package always goes before it. What vLLM has at each path is in `vllm_names/names.json`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.vllm_names.judge import known_names

_API = "jaxpaged.api"
_HELPERS = "jaxpaged.api.vllm_helpers"
_OUTPUTS = "jaxpaged.api.outputs"
_POOLING_OUTPUTS = "jaxpaged.pooling.outputs"
_ENCODING = "jaxpaged.pooling.encoding"
_SERVER = "jaxpaged.api.vllm_server"
_READER = "jaxpaged.api.metrics_reader"
_PROCESSORS = "jaxpaged.contracts.host_processors"
_TEMPLATES = {"load_chat_template": _HELPERS}


def _at(location: str, *names: str) -> dict[str, str]:
    """Return where each name is defined: all at one location."""
    return dict.fromkeys(names, location)


# vLLM's modules, without the package's name: each name, and where it is defined, "module" or "module:name".
VLLM_PATHS: dict[str, dict[str, str]] = {
    "config": {
        **_at(_HELPERS, "KVTransferConfig", "PoolerConfig", "ProfilerConfig"),
        "VllmConfig": f"{_API}.llm_engine",
    },
    "config.kv_transfer": _at(_HELPERS, "KVTransferConfig"),
    "config.pooler": _at(_HELPERS, "PoolerConfig"),
    "config.profiler": _at(_HELPERS, "ProfilerConfig"),
    "distributed": _at(_HELPERS, "cleanup_dist_env_and_memory"),
    "distributed.parallel_state": _at(_HELPERS, "cleanup_dist_env_and_memory"),
    "engine.arg_utils": _at(f"{_API}.arg_utils", "AsyncEngineArgs", "EngineArgs"),
    "engine.async_llm_engine": {"AsyncLLMEngine": f"{_API}.async_llm:AsyncLLM"},
    "engine.llm_engine": _at(f"{_API}.llm_engine", "LLMEngine"),
    "engine.protocol": {"EngineClient": f"{_API}.async_llm:AsyncLLM"},
    "entrypoints.chat_utils": _TEMPLATES,
    "entrypoints.launchers.launcher": _at(_SERVER, "serve_http"),
    "entrypoints.pooling.utils": _at(
        _ENCODING, "MetadataItem", "build_metadata_items", "decode_pooling_output"
    ),
    "entrypoints.serve.utils.api_utils": _at(_SERVER, "with_cancellation"),
    "entrypoints.llm": _at(f"{_API}.llm", "LLM"),
    "envs": _at(_SERVER, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    "inputs.data": _at("jaxpaged.inputs", "PromptType", "TextPrompt", "TokensPrompt"),
    "inputs.llm": _at("jaxpaged.inputs", "PromptType", "TextPrompt", "TokensPrompt"),
    "logger": _at(_HELPERS, "init_logger"),
    "logprobs": _at(_OUTPUTS, "Logprob"),
    "outputs": {
        **_at(
            _OUTPUTS, "BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"
        ),
        **_at(_POOLING_OUTPUTS, "ClassificationOutput", "ClassificationRequestOutput", "EmbeddingOutput"),
        **_at(_POOLING_OUTPUTS, "EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput"),
        **_at(_POOLING_OUTPUTS, "ScoringOutput", "ScoringRequestOutput"),
        "RequestMetrics": "jaxpaged.engine.handle",
    },
    "platforms": _at(_HELPERS, "current_platform"),
    "pooling_params": _at(_POOLING_OUTPUTS, "PoolingParams"),
    "renderers.chat_utils": _TEMPLATES,
    "sequence": _at(_OUTPUTS, "Logprob"),
    "usage.usage_lib": _at(_HELPERS, "UsageContext"),
    "utils": {
        "FlexibleArgumentParser": f"{_API}.argument_parser",
        **_at(_HELPERS, "get_ip", "get_open_port", "random_uuid"),
    },
    "utils.argparse_utils": _at(f"{_API}.argument_parser", "FlexibleArgumentParser"),
    "utils.network_utils": _at(_HELPERS, "get_ip", "get_open_port", "get_open_ports_list"),
    "utils.print_utils": _at(_HELPERS, "print_embeddings"),
    "utils.serial_utils": _at(_ENCODING, "EMBED_DTYPES", "ENDIANNESS", "binary2tensor"),
    "utils.system_utils": _at(_HELPERS, "set_ulimit"),
    "v1.core.kv_cache_utils": _at(_HELPERS, "ExternalBlockHash"),
    "v1.engine.async_llm": _at(f"{_API}.async_llm", "AsyncLLM"),
    "v1.engine.exceptions": _at("jaxpaged.engine.handle", "EngineDeadError"),
    "v1.engine.llm_engine": _at(f"{_API}.llm_engine", "LLMEngine"),
    "v1.sample.logits_processor": {
        **_at(_PROCESSORS, "AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
        "RequestLogitsProcessor": "collections.abc:Callable",
    },
    "v1.sample.logits_processor.builtin": _at(_PROCESSORS, "process_dict_updates"),
    "v1.sample.logits_processor.interface": _at(
        _PROCESSORS, "BatchUpdate", "LogitsProcessor", "MoveDirectionality"
    ),
    "v1.metrics.reader": _at(_READER, "Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "version": {"__version__": "jaxpaged", "__version_tuple__": "jaxpaged"},
}
_MEDIA = "it is about images, sound and video, and requests are of text; use prompts of text"
_JAX = "kernels and compilation are JAX's; use attention= for a kernel (docs/research/attention.md)"
_DESCRIBED = "models are described, not written as modules; use jaxpaged.models (docs/guides/models.md)"
_COMPILED = (
    "it changes logits outside of the compiled step; use logits_processors= (docs/research/processors.md)"
)
_INSIDE = "it is the inside of vLLM's engine, here one compiled program; use LLM, AsyncLLM or LLMEngine"
# vLLM's modules that are not served, with all below them, and names of modules that are: "module" or
# "module:name". What each is, and what to take instead.
REFUSED_PATHS: dict[str, str] = {
    "ModelRegistry": _DESCRIBED,
    "initialize_ray_cluster": "replicas on Ray have a module; use jaxpaged.batch.ray",
    **_at(_MEDIA, "assets", "multimodal", "config.multimodal", "config.speech_to_text"),
    **_at(_MEDIA, "entrypoints.speech_to_text"),
    **_at(_JAX, "_aiter_ops", "_custom_ops", "_xpu_ops", "compilation", "cute_utils", "device_allocator"),
    **_at(_JAX, "env_override", "ir", "kernels", "scalar_type", "third_party", "tilelang_utils"),
    **_at(_JAX, "triton_utils", "vllm_flash_attn", "config.attention", "config.compilation", "config.kernel"),
    **_at(_JAX, "forward_context", "platforms"),
    **_at(_INSIDE, "_version", "connections", "engine", "exceptions", "logger", "logging_utils", "logprobs"),
    **_at(_INSIDE, "outputs", "pooling_params", "sampling_params", "sequence", "snapshot", "tasks", "v1"),
    **_at(_INSIDE, "version"),
    "inputs": "prompts are texts or token ids; use TextPrompt or TokensPrompt",
    "benchmarks": "measurements are other ones; use `jaxpaged bench`",
    "collect_env": "it reports vLLM's installation; use `jaxpaged info`",
    "config": "options are plain arguments; use EngineArgs(...) or LLM(...)",
    "distributed": "devices talk by XLA's own collectives; use tensor_parallel_size or data_parallel_size",
    "distributed.kv_events": "events have classes of their own; use jaxpaged.kv_events",
    "distributed.kv_transfer": "caches are handed over by bytes; use LLM.export_blocks and LLM.adopt_blocks",
    "distributed.weight_transfer": "weights are handed over as arrays or files; use LLM.update_weights",
    "entrypoints": "the server's routes are its own; use `jaxpaged serve`",
    "envs": "there are no variables that choose what vLLM does; use options of LLM(...)",
    "logits_process": _COMPILED,
    "lora": "adapters are read by the engine; use LoRARequest",
    "model_executor": _DESCRIBED,
    "model_inspection": "models are arrays; use LLM.weights",
    "models": _DESCRIBED,
    "parser": "parsers are chosen by name; use --tool-call-parser and --reasoning-parser",
    "plugins": "parts from outside are named by options; use those of docs/research/contracts.md",
    "pooling_params.LateChunkingParams": "a text has one vector; use LLM.encode with 'token_embed'",
    "profiler": "traces are JAX's; use jax.profiler",
    "ray": "replicas on Ray have a module; use jaxpaged.batch.ray",
    "reasoning": "parsers are chosen by name; use --reasoning-parser",
    "renderers": "prompts are rendered by the model's template; use LLM.chat",
    "tokenizers": "a tokenizer is transformers' own; use LLM.get_tokenizer",
    "tool_parsers": "parsers are chosen by name; use --tool-call-parser",
    "tracing": "there are no traces of requests; use /metrics of the server",
    "transformers_utils": "files are read by jaxpaged.models.loading; use LLM(...)",
    "usage": "nothing is reported to anybody; use /metrics of the server",
    "utils": "it is a helper of vLLM's own code; use one of Python's or NumPy's",
    "v1.metrics": "metrics are the server's; use /metrics, or LLM.get_metrics",
    "v1.sample": _COMPILED,
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
    """Install the finder for the module paths of all tables, after files; a second call does nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def look_up(location: str, name: str) -> Any:
    """Return the object of a name that is defined at `location`: "module", or "module:other_name"."""
    module, _, other = location.partition(":")
    return getattr(importlib.import_module(module), other or name)


def refusal(path: str) -> str | None:
    """Return why a module of vLLM's, or a name "module.name" in one, is not served; None if none is known.

    The longest entry of `REFUSED_PATHS` that holds the path decides.
    """
    known = [each for each in REFUSED_PATHS if f"{path}.".startswith(f"{each}.")]
    if not known:
        return None
    meaning, _, use = REFUSED_PATHS[max(known, key=len)].partition("; ")
    return f"vLLM's {path} is not served: {meaning}" + (f" ({use})" if use else "")


def names_of(path: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module at one of vLLM's paths, for names that it does not define.

    A name of `VLLM_PATHS` is looked up where it is defined. A name that vLLM has there and that is not served
    raises `ImportError` with a sentence; one that nobody knows raises `AttributeError`, as in any module.
    """
    names = VLLM_PATHS.get(path, {})

    def look_up_name(name: str) -> Any:
        if name in names:
            return look_up(names[name], name)
        is_variable = path == "envs" and name.startswith("VLLM_")
        if is_variable or name in known_names()["modules"].get(path, ()):
            full = f"{path}.{name}".lstrip(".")
            raise ImportError(refusal(full) or f"vLLM's {full} is not served")
        module = ".".join(filter(None, (__package__, path)))
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up_name


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of modules that only the tables have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to make the module, or None for a path that no table has.

        Raises `ModuleNotFoundError` with a sentence for a module of vLLM's that is not served.
        """
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
        if reason := refusal(below):
            raise ModuleNotFoundError(reason, name=fullname)
        return None


class _NamesLoader(importlib.abc.Loader):
    """A loader of a module of vLLM's, whose names are looked up when they are first used."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exec_module(self, module: types.ModuleType) -> None:
        module.__doc__ = "Names at vLLM's import path; `jaxpaged.compat` says where each is defined."
        module.__all__ = sorted(VLLM_PATHS.get(self.path, ()))  # type: ignore[attr-defined]
        module.__getattr__ = names_of(self.path)  # type: ignore[method-assign]


class _MovedLoader(importlib.abc.InspectLoader):
    """A loader of a module at its old path: its names are those of the new module, with a warning."""

    def __init__(self, new: str) -> None:
        self.new = new

    def exec_module(self, module: types.ModuleType) -> None:
        def look_up_name(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(self.new), name)

        try:
            importlib.import_module(self.new)
        except ModuleNotFoundError as error:
            if error.name != self.new:  # a package that the module needs is not installed
                raise
            raise ModuleNotFoundError(f"No module named {module.__name__!r}", name=module.__name__) from None
        warnings.warn(f"{module.__name__} has moved to {self.new}", DeprecationWarning, stacklevel=2)
        module.__doc__ = f"Old path of `{self.new}`."
        module.__getattr__ = look_up_name  # type: ignore[method-assign]

    def get_source(self, fullname: str) -> str:
        """Return a program for `python -m` with the old path: it runs the new module as the main one."""
        main = self.new.removesuffix(".__main__")
        return f"import runpy\nrunpy.run_module({main!r}, run_name='__main__', alter_sys=True)\n"
