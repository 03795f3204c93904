"""A server's throughput and latency, by `jaxpaged bench serve`, beside peers: `python -m benchmarks.serving`.

    python -m benchmarks.serving [--concurrency 4,16,32] [--requests 64] [--dtype float32] [--rounds 2]
        [--peer vllm=PYTHON=MODEL] [--out FILE]

Ours, each peer, and `LLM.generate` without a server take turns. Each round every server is started anew,
asked a few requests that are not counted, then ragged ones by so many clients, each asking again when it is
answered; the same of every server, others for each number of clients. At last all requests are asked at once.
JSON lines: a server's at each number of clients, and what `LLM.generate` makes of the last requests, with as
many rows as the servers: the most of --concurrency. Medians over the rounds. `ratio` is our output tokens per
second by the peer's, and our p99 time to the first token by the peer's; for `LLM.generate` our tokens per
second of the requests asked at once by its own: what HTTP leaves. (With fewer clients than requests a row
that is done waits for the next one to be asked, which is no cost of HTTP's.)
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks import record, servers, workloads
from jaxpaged.commands.bench import add_bench
from jaxpaged.commands.parser import Parser
from jaxpaged.models import loading
from jaxpaged.research.bench import workloads as bench_workloads

_CONCURRENCY = flags.DEFINE_list("concurrency", ["4", "16", "32"], "Clients, with commas between them.")
_REQUESTS = flags.DEFINE_integer("requests", 64, "At each number of clients.", lower_bound=1)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Of weights and cache.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Turns of each server.", lower_bound=1)
_PEER = flags.DEFINE_multi_string("peer", [], "vllm=PYTHON=MODEL; may be given several times.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")

MAX_MODEL_LEN = 1024
GENERATE = "LLM.generate"


def main(argv: Sequence[str]) -> None:
    """Run as a module."""
    record.start(argv)
    clients = [int(n) for n in _CONCURRENCY.value]
    num_rows = max(clients)
    clients.append(_REQUESTS.value)
    sizes = ["--max-num-seqs", str(num_rows), "--max-model-len", str(MAX_MODEL_LEN)]
    engines = {"jaxpaged": functools.partial(servers.ours, "--dtype", _DTYPE.value, *sizes)}
    for text in _PEER.value:
        name, python, model = text.split("=")
        engines[name] = functools.partial(servers.vllm, python, model, _DTYPE.value, *sizes)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in [*engines, GENERATE]}
    for _ in range(_ROUNDS.value):
        for name, start in engines.items():
            with start() as (url, _):
                found[name].append(asked(url, clients))
        found[GENERATE].append([generated(num_rows)])
    results = record.Results("serving", _OUT.value, dtype=_DTYPE.value)
    for line in lines(found, clients):
        results.put(line)


def lines(found: dict[str, list[list[dict[str, Any]]]], clients: list[int]) -> Iterator[dict[str, Any]]:
    """Return the result lines of all rounds' runs: by engine, by round, by number of clients."""
    ours = {}
    for name, rounds in found.items():
        for place, num_clients in enumerate(clients if name != GENERATE else clients[-1:]):
            runs = [each[place] for each in rounds]
            per_s = record.spread([run["output_tokens_per_s"] for run in runs])
            line: dict[str, Any] = {"engine": name, "clients": num_clients, "output_tokens_per_s": per_s}
            if name != GENERATE:
                times = ("ttft", "tpot", "e2e")
                line |= {
                    f"{what}_{p}_ms": record.spread([run[f"{what}_ms"][p] for run in runs])
                    for what in times
                    for p in ("p50", "p99")
                }
                line |= {"failed": sum(run["failed"] for run in runs), "requests": runs[0]["requests"]}
            if name == "jaxpaged":
                ours[num_clients] = line
            else:
                compared = [each for each in ("output_tokens_per_s", "ttft_p99_ms") if each in line]
                line["ratio"] = {
                    each: round(ours[num_clients][each]["median"] / line[each]["median"], 3)
                    for each in compared
                }
            yield line


def asked(url: str, clients: list[int]) -> list[dict[str, Any]]:
    """Return the load generator's report of a server, at each number of clients."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "runs.jsonl")
        for num_clients in clients:
            command = [sys.executable, "-m", "jaxpaged", *_bench(url, num_clients), "--output", str(out)]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return [json.loads(line) for line in out.read_text().splitlines()]


def generated(max_num_seqs: int) -> dict[str, Any]:
    """Run the same requests through `LLM.generate`, in a process of its own as a server is."""
    asked = bench_workloads.make(_parsed(_bench("http://nobody", _REQUESTS.value)))
    workload: workloads.Workload = {
        "name": "ragged",
        "requests": [{"prompt_token_ids": each.prompt, "max_tokens": each.max_tokens} for each in asked],
        "max_num_seqs": max_num_seqs,
    }
    runner = str(record.ROOT / "benchmarks" / "peers" / "jaxpaged_runner.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        options = ["--dtype", _DTYPE.value, "--workload", file.name, "--repeats", "1"]
        command = [sys.executable, runner, "--model", str(loading.resolve(loading.SMOLLM2)), *options]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=record.ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def _parsed(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers(parser_class=Parser))
    return parser.parse_args(command)


def _bench(url: str, num_clients: int) -> list[str]:
    """Run the load generator with a seed of its own: repeated prompts would be found in the prefix cache."""
    options = ["--concurrency", num_clients, "--num-requests", _REQUESTS.value, "--seed", num_clients]
    return ["bench", "serve", "--base-url", url, *map(str, options)]


if __name__ == "__main__":
    app.run(main)
