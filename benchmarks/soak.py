"""A server under mixed load for a long time: does it lose blocks, threads, memory or file handles?

python -m benchmarks.soak --seconds=600 [--model=...]       starts a server of its own, and ends it

Clients stream, wait, leave in the middle, ask too much and too little, and send what is no request at all.
A line at the end says what was sent, what came back, and what had grown. Fails on any answer of 5xx, on
blocks still held, and where threads, files or memory have grown.
"""

import asyncio
import collections
import json
import random
import re
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from absl import app, flags

from benchmarks import record, servers

FLAGS = flags.FLAGS
flags.DEFINE_float("seconds", 600, "how long", lower_bound=1)
flags.DEFINE_integer("clients", 24, "at the same time", lower_bound=1)
flags.DEFINE_integer("seed", 0, "of what they do")
flags.DEFINE_string("model", "smollm2", "as `jaxpaged serve` takes it")
flags.DEFINE_list("serve", [], "more options of `jaxpaged serve`")

# Beyond these it has grown: what a process keeps for itself from its first requests on is in both counts.
MORE_THREADS, MORE_FILES, MORE_MEMORY = 8, 8, 1.1
KINDS = 1000  # of malformed bodies


def main(argv: Sequence[str]) -> None:
    record.start(argv)
    with servers.ours("--max-queue", str(FLAGS.clients), *FLAGS.serve, model=FLAGS.model) as (url, server):
        line = asyncio.run(soak(url, server.pid))
    line["exit_code"] = server.returncode
    record.Results("soak").put(line)
    if line["grown"] or server.returncode:
        sys.exit(f"not as before: {line['grown']}, exit code {server.returncode}")


async def soak(url: str, pid: int) -> dict[str, Any]:
    """Load it; the line to print, in which `grown` says what is wrong."""
    replies: collections.Counter[str] = collections.Counter()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        rng = random.Random(FLAGS.seed)
        malformed = list(bodies(rng))
        end = time.monotonic() + min(20, FLAGS.seconds / 10)  # warm
        await asyncio.gather(*(client(http, rng, malformed, end, replies) for _ in range(FLAGS.clients)))
        before = await resting(http, pid)
        replies.clear()
        end = time.monotonic() + FLAGS.seconds
        await asyncio.gather(*(client(http, rng, malformed, end, replies) for _ in range(FLAGS.clients)))
        after = await resting(http, pid)
    limits = {
        "held": before["held"],
        "threads": before["threads"] + MORE_THREADS,
        "files": before["files"] + MORE_FILES,
        "bytes": before["bytes"] * MORE_MEMORY,
    }
    grown = [name for name, most in limits.items() if after[name] > most]
    grown += [f"{status}" for status in replies if status.startswith("5")]
    return {
        "seconds": FLAGS.seconds,
        "clients": FLAGS.clients,
        "replies": dict(sorted(replies.items())),
        "before": before,
        "after": after,
        "grown": grown,
    }


async def client(
    http: httpx.AsyncClient,
    rng: random.Random,
    malformed: list[bytes],
    end: float,
    replies: "collections.Counter[str]",
) -> None:
    """Send requests of all sorts until the end."""
    while time.monotonic() < end:
        kind = rng.choice(["whole", "stream", "stream", "leave", "leave", "malformed", "malformed", "chat"])
        try:
            if kind == "malformed":
                body = rng.choice(malformed)
                path = rng.choice(["completions", "chat/completions", "responses"])
                reply = await http.post(f"/v1/{path}", content=body, headers=JSON_TYPE)
                replies[str(reply.status_code)] += 1
            elif kind == "leave":
                await asyncio.wait_for(ask(http, rng, "stream", replies), rng.uniform(0.01, 1.5))
            else:
                await ask(http, rng, kind, replies)
        except (TimeoutError, httpx.TransportError) as error:
            replies[type(error).__name__] += 1


JSON_TYPE = {"content-type": "application/json"}


async def ask(
    http: httpx.AsyncClient, rng: random.Random, kind: str, replies: "collections.Counter[str]"
) -> None:
    words = "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(rng.choice([1, 20, 200, 4000])))
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 8, 64, 200]),
        "n": rng.choice([1, 1, 3]),
        "logprobs": rng.choice([None, None, True if kind == "chat" else 3]),
        "stop": rng.choice([None, "e", ["the", "."]]),
        "stream": kind != "whole",
    }
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": words}]} if kind == "chat" else {"prompt": words}
    async with http.stream("POST", path, json=body) as reply:
        async for _ in reply.aiter_raw():
            pass
        replies[str(reply.status_code)] += 1


def bodies(rng: random.Random) -> Iterator[bytes]:
    """Yield bodies malformed in a thousand ways: wrong types in all fields, broken bytes, wild nesting."""
    good: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    good |= {"input": "a", "temperature": 1, "stop": "b", "n": 1, "logit_bias": {"1": 1}, "seed": 1}
    wrong: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([-1, 0, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf")]),
        lambda: rng.choice(["", "\ud800", "\0", "x" * 5000, [[]], {}, [None], [{"role": 1}], True]),
        lambda: [rng.randrange(-(2**40), 2**40) for _ in range(5)],
    ]
    for _ in range(KINDS):
        body = dict(good)
        for name in rng.sample(sorted(body), rng.randint(1, 3)):
            body[name] = rng.choice(wrong)()
        text = bytearray(json.dumps(body).encode())
        broken = rng.random()
        if broken < 0.2:
            del text[rng.randrange(len(text)) :]
        elif broken < 0.4:
            text[rng.randrange(len(text))] = rng.randrange(256)
        elif broken < 0.45:
            text = bytearray(b'{"prompt":' * rng.randint(1, 2000))
        yield bytes(text)


async def resting(http: httpx.AsyncClient, pid: int) -> dict[str, float]:
    """Return what the server has when nothing is left to do."""
    for _ in range(600):
        text = (await http.get("/metrics")).text
        found = dict(
            re.findall(r"^vllm:(num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)$", text, re.MULTILINE)
        )
        if not any(float(value) for value in found.values()):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(6)  # connections that are idle are closed after five seconds
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return {
        "held": float(found["kv_cache_usage_perc"]),
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "bytes": record.resident_bytes(pid),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


if __name__ == "__main__":
    app.run(main)
