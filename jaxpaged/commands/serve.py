"""`jaxpaged serve`: an OpenAI-compatible server. Imports nothing heavy at the top."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, check, shown
from jaxpaged.commands.engine_options import add_engine_options, engine_options
from jaxpaged.commands.output import log_to_stderr, write_stderr
from jaxpaged.commands.parser import Commands, require
from jaxpaged.config import config_of
from jaxpaged.serve.options import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES, ServerOptions

# What the extra `serve` brings, and what each of our commands needs of it.
SERVER_NEEDS = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "JAXPAGED_API_KEY"


def add_serve(commands: Commands) -> None:
    """Add the command to the command line."""
    serve = commands.add_parser("serve", help="run an OpenAI-compatible server, with metrics and a live page")
    serve.set_defaults(command=run)
    serve.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    serve.add_argument("--seed", type=int, help="seed of requests without one (default 0)")
    group = serve.add_argument_group("server")
    group.add_argument("--host", help="address to listen on (default 127.0.0.1: this machine only)")
    group.add_argument("--port", type=int, help="port to listen on (default 8000); 0: any free port")
    group.add_argument(
        "--api-key",
        action="append",
        dest="api_keys",
        metavar="KEY",
        help="key required under /v1; may be repeated. Clients with different keys share no cached prefix "
        f"(default: ${KEY_VARIABLE}, or none)",
    )
    add_model_options(group)
    group.add_argument(
        "--max-queue", type=int, help="answers that may wait; further requests get 429 (default 1000)"
    )
    group.add_argument("--max-body-bytes", type=int, help="largest request body (default 4 MiB)")
    group.add_argument("--max-nesting", type=int, help="deepest nesting of a request's JSON (default 64)")
    group.add_argument("--max-head-bytes", type=int, help="largest request headers (default 64 KiB)")
    group.add_argument("--max-connections", type=int, help="open connections at a time (default 4096)")
    group.add_argument(
        "--head-timeout",
        type=float,
        dest="head_timeout_s",
        metavar="S",
        help="seconds to receive a request's headers (default 10)",
    )
    group.add_argument(
        "--body-timeout",
        type=float,
        dest="body_timeout_s",
        metavar="S",
        help="seconds to receive a request body (default 30)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        dest="request_timeout_s",
        metavar="S",
        help="seconds to answer a request (default 600)",
    )
    group.add_argument(
        "--max-unread-bytes",
        type=int,
        help="unread bytes of a stream at which its reader counts as too slow (default 1 MiB)",
    )
    group.add_argument(
        "--max-pinned-tokens",
        type=int,
        help="tokens of prompts that requests may have kept (default: half of --kv-offloading-size)",
    )
    group.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        help="seconds that running requests get after SIGTERM (default 30)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="*",
        metavar="NAME",
        help="host names that are served, * for any (default: this machine's own on loopback, else any)",
    )
    for name, help_ in (
        ("origins", "sites whose pages may read answers, * for all (default: none)"),
        ("methods", "HTTP methods that those pages may use (default: all)"),
        ("headers", "headers that those pages may use (default: all)"),
    ):
        group.add_argument(f"--allowed-{name}", nargs="*", metavar=name[:-1].upper(), help=help_)
    group.add_argument(
        "--allow-credentials", action="store_true", default=None, help="let those pages send credentials"
    )
    group.add_argument(
        "--enable-lora-updates",
        action="store_true",
        default=None,
        help="let clients load and unload adapters, from any directory that the server can read",
    )
    group.add_argument(
        "--enable-weight-updates",
        action="store_true",
        default=None,
        help="let clients pause the engine, let it sleep, and give it new weights; with --api-key",
    )
    group.add_argument(
        "--weights-root",
        metavar="DIR",
        help="directory from which clients may have weights read (default: none)",
    )
    group.add_argument(
        "--max-weight-bytes",
        type=int,
        help="bytes of weights that clients may send (default: those of the model in float32, and 16 MiB)",
    )
    group.add_argument(
        "--runner",
        help="generate, pooling (embeddings, classes and scores in place of answers), or auto (default): as "
        "the model's files say",
    )
    group.add_argument(
        "--pooler-config", metavar="JSON", help="settings of a pooling model that its files lack"
    )
    group.add_argument("--log-level", help="debug, info (default: a line for each request), warning or error")
    add_engine_options(serve)


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """Add the options for the model's names and for reading its answers."""
    group.add_argument(
        "--served-model-name",
        nargs="+",
        dest="served_model_names",
        metavar="NAME",
        help="names of the model; answers have the first one (default: the value of --model)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="chat template in place of the model's own")
    group.add_argument(
        "--chat-template-content-format",
        help="form of a message's content in templates: auto (default), string, or openai (a list)",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="form in which the model writes tool calls (default auto, by the template): "
        f"{', '.join(TOOL_PARSER_NAMES)}",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="form in which the model writes reasoning, reported apart from the content (default "
        f"auto: openai_gptoss for its template, none for others): {', '.join(REASONING_PARSER_NAMES)}",
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=DIR",
        help="PEFT adapters, which requests name as their model; with --enable-lora",
    )


def run(args: argparse.Namespace) -> None:
    """Serve until a signal ends it. Raises `InputError`, also where the packages are missing."""
    args.model = args.model if args.model_tag is None else args.model_tag
    options = server_options(args)
    engine = engine_options(args)
    config = config_of(engine)  # mistakes are reported before anything heavy is loaded
    if options.lora_modules or options.enable_lora_updates:
        check("enable_lora", config.enable_lora, "True for adapters", config.enable_lora)
    require(SERVER_NEEDS, "serve")

    from jaxpaged.api.async_llm import AsyncLLM
    from jaxpaged.api.llm import LLM
    from jaxpaged.serve import server

    if config.process_id:  # works for process 0, which listens; ends by `SystemExit`
        AsyncLLM(args.model, **engine)
    bound = server.bind(options)
    log_to_stderr(args.verbose)
    server.log_to_stderr(options.log_level)
    if not (options.is_on_loopback or options.api_keys):
        write_stderr(f"jaxpaged: anybody who reaches {options.host} may use the model: there is no --api-key")
    with bound:
        made = LLM(args.model, **engine, **_pooling_options(args))
        llm = AsyncLLM.of(made) if made.pooling is None else made.pooling
        name = (options.served_model_names or (args.model,))[0]
        server.run(llm, str(args.model), options, bound, lambda url: print(_ready(url, name), flush=True))


def _pooling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for the `LLM` of a pooling model. Raises `InputError` for text that is no
    JSON object.
    """
    from jaxpaged.untrusted import read_json  # imports NumPy

    options: dict[str, Any] = {"runner": args.runner}
    if (text := args.pooler_config) is not None:
        options["pooler_config"] = read_json(text)
        check("--pooler-config", text, "a JSON object", isinstance(options["pooler_config"], dict))
    return options


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options given; the others keep their defaults. Raises `InputError`.

    Lists may be in JSON, as for vLLM: `--allowed-origins '["*"]'`; adapters are objects there.
    """
    given = {name: getattr(args, name, None) for name in ServerOptions.__dataclass_fields__}
    for name, values in given.items():
        if isinstance(values, list):
            given[name] = [text for value in values for text in _texts(name, value)]
    if given["api_keys"] is None and os.environ.get(KEY_VARIABLE):
        given["api_keys"] = [os.environ[KEY_VARIABLE]]
    if given["chat_template"] is not None:
        file = given["chat_template"]
        try:
            given["chat_template"] = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"--chat-template {file!r} cannot be read: {error}") from error
    made: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }
    return ServerOptions(**made)


def _texts(name: str, text: str) -> list[str]:
    """Return the texts of one value of a list: the value itself, or the texts of a JSON list."""
    if not text.startswith(("[", "{")):
        return [text]
    try:
        said = json.loads(text)
        items = said if isinstance(said, list) else [said]
        return [item if isinstance(item, str) else f"{item['name']}={item['path']}" for item in items]
    except (ValueError, KeyError, TypeError, RecursionError):
        rule = "texts, JSON lists of texts, or for adapters objects with a name and a path"
        raise InputError(f"{name}={shown(text)} must be {rule}") from None


def _ready(url: str, model: str) -> str:
    return f"jaxpaged serves {model} at {url}/v1, and shows itself at {url}"
