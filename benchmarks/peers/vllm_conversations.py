"""Times vLLM on the CPU with the conversations of `python -m benchmarks.conversations --write FILE`.

    .venv-vllm/bin/python benchmarks/peers/vllm_conversations.py --model FOLDER --prompts FILE --way host

Ways: `computing` without its prefix cache, `device` with it, `host` with `kv_offloading_size` below it,
`disk` with a file tier below that. One JSON line, as there.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

BLOCK_SIZE = 32  # its attention on a CPU takes multiples of that


def main() -> None:
    """Load the model, and answer the conversations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--way", choices=("computing", "device", "host", "disk"), required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bytes-per-token", type=int, default=46080, help="of K and V")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm  # type: ignore[import-not-found]

    with open(args.prompts) as file:
        its = json.load(file)
    sizes, turns = its["sizes"], its["turns"]
    gib = args.bytes_per_token * sizes["total"] / 2**30
    folder = tempfile.TemporaryDirectory()
    more: dict[str, Any] = {}
    if args.way == "host":
        more = {"kv_offloading_size": gib / 2}
    if args.way == "disk":
        extra = {
            "cpu_bytes_to_use": int(gib / 2 * 2**30),
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": folder.name}],
        }
        more = {
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        }

    def make() -> Any:
        return vllm.LLM(
            args.model,
            dtype=args.dtype,
            max_num_seqs=4,
            max_model_len=sizes["longest"] + 32,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=sizes["device"] // BLOCK_SIZE + 1,
            enable_prefix_caching=args.way != "computing",
            **more,
        )

    params = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def ask(llm: Any, prompt: list[int]) -> tuple[float, int]:
        began = time.perf_counter()
        [answer] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - began, answer.num_cached_tokens or 0

    seconds: dict[str, list[float]] = {"before": [], "after": []}
    llm, hits = make(), {"before": 0, "after": 0}
    warm = [2000 + i % 997 for i in range(sizes["longest"])]
    ask(llm, warm)
    for turn, prompts in enumerate(turns):
        when = "after" if turn == len(turns) - 1 else "before"
        if when == "after":
            llm.llm_engine.engine_core.shutdown()
            del llm
            llm = make()
            ask(llm, warm)
        for prompt in prompts:
            took, hit = ask(llm, prompt)
            if turn:
                seconds[when].append(took)
                hits[when] += hit
    line = {
        "peer": f"vllm {vllm.__version__}",
        "way": args.way,
        "tokens": sizes,
        "first_token_ms": {
            when: {
                "mean": round(1e3 * statistics.mean(each), 1),
                "median": round(1e3 * statistics.median(each), 1),
                "least": round(1e3 * min(each), 1),
            }
            for when, each in seconds.items()
        },
        "hit_tokens": hits,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
