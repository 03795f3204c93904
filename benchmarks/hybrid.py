"""Models with several kinds of layers on a trace: how many sequences a GPU holds, and what a cache hits.

    python -m benchmarks.hybrid --trace trace.jsonl [--out FILE]
    python -m benchmarks.hybrid --trace trace.jsonl --simulator .../bin/kvcache-simulator [--out FILE]

The first form is arithmetic. A sequence holds the blocks that its next token reads when its answer is whole;
a GPU holds its room for the cache, divided by the mean of that over the trace. "exact" counts tokens and
layers alone, without blocks and padding.

The second sends the trace through one cache of each size, in `jaxpaged lab` and in PyPI's kvcache-simulator
0.1.3, whose model of full and sliding layers (`mixed_full_sliding_gqa`) is the mean of a token's bytes in a
prompt of the trace's mean length.
"""

import json
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import record
from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkedLocal, SlidingWindow
from jaxpaged.research.lab import decoders, sweep, traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.decoders import Decoder
from jaxpaged.research.lab.serving.roofline import USED, named
from jaxpaged.research.lab.traces import Trace
from reference.v1.planning import get_kv_cache_groups
from reference.v1.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

_TRACE = flags.DEFINE_string("trace", None, "As `jaxpaged lab` takes it.", required=True)
_OUT = flags.DEFINE_string("out", None, "File to append lines to.")
_GPU = flags.DEFINE_string("gpu", "h200", "As `jaxpaged lab` takes it.")
_MODELS = flags.DEFINE_list(
    "models", ["gemma-3-27b", "gpt-oss-20b", "llama-4-scout"], "Decoders of `jaxpaged lab`."
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Tokens, for the sequences.", lower_bound=1)
_SIMULATOR = flags.DEFINE_string("simulator", None, "The other simulator's command.")
_GIB = flags.DEFINE_list("gib", ["32", "64", "128", "256"], "Sizes of caches, for the hits.")
# Ids of the other simulator's catalogue.
ITS_MODELS = {"command-r7b": "cohere-command-r7b-12-2024"}
ONE_SYMBOL = 512  # tokens of a block of the trace


def kept(spec: CacheSpec, lens: np.ndarray) -> np.ndarray:
    """Return the tokens that a layer keeps for the token behind each sequence."""
    return np.asarray(decoders.tokens_read(spec, jnp.asarray(lens + 1))) - 1


def held(spec: CacheSpec, lens: np.ndarray, block_size: int) -> np.ndarray:
    """Return the blocks that a group holds of each sequence."""
    first = np.maximum(np.asarray(spec.first_read(lens)) // block_size, 0)
    return cdiv(lens, block_size) - np.minimum(first, cdiv(lens, block_size))


def of_vllm(decoder: Decoder, block_size: int) -> list[tuple[CacheSpec, int]]:
    """Return the groups that vLLM 0.33 makes, by our oracle of it: what each reads, and how wide all are."""
    sizes = block_size, decoder.num_kv_heads, decoder.head_dim, "bfloat16"

    def its(spec: CacheSpec) -> AttentionSpec:
        if isinstance(spec, SlidingWindow):
            return SlidingWindowSpec(*sizes, sliding_window=spec.window)
        if isinstance(spec, ChunkedLocal):
            return ChunkedLocalAttentionSpec(*sizes, attention_chunk_size=spec.chunk)
        return FullAttentionSpec(*sizes)

    groups = get_kv_cache_groups({str(layer): its(spec) for layer, spec in enumerate(decoder.specs)})
    width = max(len(group.layer_names) for group in groups)
    return [(decoder.specs[int(group.layer_names[0])], width) for group in groups]


def sequences(trace: Trace, name: str, block_size: int) -> dict[str, Any]:
    """Return how many of the trace's sequences the GPU holds, with each form of tables."""
    decoder, peak = decoders.named(name), named(_GPU.value)
    lens = trace.input_lens + trace.output_lens
    room = USED * peak.memory - decoder.bytes_of_weights
    block_bytes = block_size * decoder.layer_bytes
    forms = {"vllm": of_vllm(decoder, block_size)}
    for form, one_table in (("groups", False), ("one_table", True)):
        grouping = decoder.grouping(one_table=one_table)
        forms[form] = [(spec, grouping.width) for spec in grouping.specs]
    mean_bytes = {
        form: block_bytes * sum(width * float(held(spec, lens, block_size).mean()) for spec, width in groups)
        for form, groups in forms.items()
    }
    mean_bytes["exact"] = decoder.layer_bytes * sum(
        count * float(kept(spec, lens).mean()) for spec, count in decoder.counts.items()
    )
    return {
        "what": "sequences",
        "model": name,
        "gpu": _GPU.value,
        "memory_bytes": peak.memory,
        "share_used": USED,
        "weight_bytes": decoder.bytes_of_weights,
        "room_bytes": room,
        "block_size": block_size,
        "num_sequences": trace.num_requests,
        "mean_tokens": float(lens.mean()),
        "mean_bytes": {form: round(num_bytes) for form, num_bytes in mean_bytes.items()},
        "held": {form: int(room / num_bytes) for form, num_bytes in mean_bytes.items()},
    }


def hits(trace: Trace, name: str, simulator: str) -> list[dict[str, Any]]:
    """Return the hit tokens of caches of equal bytes, in the other simulator and in our laboratory.

    Ours are: one table of as many blocks as the other's, with its rules; and of equal bytes one table, and
    block tables by kind of layer, with the engine's rules.
    """
    decoder = decoders.named(name)
    command = [simulator, "run", "--trace", _TRACE.value, "--model", ITS_MODELS[name], "--policies", "lru"]
    command += ["--format", "json", "--no-progress", "--block-size", str(ONE_SYMBOL)]
    command += ["--budgets-gib", ",".join(_GIB.value)]
    theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    points = theirs["points"]
    same = [Combination("lru", ONE_SYMBOL, ONE_SYMBOL * each["cacheBlocks"], True) for each in points]
    tokens = [int(each["gib"] * 2**30 / decoder.kv_bytes) for each in points]
    equal = [Combination("lru", ONE_SYMBOL, each, one) for one in (True, False) for each in tokens]
    alike = [*sweep.sweep(trace, same, partial=True)]
    own = [*sweep.sweep(trace, equal, decoder=decoder)]
    lines = []
    for i, point in enumerate(points):
        of_ours = {"same_blocks": alike[i], "one_table": own[i], "groups": own[len(points) + i]}
        lines.append(
            {
                "what": "hits",
                "model": name,
                "gib": point["gib"],
                "block_size": ONE_SYMBOL,
                "input_tokens": point["results"]["lru"]["totalTokens"],
                "bytes_a_token": {
                    "kvcache-simulator": theirs["metadata"]["bytesPerToken"],
                    "all layers": decoder.kv_bytes,
                    "full layers": decoder.specs.count(FULL) * decoder.layer_bytes,
                },
                "num_blocks": {"kvcache-simulator": point["cacheBlocks"]}
                | {form: each.num_usable for form, each in of_ours.items()},
                "hit_tokens": {"kvcache-simulator": point["results"]["lru"]["hitTokens"]}
                | {form: each.counted[0] for form, each in of_ours.items()},
            }
        )
    return lines


def main(argv: list[str]) -> None:
    """Count, and print the lines."""
    record.start(argv)
    trace = traces.read(_TRACE.value)
    results = record.Results("hybrid", _OUT.value)
    for name in _MODELS.value:
        if _SIMULATOR.value is None:
            results.put(sequences(trace, name, _BLOCK_SIZE.value))
            continue
        for line in hits(trace, name, _SIMULATOR.value):
            results.put(line)
            sys.stdout.flush()


if __name__ == "__main__":
    app.run(main)
