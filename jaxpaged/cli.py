"""The command line: `jaxpaged generate` and `jaxpaged info`.

Imports at the top are light, so that `--help` answers at once; jax comes in when a command runs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxpaged.chat import check_messages
from jaxpaged.config import EngineConfig, InputError, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.engine.llm import LLM

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 with one line about the user's mistake."""
    args = _parser().parse_args(argv)
    # Transformers announces at import that PyTorch is missing; here that is as it should be.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        args.command(args)
    except InputError as error:
        print(f"jaxpaged: {_one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One clear line, without the usage in front of it."""
        self.exit(EXIT_USER_ERROR, f"jaxpaged: {_one_line(message)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxpaged", description="Generate text with a paged KV cache, in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    generate = commands.add_parser("generate", help="answer prompts in one batch")
    generate.set_defaults(command=_generate)
    prompts = generate.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given repeatedly"
    )
    prompts.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or JSON lines with 'prompt' or 'messages'",
    )
    prompts.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, help="new tokens a prompt (default 64)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0: all)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep this much probability (default 1)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="relative to the likeliest (default 0)")
    sampling.add_argument("--seed", type=int, help="the same tokens again (default: by the request's number)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    generate.add_argument("--json", action="store_true", help="JSON lines on standard output, nothing else")
    _add_engine_options(generate)

    info = commands.add_parser("info", help="versions, devices, implementation, and the cache for a model")
    info.set_defaults(command=_info)
    _add_engine_options(info)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), a directory with config and safetensors, a .gguf file, or a hub id",
    )
    group.add_argument("--dtype", help="auto (default), float32, bfloat16 or float16")
    group.add_argument("--attention", help="auto (default), mosaic_gpu, native or xla")
    group.add_argument("--block-size", type=int, help="tokens a block (default 16)")
    group.add_argument("--num-blocks", type=int, help="blocks of the cache (default: what memory allows)")
    group.add_argument("--max-num-seqs", type=int, help="sequences decoded together (default 16)")
    group.add_argument(
        "--max-model-len", type=int, help="tokens of a prompt with its answer (default: the model's)"
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
        help="which free blocks are taken first: the longest unused (lru, default), or those without content "
        "(lru_split)",
    )
    group.add_argument("--preemption-mode", help="of who gives way: recompute (default) or swap")
    group.add_argument("--num-host-blocks", type=int, help="blocks in host memory to swap to")
    group.add_argument("--scheduling-policy", help="fcfs (default) or priority")


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options given; the others keep `EngineConfig`'s defaults."""
    given = {name: getattr(args, name, None) for name in EngineConfig.__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None}


def _generate(args: argparse.Namespace) -> None:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    options = _engine_options(args)
    EngineConfig(**options)  # mistakes are told before anything heavy is loaded
    requests = _read_requests(args.prompt, args.prompts_file)
    if not requests:
        raise InputError("no prompt: give --prompt or --prompts-file")

    from jaxpaged.engine.llm import LLM

    start = time.perf_counter()
    llm = LLM(args.model, **options)
    prompts = [_prompt(llm, request, args.chat) for request in requests]
    loaded = time.perf_counter()
    outputs = llm.generate(prompts, params)

    if args.json:
        for i, output in enumerate(outputs):
            answer = output.outputs[0]
            line = {
                "index": i,
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": answer.token_ids,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
            }
            print(json.dumps(line, ensure_ascii=False))
    else:
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0]
            print(f"\n>>> {_shown(request)}\n{answer.text.strip()}  [{answer.finish_reason}]")
    sys.stdout.flush()
    stats = llm.stats
    print(
        f"\nloaded and compiled in {loaded - start:.1f} s; {len(outputs)} answers in {stats.seconds:.1f} s: "
        f"{stats.num_prompt_tokens} prompt tokens, {stats.num_new_tokens} generated ({stats})",
        file=sys.stderr,
    )


def _prompt(llm: "LLM", request: dict[str, Any], chat: bool) -> Any:
    """What `LLM.generate` takes for a request; messages always go through the chat template."""
    if "messages" in request:
        return llm.render_chat(request["messages"])
    if chat:
        return llm.render_chat([{"role": "user", "content": request["prompt"]}])
    return request["prompt"]


def _read_requests(prompts: list[str], file: Path | None) -> list[dict[str, Any]]:
    """Each request as {"prompt": text} or {"messages": [...]}, those of the command line first."""
    requests = []
    for prompt in prompts:
        if not prompt:
            raise InputError("--prompt '' must not be empty")
        requests.append({"prompt": prompt})
    if file is None:
        return requests
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"--prompts-file {str(file)!r} must exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts-file {str(file)!r} cannot be read: {error}") from error
    if not any(line.strip() for line in lines):
        raise InputError(f"--prompts-file {str(file)!r} must have at least one prompt")
    is_json = next(line for line in lines if line.strip()).lstrip().startswith("{")
    for number, line in enumerate(lines, start=1):
        where = f"--prompts-file {str(file)!r}, line {number}"
        if is_json and not line.strip():
            continue
        requests.append(_read_json_line(line, where) if is_json else _read_text_line(line, where))
    return requests


def _read_text_line(line: str, where: str) -> dict[str, Any]:
    if not line.strip():
        raise InputError(f"{where}: must not be empty")
    return {"prompt": line}


def _read_json_line(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: must be JSON: {error}") from error
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InputError(f"{where}: must be an object with either 'prompt' or 'messages'")
    if "prompt" in value:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise InputError(f"{where}: prompt={value['prompt']!r} must be a non-empty string")
        return {"prompt": value["prompt"]}
    try:
        check_messages(value["messages"])
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return {"messages": value["messages"]}


def _shown(request: dict[str, Any]) -> str:
    return request["prompt"] if "prompt" in request else request["messages"][-1]["content"]


def _info(args: argparse.Namespace) -> None:
    config = EngineConfig(**_engine_options(args))

    import platform
    from importlib import metadata

    import jax

    import jaxpaged
    from jaxpaged.engine import gpu_flags, plan
    from jaxpaged.models import loading
    from pallas_kernels import native

    gpu_flags.set_defaults()
    lines = [(name, metadata.version(name)) for name in ("jax", "jaxlib", "flax", "numpy", "transformers")]
    lines = [("jaxpaged", jaxpaged.__version__), ("python", platform.python_version()), *lines]
    lines += [("device", f"{d.device_kind} ({d.platform} {d.id})") for d in jax.devices()]
    model = loading.open_checkpoint(args.model).config
    implementation, why = plan.attention(config, model)
    no_native = native.why_not(plan.resolve_dtype(config))
    cache = plan.cache_size(config, model)
    lines += [
        ("attention", f"{implementation}: {why}"),
        ("products", f"xla: {no_native}" if no_native else "native: a CPU with AVX-512"),
        ("programs", f"kept in {plan.compilation_cache_dir()}"),
        (
            "model",
            f"{args.model}: {model.num_layers} layers, {model.num_q_heads} query heads and "
            f"{model.num_kv_heads} kv heads of {model.head_dim}, vocabulary {model.vocab_size}",
        ),
        ("dtype", str(plan.resolve_dtype(config))),
        ("rows", f"{config.max_num_seqs} sequences of up to {plan.max_model_len(config, model)} tokens"),
        (
            "cache",
            f"{cache.num_blocks} blocks of {cache.block_size} tokens, {cache.bytes_per_block:,} bytes each: "
            f"{cache.num_tokens:,} tokens in {cache.num_bytes / 2**20:,.1f} MiB",
        ),
        ("", cache.reason),
    ]
    for name, value in lines:
        print(f"{name:<14}{value}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
