"""Hit rates of all eviction policies on traces, what each gains over LRU, and how far Belady's rule is.

    python -m benchmarks.policies [--traces chat,agents,trace.jsonl] [--cache_tokens 131072,...] [--out FILE]

A JSON line for each trace and cache. `chat` and `agents` are made by `jaxpaged.research.lab.synthetic`, with
`--requests` and `--seed`; others are files, of which all requests are sent. The first half fills the cache
and is not counted. `--served` policies also run in the engine's scheduler, on a file's or made trace's first
`--serve` requests, in the modelled time of an H100.
"""

from absl import app, flags

from benchmarks import record
from jaxpaged.config import EngineConfig
from jaxpaged.research import lab
from jaxpaged.research.lab import decoders
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.serving import replay, roofline

_TRACES = flags.DEFINE_list("traces", ["chat", "agents"], "Made traces, or files.")
_REQUESTS = flags.DEFINE_integer("requests", 6000, "Requests of a made trace.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of made traces.")
_CACHE_TOKENS = flags.DEFINE_list("cache_tokens", ["131072", "524288", "2097152"], "Cache sizes.")
_POLICIES = flags.DEFINE_list("policies", [], "Policies beside lru and belady (default: all).")
_SERVE = flags.DEFINE_integer("serve", 0, "Requests to serve.", lower_bound=0)
_SERVED = flags.DEFINE_list("served", ["lru", "queue_lru"], "Policies to serve with.")
_OUT = flags.DEFINE_string("out", None, "A file to append the lines to.")

MADE = {"chat": lab.chat, "agents": lab.agents}


def main(argv: list[str]) -> None:
    """Measure, and print a line for each trace and cache."""
    record.start(argv)
    results = record.Results("policies", _OUT.value)
    others = _POLICIES.value or [name for name in lab.policies() if name not in ("lru", "belady")]
    for name in _TRACES.value:
        trace = MADE[name](_REQUESTS.value, _SEED.value) if name in MADE else lab.read(name)
        sizes = [int(tokens) for tokens in _CACHE_TOKENS.value]
        rows = lab.gains(lab.hit_rates(trace, ["lru", *others, "belady"], sizes))
        for tokens in sizes:
            line = {
                "what": "policies",
                "trace": trace.name if name not in MADE else name,
                "num_requests": trace.num_requests,
                "block_size": trace.block_size,
                "cache_tokens": tokens,
            }
            for column in ("hit_rate", "saved_compute", "gain", "of_bound"):
                found = {row["policy"]: row[column] for row in rows if row["cache_tokens"] == tokens}
                line[column] = {policy: value and round(value, 5) for policy, value in found.items()}
            results.put(line)
            if _SERVE.value:
                results.put(line | _served(trace.first(_SERVE.value), tokens))


def _served(trace: lab.Trace, tokens: int) -> dict[str, object]:
    """Return what serving a trace with each policy gives: a model, not a measurement."""
    caches = [Combination(policy, trace.block_size, tokens) for policy in _SERVED.value]
    peak, decoder = roofline.GPUS["h100"], decoders.LLAMA_8B
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=64 + 2048)
    served = replay.serve(trace, caches, peak, config, decoder)
    lines = {each.combination.policy: each.line() for each in served}
    return {"what": "policies served, a model", "num_requests": trace.num_requests, "served": lines}


if __name__ == "__main__":
    app.run(main)
