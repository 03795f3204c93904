"""Times vLLM's first token of structured outputs on the CPU: of a schema that it never saw, and again.

    .venv-vllm/bin/python benchmarks/peers/vllm_first_token.py --model smollm2-hf --schemas schemas.json

`python -m benchmarks.structured --peer` runs it. One JSON line for each way, on standard output alone.
"""

import argparse
import json
import os
import statistics
import sys
import time

PROMPT = "Describe yourself as JSON:"


def main() -> None:
    """Load the model, and measure each schema twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16", help="number format of weights and activations")
    parser.add_argument("--schemas", required=True, help="a file with a list of JSON schemas")
    args = parser.parse_args()
    with open(args.schemas) as file:
        schemas = json.load(file)
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ["VLLM_NO_USAGE_STATS"] = "1"

    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(args.model, dtype=args.dtype, max_model_len=512, enable_prefix_caching=False)

    def first_token(schema: object) -> float:
        structure = None
        if schema is not None:
            structure = vllm.sampling_params.StructuredOutputsParams(json=json.dumps(schema))
        params = vllm.SamplingParams(max_tokens=1, temperature=0.8, seed=1, structured_outputs=structure)
        begin = time.perf_counter()
        llm.generate(PROMPT, params, use_tqdm=False)
        return time.perf_counter() - begin

    first_token(None)
    first_token({"type": "boolean"})  # what any first schema loads
    ways = {"cold schema": schemas, "warm schema": schemas, "none": [None] * len(schemas)}
    for name, each in ways.items():
        median = statistics.median(map(first_token, each))
        line = {"engine": "vllm", "version": vllm.__version__, "what": f"time to the first token, {name}"}
        print(json.dumps(line | {"s": round(median, 4)}), file=results, flush=True)


if __name__ == "__main__":
    main()
