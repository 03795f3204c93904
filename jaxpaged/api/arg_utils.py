"""EngineArgs: the options of `LLM` as an object, and as flags of a command line. Imports nothing heavy.

vLLM's scripts build an engine from one: `LLM.from_engine_args`, `LLMEngine.from_engine_args` and
`AsyncLLM.from_engine_args` take it, and `LLM(**dataclasses.asdict(args))` is the same.
"""

import argparse
import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any, Self

from jaxpaged.config import EngineConfig
from jaxpaged.vllm_names import options as vllm_options
from jaxpaged.vllm_names.flags import json_or_text

DEFAULT_MODEL = "smollm2"
# What `LLM` takes beside the fields of `EngineConfig`.
OF_LLM: dict[str, tuple[Any, Any]] = {
    "model": (str, DEFAULT_MODEL),
    "tokenizer": (str | None, None),
    "skip_tokenizer_init": (bool, False),
    "revision": (str | None, None),
    "generation_config": (str, "auto"),
    "chat_template": (str | None, None),
    "record_trace": (str | None, None),
    "runner": (str, "auto"),
    "pooler_config": (Any, None),
    "hf_overrides": (Any, None),
    "rope_scaling": (Any, None),
    "rope_theta": (float | None, None),
    "load_format": (str, "auto"),
}
# vLLM's for engines of asyncio that a server makes: what they log.
OF_ASYNC: dict[str, tuple[Any, Any]] = {
    "enable_log_requests": (bool, False),
    "disable_log_requests": (bool, False),
}


def _fields() -> list[tuple[str, Any, Any]]:
    """Return name, type and default of each option of `LLM` and of `EngineConfig`, and of vLLM's further
    ones.
    """
    fields = dict(OF_LLM)
    hints = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        hint = hints[field.name]  # a layout, which may be an object, has a name, too
        fields[field.name] = str if hint is Any else hint, field.default
    for name, default in vllm_options.defaults().items():
        if name not in OF_ASYNC:
            fields.setdefault(name, (Any, default))
    return [(name, hint, _field(default)) for name, (hint, default) in fields.items()]


def _field(default: Any) -> Any:
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: default.copy())
    return dataclasses.field(default=default)


if TYPE_CHECKING:

    class _Fields:
        def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _Fields = dataclasses.make_dataclass("_Fields", _fields())


class EngineArgs(_Fields):
    """The options of `LLM` as a dataclass, which may be changed: they are checked when an engine is made.

    Fields are `model` and the other parameters of `LLM`, those of `EngineConfig`, and vLLM's options that
    change nothing here.
    """

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **options: Any) -> None:
            known = {field.name for field in dataclasses.fields(_Fields)}
            for name in options.keys() - known:
                raise vllm_options.unknown_option(name, [*OF_LLM, *EngineConfig.__dataclass_fields__])
            super().__init__(*args, **options)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `LLM`."""
        taken = {*OF_LLM, *EngineConfig.__dataclass_fields__, *vllm_options.defaults()} - OF_ASYNC.keys()
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # a dataclass made at run time
        return {field.name: getattr(self, field.name) for field in fields if field.name in taken}

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the options of a parsed command line; an option that it lacks keeps its default."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # as above
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    @classmethod
    def add_cli_args[Parser: argparse.ArgumentParser](cls, parser: Parser) -> Parser:
        """Add a flag for each option, such as `--max-num-seqs`, and return the parser.

        Flags of vLLM's that change nothing here are taken, too, and left out of the help. A flag that the
        parser has already stays as it is.
        """
        engine_options = {*OF_LLM, *EngineConfig.__dataclass_fields__}
        group = parser.add_argument_group("engine")
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # as above
            default = field.default
            if default is dataclasses.MISSING:
                assert field.default_factory is not dataclasses.MISSING
                default = field.default_factory()
            help_ = f"default: {default}" if field.name in engine_options else argparse.SUPPRESS
            flag = f"--{field.name.replace('_', '-')}"
            if flag in parser._option_string_actions:  # the script's own, which it added before
                continue
            group.add_argument(flag, default=default, help=help_, **_how(field.type))
            if field.type is Any:  # where vLLM's is on or off, it has a flag to turn it off
                off = f"--no-{field.name.replace('_', '-')}"
                group.add_argument(off, dest=field.name, action="store_false", help=argparse.SUPPRESS)
                parser.set_defaults(**{field.name: default})
        return parser


if TYPE_CHECKING:

    class AsyncEngineArgs(EngineArgs):
        """Options of `AsyncLLM`: those of `EngineArgs`, and vLLM's two about logs, which change nothing."""

        pass

else:

    class AsyncEngineArgs(
        dataclasses.make_dataclass(
            "_AsyncFields",
            [(name, hint, _field(default)) for name, (hint, default) in OF_ASYNC.items()],
            bases=(EngineArgs,),
        )
    ):
        """Options of `AsyncLLM`: those of `EngineArgs`, and vLLM's two about logs, which change nothing."""


def _how(hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag of this type."""
    kinds = {each for each in _members(hint) if each is not types.NoneType}
    plain = {each for each in kinds if typing.get_origin(each) is not typing.Literal} or kinds
    if plain == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if plain & {int, float}:
        return {"type": _number, "metavar": "N"}
    if hint is Any:
        return {"type": json_or_text, "nargs": "?", "const": True}
    if any(typing.get_origin(each) is tuple for each in plain):
        return {"type": int, "nargs": "+", "metavar": "N"}
    return {"metavar": "VALUE"}


def _members(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _number(text: str) -> Any:
    """Return the number that a text is; a text that is none, such as "auto", is for the engine to judge."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
