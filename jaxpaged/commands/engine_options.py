"""The flags of the engine's options, which several commands share. Imports nothing heavy."""

import argparse
import json
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.commands.parser import Parser
from jaxpaged.config import EngineConfig
from jaxpaged.options import flags_of

MODEL_OPTIONS = (
    "tokenizer",
    "revision",
    "generation_config",
    "hf_overrides",
    "rope_scaling",
    "rope_theta",
    "load_format",
)  # arguments of `LLM` itself, beside the engine's options


def add_engine_options(parser: Parser) -> None:
    parser.takes_vllms = True
    group = parser.add_argument_group("engine", "vLLM's flags that change nothing are accepted, too")
    group.add_argument(
        "--model",
        default="smollm2",
        help="model: smollm2 (default), a directory with config and safetensors, a .gguf file, or a hub id",
    )
    group.add_argument(
        "--tokenizer", metavar="DIR", help="tokenizer in place of the model's: a directory or hub id"
    )
    group.add_argument("--revision", help="revision of a hub id")
    group.add_argument(
        "--generation-config", help="sampling defaults: the model's own (auto, default), or none (vllm)"
    )
    group.add_argument(
        "--hf-overrides", metavar="JSON", type=_json_object, help="fields in place of the model's config.json"
    )
    group.add_argument(
        "--rope-scaling", metavar="JSON", type=_json_object, help="scaling of RoPE in place of the model's"
    )
    group.add_argument(
        "--rope-theta", metavar="N", type=float, help="base of RoPE's frequencies in place of the model's"
    )
    group.add_argument(
        "--load-format",
        help="dummy: random weights, by --seed; all other names: the model's files (default)",
    )
    for names, flag in flags_of(EngineConfig).values():
        group.add_argument(*names, **flag)
    group.add_argument(
        "--verbose", action="store_true", help="log on standard error what the engine chose, and why"
    )


def _json_object(text: str) -> dict[str, Any]:
    """Read a flag's value. Raises `ArgumentTypeError`, which argparse reports with the flag."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a JSON object")
    return value


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options given of `LLM`'s; the others keep their defaults."""
    # `seed` is the request's on the command line.
    given = {name: getattr(args, name, None) for name in (*EngineConfig.__dataclass_fields__, *MODEL_OPTIONS)}
    return {name: value for name, value in given.items() if value is not None}
