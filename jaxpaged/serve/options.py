"""Options of the server, checked once. Imports nothing heavy: the command line reads it."""

import dataclasses
import ipaddress
import os
from typing import Literal, get_args

from jaxpaged.checks import check, checked_bool, checked_choice, checked_int, checked_number
from jaxpaged.serve.parsers import REASONING_PARSERS, TOOL_PARSERS
from jaxpaged.text.templates import CONTENT_FORMATS, ContentFormat

LogLevel = Literal["debug", "info", "warning", "error"]
TOOL_PARSER_NAMES = ("auto", *sorted(TOOL_PARSERS))
REASONING_PARSER_NAMES = ("auto", "none", *sorted(REASONING_PARSERS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Raises `InputError` for a value out of its range."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    api_keys: tuple[str, ...] = ()  # () asks for none
    served_model_names: tuple[str, ...] = ()  # (): the model's
    chat_template: str | None = None  # its text; None: the model's own
    # "auto": as a list of parts where the template reads nothing else, otherwise as one text
    chat_template_content_format: ContentFormat = "auto"
    tool_call_parser: str = "auto"  # how the model writes calls; auto: as its template shows
    reasoning_parser: str = "auto"  # how it writes reasoning; auto: that of gpt-oss is read, no other
    max_queue: int = 1000  # answers that may wait beside those that run: more are refused with 429
    max_body_bytes: int = 4 * 2**20
    max_nesting: int = 64  # objects and lists in one another, in a body
    max_head_bytes: int = 64 * 2**10  # a request's line, headers and body framing
    max_connections: int = 4096  # an eighth of them without a complete head
    head_timeout_s: float = 10.0  # to receive a request's line and headers
    body_timeout_s: float = 30.0  # to receive a body
    request_timeout_s: float = 600.0  # from a request to the end of its answer
    drain_seconds: float = 30.0  # after SIGTERM, for what runs
    max_unread_bytes: int = 2**20  # bytes of a stream that its client has not read
    max_pinned_tokens: int | None = None  # that requests may have kept; None: half of host memory's tier
    allowed_hosts: tuple[str, ...] = ()  # names to be asked by, beside this machine's own; "*": any
    allowed_origins: tuple[str, ...] = ()  # sites whose pages may read the answers; "*": all
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    lora_modules: tuple[str, ...] = ()  # adapters, each as "name=path"; asked for by that name, as a model
    enable_lora_updates: bool = False  # clients may have adapters loaded and unloaded
    enable_weight_updates: bool = False  # clients with a key may pause the engine, and change its weights
    weights_root: str | None = None  # directory under which paths of clients lie; None: they have none
    max_weight_bytes: int | None = None  # of the bodies of an update; None: the weights in float32 and 16 MiB
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        for name in (
            "api_keys",
            "served_model_names",
            "allowed_hosts",
            "allowed_origins",
            "lora_modules",
        ):
            values = getattr(self, name)
            check(name, values, "texts that are not empty", all(isinstance(v, str) and v for v in values))
        checked_int("port", self.port, "an int in [0, 65535]", 0, 65535)
        checked_int("max_queue", self.max_queue, "an int >= 0", 0)
        checked_int("max_body_bytes", self.max_body_bytes, "an int >= 1024", 1024)
        checked_int("max_nesting", self.max_nesting, "an int in [8, 256]", 8, 256)
        checked_int("max_head_bytes", self.max_head_bytes, "an int in [1024, 2**20]", 1024, 2**20)
        checked_int("max_connections", self.max_connections, "an int >= 8", 8)
        checked_int("max_unread_bytes", self.max_unread_bytes, "an int >= 1024", 1024)
        if self.max_pinned_tokens is not None:
            checked_int("max_pinned_tokens", self.max_pinned_tokens, "an int >= 0", 0)
        for name in ("head_timeout_s", "body_timeout_s", "request_timeout_s", "drain_seconds"):
            checked_number(name, getattr(self, name), "a number > 0", 0, above=True)
        checked_choice("log_level", self.log_level, get_args(LogLevel))
        checked_choice("tool_call_parser", self.tool_call_parser, TOOL_PARSER_NAMES)
        checked_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSER_NAMES)
        checked_choice("chat_template_content_format", self.chat_template_content_format, CONTENT_FORMATS)
        checked_bool("allow_credentials", self.allow_credentials)
        checked_bool("enable_lora_updates", self.enable_lora_updates)
        checked_bool("enable_weight_updates", self.enable_weight_updates)
        has_key = bool(self.api_keys) or not self.enable_weight_updates
        check("api_keys", self.api_keys, "given with enable_weight_updates: who has one may do so", has_key)
        for name in ("weights_root", "max_weight_bytes"):
            value = getattr(self, name)
            is_used = value is None or self.enable_weight_updates
            check(name, value, "left out without enable_weight_updates", is_used)
        if self.weights_root is not None:
            check("weights_root", self.weights_root, "a directory", os.path.isdir(self.weights_root))
        if self.max_weight_bytes is not None:
            checked_int("max_weight_bytes", self.max_weight_bytes, "an int >= 1024", 1024)
        rule = "as in name=path, each name once and none of served_model_names"
        names = [*self.served_model_names]
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            check("lora_modules", module, rule, bool(name and path) and name not in names)
            names.append(name)

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"
