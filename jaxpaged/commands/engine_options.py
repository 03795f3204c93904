"""The flags of the engine's options, which several commands share. Imports nothing heavy."""

import argparse
from typing import Any

from jaxpaged.commands.parser import Parser
from jaxpaged.config import AUTO, EngineConfig

MODEL_OPTIONS = ("tokenizer", "revision", "generation_config")  # of `LLM`, beside its engine's


def add_engine_options(parser: Parser) -> None:
    parser.takes_vllms = True
    group = parser.add_argument_group("engine", "flags of vLLM's that change nothing are accepted, too")
    group.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), a directory with config and safetensors, a .gguf file, or a hub id",
    )
    group.add_argument("--tokenizer", metavar="DIR", help="another than the model's: a directory or hub id")
    group.add_argument("--revision", help="of a hub id")
    group.add_argument(
        "--generation-config", help="sampling defaults: the model's own (auto, default), or none (vllm)"
    )
    group.add_argument("--dtype", help="auto (default), float32, bfloat16 or float16")
    group.add_argument(
        "--quantization",
        "-q",
        help="weights that stay quantised in memory: gguf (as a file has them), int8, int4 or fp8 (on load)",
    )
    group.add_argument("--attention", help="auto (default), mosaic_gpu, native or xla")
    group.add_argument("--block-size", type=int, help="tokens a block (default 16)")
    group.add_argument(
        "--num-blocks",
        "--num-gpu-blocks-override",
        type=int,
        help="blocks of the cache (default: what memory allows)",
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, help="share of a device's memory to use (default 0.9)"
    )
    group.add_argument(
        "--kv-layout", help="how K and V lie in a block: token_major (default), another name, or module:Name"
    )
    group.add_argument(
        "--kv-cache-dtype", help="in what numbers: auto (default), fp8, fp8_e4m3, fp8_e5m2, int8 or int4"
    )
    group.add_argument(
        "--calculate-kv-scales",
        action=argparse.BooleanOptionalAction,
        help="scales of an fp8 cache from the first prompt (default: no, they are 1)",
    )
    group.add_argument("--max-num-seqs", type=int, help="sequences decoded together (default 16)")
    group.add_argument(
        "--max-model-len",
        type=_length,
        help="tokens of a prompt with its answer (default: the model's), or auto (-1): what the cache holds",
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, help="computed in one step (default: max-num-seqs + 512)"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="requests that begin alike share blocks (default: yes)",
    )
    group.add_argument(
        "--reuse-answers",
        action=argparse.BooleanOptionalAction,
        help="prompts share blocks with earlier answers too, whose last bits may differ (default: no)",
    )
    group.add_argument(
        "--eviction-policy",
        help="which free blocks are taken first: the longest unused (lru, default); those without content, "
        "then the longest unused (lru_split), or by fifo, lfu, depth, sieve or s3fifo",
    )
    group.add_argument("--preemption-mode", help="of who gives way: recompute (default) or swap")
    group.add_argument("--num-host-blocks", type=int, help="blocks in host memory to swap to")
    group.add_argument("--scheduling-policy", help="fcfs (default) or priority")
    group.add_argument(
        "--enable-lora", action="store_true", default=None, help="requests may have low-rank adapters"
    )
    group.add_argument("--max-loras", type=int, help="different adapters that run together (default 1)")
    group.add_argument("--max-lora-rank", type=int, help="of an adapter (default 16)")
    group.add_argument("--max-cpu-loras", type=int, help="kept in the host's memory (default: all)")
    group.add_argument(
        "--decode-widths",
        type=int,
        nargs="+",
        metavar="ROWS",
        help="rows of narrower decode passes: a step takes the narrowest that holds all that run. A "
        "token's last bits may then depend on how many run together (default: none)",
    )
    group.add_argument(
        "--distributed-init", metavar="HOST:PORT", help="where the processes of a model meet: of process 0"
    )
    group.add_argument("--num-processes", type=int, help="that have the model's devices (default 1)")
    group.add_argument("--process-id", type=int, help="which of them this one is, from 0 (default)")
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=int, help="devices that share the model (default 1)"
    )
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        help="groups of so many devices, each with the model (default 1)",
    )
    group.add_argument(
        "--tensor-parallel-sums",
        help="what they add up: fast (default), or ordered, in their order, for more bytes moved",
    )
    group.add_argument(
        "--loop",
        help="who turns the serving loop: device, host, or auto (default): the device, and the host where a "
        "GPU fails to run the loop as one program",
    )
    group.add_argument(
        "--loop-over-layers",
        action=argparse.BooleanOptionalAction,
        help="layers in a loop, so that compiling takes as long for many as for few (default: where our CPU "
        "kernels multiply; on a Hopper GPU with --loop-over-layers, by a kernel that was never measured)",
    )
    group.add_argument(
        "--max-logprobs", type=int, help="likeliest tokens that a request may ask for (default and most: 20)"
    )
    group.add_argument(
        "--keep-programs",
        action=argparse.BooleanOptionalAction,
        help="keep compiled programs and packed weights on disk for the next start (default: yes)",
    )
    group.add_argument(
        "--verbose", action="store_true", help="say on standard error what the engine chose, and why"
    )


def _length(text: str) -> int | str:
    return text if text == AUTO else int(text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options given of `LLM`'s; the others keep their defaults."""
    # `seed` is the request's on the command line.
    given = {name: getattr(args, name, None) for name in (*EngineConfig.__dataclass_fields__, *MODEL_OPTIONS)}
    return {name: value for name, value in given.items() if value is not None}
