"""Servers to ask, ours and peers', each on a free port until it is asked to end."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

SECONDS_TO_START = 600


@contextlib.contextmanager
def ours(*options: str, model: str = "smollm2") -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start our server on a free port; yield its URL and its process; ask it to end at the end."""
    command = [sys.executable, "-m", "jaxpaged", "serve", "--model", model, "--port", "0"]
    command += ["--log-level", "error", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r" at (\S+)/v1", server.stdout.readline())
            if found is None:
                sys.exit("the server did not start")
            yield found[1], server
        finally:
            server.terminate()


@contextlib.contextmanager
def vllm(python: str, model: str, dtype: str, *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start vLLM's server for the CPU, likewise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", dtype, "--no-enable-log-requests", *options]
    cores = sorted(os.sched_getaffinity(0))[:2]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(command, env=environment, stdout=sys.stderr, text=True) as server:
        try:
            _wait_for(url + "/health", server)
            yield url, server
        finally:
            server.terminate()


def _wait_for(url: str, server: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(1)
    sys.exit(f"{url} did not answer")
