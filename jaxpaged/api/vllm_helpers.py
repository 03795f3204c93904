"""Helpers that vLLM's scripts import beside the engine; `jaxpaged.compat` says at which paths.

They stand for themselves: a script that takes them from vLLM does the same with these.
"""

import dataclasses
import enum
import gc
import logging
import os
import resource
import socket
import sys
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError
from jaxpaged.vllm_names.table import KV_TRANSFER, POOLER, PROFILER

# A block's hash in events of the prefix cache.
ExternalBlockHash = bytes | int


def init_logger(name: str) -> logging.Logger:
    """Return Python's logger of a name."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def get_ip() -> str:
    """Return the variable VLLM_HOST_IP, or the address by which this machine sends; else the loopback's."""
    if host := os.environ.get("VLLM_HOST_IP"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; to connect sends nothing by UDP
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """Return a port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def get_open_ports_list(count: int = 5) -> list[int]:
    """Return different ports that are free now."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the process's soft limit of open files, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect what Python no longer reaches, engines included, and end Ray's client if asked to."""
    if shutdown_ray and "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    gc.collect()


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first four numbers of a vector, and its length."""
    first = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{first}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


def load_chat_template(
    chat_template: str | os.PathLike[str] | None, *, is_literal: bool = False
) -> str | None:
    """Return the text of a template's file, or a text that is a template itself."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).read_text()
    except OSError as error:
        if isinstance(chat_template, str) and any(mark in chat_template for mark in "{}\n"):
            return chat_template
        raise InputError(f"chat_template={str(chat_template)!r} must be a file or a template") from error


class _Platform:
    """The device that JAX computes on, by the questions of vLLM's scripts."""

    @property
    def device_type(self) -> str:
        """Return "cuda" or "cpu", as vLLM names them."""
        return {"gpu": "cuda"}.get(self._backend, self._backend)

    @property
    def device_name(self) -> str:
        """Return the device's type: vLLM has the same word for both."""
        return self.device_type

    @property
    def _backend(self) -> str:
        import jax

        return jax.default_backend()

    def is_cuda(self) -> bool:
        """Return whether JAX computes on an NVIDIA GPU."""
        return self._backend == "gpu"

    def is_cuda_alike(self) -> bool:
        """Return whether JAX computes on an NVIDIA GPU: there are no others here."""
        return self.is_cuda()

    def is_cpu(self) -> bool:
        """Return whether JAX computes on the CPU."""
        return self._backend == "cpu"

    def is_tpu(self) -> bool:
        """Return whether JAX computes on a TPU."""
        return self._backend == "tpu"

    def is_rocm(self) -> bool:
        """Return False: ROCm is not served."""
        return False

    def is_xpu(self) -> bool:
        """Return False: XPUs are not served."""
        return False

    def device_count(self) -> int:
        """Return how many devices JAX sees."""
        import jax

        return jax.device_count()

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the driver's name of a device."""
        import jax

        return str(jax.devices()[device_id].device_kind)


current_platform = _Platform()


class UsageContext(enum.StrEnum):
    """Place where an engine is used, in vLLM's words. It changes nothing: nothing is reported to anybody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def _of_keys(name: str, keys: Iterable[str], doc: str) -> type:
    """Return a dataclass of an option's keys, each None unless it is given: the engine judges them."""
    fields = [(key, Any, dataclasses.field(default=None)) for key in keys]
    made = dataclasses.make_dataclass(name, fields, kw_only=True, module=__name__)
    made.__doc__ = doc
    return made


ProfilerConfig = _of_keys(
    "ProfilerConfig",
    PROFILER,
    "A value of `profiler_config=`: `torch_profiler_dir` is where `LLM.start_profile` writes JAX's traces.",
)
PoolerConfig = _of_keys(
    "PoolerConfig",
    POOLER,
    "A value of `pooler_config=`: how a pooling model makes vectors. None: as the model's files say.",
)
KVTransferConfig = _of_keys(
    "KVTransferConfig",
    KV_TRANSFER,
    """A value of `kv_transfer_config=`: a tier of blocks by the name of vLLM's connector.

    `OffloadingConnector` with `cpu_bytes_to_use` among `kv_connector_extra_config` is host memory;
    `ExampleConnector` with `shared_storage_path` is a directory. The engine refuses other connectors.
    """,
)
