"""Time from a command's start to the first token, with nothing kept on disk, and with all of it.

    python -m benchmarks.start [--model smollm2] [--dtype float32] [--repeats 5] [--out FILE]

JSON lines on stdout, one for the cold starts and one for the warm ones, in seconds of the wall clock. Each is
a process of its own that does what `LLM` does and asks for one token. A cold start finds an empty folder for
what is kept (`XDG_CACHE_HOME`), but the operating system has the files read; a warm one finds what the one
before has left.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from benchmarks import record

_MODEL = flags.DEFINE_string("model", "smollm2", "What LLM takes.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Of weights and cache.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Starts of each kind.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")

# Prints a JSON line: when each part ended.
CHILD = """
import json, sys, time
laps = []
lap = lambda name: laps.append((name, time.time()))
from jaxpaged import EngineConfig, SamplingParams
from jaxpaged.engine import gpu_flags, machine
from jaxpaged.engine.setup import resolve_dtype
from jaxpaged.engine.engine import Engine
from jaxpaged.models import loading
from jaxpaged.models.load_as import LoadAs
from pallas_kernels import native
lap("imports")
config = EngineConfig(dtype=sys.argv[2])
gpu_flags.set_defaults()
native.prepare(resolve_dtype(config))
checkpoint = loading.open_checkpoint(sys.argv[1])
lap("header and tokenizer")
machine.keep_on_disk()
native.why_not(resolve_dtype(config))
lap("native kernels")
model = checkpoint.model(LoadAs(resolve_dtype(config)))
lap("weights")
engine = Engine(config, checkpoint.config, lambda load_as: model, checkpoint.tokenizer)
lap("state and program")
for delta in engine.submit([1, 2, 3], SamplingParams(max_tokens=1)):
    pass
lap("first token")
engine.close()
print(json.dumps(laps))
"""


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    context = record.context("benchmarks.start") | {"model": _MODEL.value, "dtype": _DTYPE.value}
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(_REPEATS.value):
        with tempfile.TemporaryDirectory() as folder:
            for kind in starts:
                starts[kind].append(_seconds(folder))
    for kind, laps in starts.items():
        spreads = {name: record.spread([lap[name] for lap in laps]) for name in laps[0]}
        line: dict[str, Any] = context | {"start": kind, "seconds": spreads}
        print(json.dumps(line), flush=True)
        record.append(line, _OUT.value)


def _seconds(folder: str) -> dict[str, float]:
    """Return the seconds of each part of a start, and of all of it."""
    command = [sys.executable, "-c", CHILD, _MODEL.value, _DTYPE.value]
    environment = os.environ | {"XDG_CACHE_HOME": folder}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    before = start = time.time()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds = {}
    for name, end in json.loads(done.stdout):
        seconds[name], before = end - before, end
    return seconds | {"all": before - start}


if __name__ == "__main__":
    app.run(main)
