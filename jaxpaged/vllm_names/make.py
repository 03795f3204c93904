"""Reads vLLM's source distributions, and writes down the names that its doors take: `names.json`.

    python -m jaxpaged.vllm_names.make vllm-0.9.2.tar.gz ... vllm-0.33.0.tar.gz

Give several versions, so that the table knows since when, and until when, a name is there. The archives are
those of the package index (`pip download --no-deps --no-binary :all: vllm==0.33.0`). Their code is parsed and
never run, and nothing of vLLM is needed otherwise.
"""

import ast
import dataclasses
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = Path(__file__).with_name("names.json")
# What is written down under one title: classes, and functions as "Class.function", of any version.
SOURCES = {
    "EngineArgs": ("EngineArgs", "AsyncEngineArgs", "LLM.__init__"),
    "FrontendArgs": ("FrontendArgs", "BaseFrontendArgs"),
    "SamplingParams": ("SamplingParams", "SamplingParams.from_optional", "SamplingParams.__init__"),
    "BeamSearchParams": ("BeamSearchParams",),
    "ChatCompletionRequest": ("ChatCompletionRequest",),
    "CompletionRequest": ("CompletionRequest",),
    "ResponsesRequest": ("ResponsesRequest",),
    "StreamOptions": ("StreamOptions",),
    "TokenizeRequest": ("TokenizeCompletionRequest", "TokenizeChatRequest", "TokenizeRequest"),
    "DetokenizeRequest": ("DetokenizeRequest",),
    "LoadLoRAAdapterRequest": ("LoadLoRAAdapterRequest", "LoadLoraAdapterRequest"),
    "UnloadLoRAAdapterRequest": ("UnloadLoRAAdapterRequest", "UnloadLoraAdapterRequest"),
    "EmbeddingRequest": ("EmbeddingRequest", "EmbeddingCompletionRequest", "EmbeddingChatRequest"),
    "PoolingRequest": ("PoolingCompletionRequest", "PoolingChatRequest"),
    "ClassificationRequest": (
        "ClassificationRequest",
        "ClassificationCompletionRequest",
        "ClassificationChatRequest",
    ),
    "ScoreRequest": (
        "ScoreRequest",
        "ScoreTextRequest",
        "ScoreDataRequest",
        "ScoreQueriesDocumentsRequest",
        "ScoreQueriesItemsRequest",
    ),
    "RerankRequest": ("RerankRequest",),
}
# Where they are defined, and the configs that give some of them their defaults.
READ = (
    "vllm/sampling_params.py",
    "vllm/beam_search.py",
    "vllm/pooling_params.py",
    "vllm/engine/arg_utils.py",
    "vllm/config",
    "vllm/entrypoints",
)
# Files whose `add_argument("--name", ...)` are flags of the server's command line.
FLAG_FILES = ("entrypoints/openai/cli_args.py", "entrypoints/common/cli_args.py", "entrypoints/cli/serve.py")
# Modules from which scripts import names.
SCRIPTED = frozenset(
    [
        "config",
        "config.kv_transfer",
        "config.pooler",
        "config.profiler",
        "distributed",
        "distributed.parallel_state",
        "engine.arg_utils",
        "engine.protocol",
        "entrypoints.launchers.launcher",
        "entrypoints.llm",
        "entrypoints.pooling.utils",
        "entrypoints.serve.utils.api_utils",
        "envs",
        "inputs",
        "inputs.llm",
        "logger",
        "logprobs",
        "lora.request",
        "outputs",
        "platforms",
        "pooling_params",
        "sampling_params",
        "sequence",
        "tokenizers",
        "usage.usage_lib",
        "utils",
        "utils.network_utils",
        "utils.print_utils",
        "utils.serial_utils",
        "utils.system_utils",
        "v1.core.kv_cache_utils",
        "v1.engine.async_llm",
        "v1.engine.exceptions",
        "v1.engine.llm_engine",
        "v1.metrics.reader",
        "version",
    ]
) | {""}  # the package itself
# Files with the classes that scripts call, and those classes: their methods and fields are written down.
SIGNED_FILES = (
    "vllm/entrypoints",
    "vllm/v1/engine",
    "vllm/outputs.py",
    "vllm/logprobs.py",
    "vllm/sampling_params.py",
    "vllm/pooling_params.py",
    "vllm/beam_search.py",
)
SIGNED = (
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "LLM",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
)
# No names of users: of the classes themselves.
INTERNAL = ("model_config", "field_names")


@dataclasses.dataclass
class Field:
    """One name as a version has it."""

    kind: str  # "flag", "list" or "value": what its option of the command line takes
    default: Any = None
    has_default: bool = True  # False: required, or made by code that cannot be told from the text


@dataclasses.dataclass
class Version:
    """Definitions in the source text of one version."""

    classes: dict[str, list[ast.ClassDef]] = dataclasses.field(default_factory=dict)
    flags: dict[str, Field] = dataclasses.field(default_factory=dict)
    short: dict[str, str] = dataclasses.field(default_factory=dict)

    def fields(self, name: str) -> dict[str, Field]:
        """Return the fields of a class and its bases, or the arguments of "Class.function"."""
        owner, _, function = name.partition(".")
        fields: dict[str, Field] = {}
        for node in self.classes.get(owner, []):
            if function:
                fields |= self._arguments(node, function)
                continue
            for base in reversed(node.bases):
                fields |= self.fields(_last_name(base)) if _last_name(base) != owner else {}
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    annotation = ast.unparse(each.annotation)
                    if "ClassVar" not in annotation:
                        fields[each.target.id] = self._field(annotation, each.value)
        return {name: each for name, each in fields.items() if name not in INTERNAL and name[0] != "_"}

    def _arguments(self, node: ast.ClassDef, name: str) -> dict[str, Field]:
        fields = {}
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == name:
                args = each.args
                plain = [*args.posonlyargs, *args.args]
                defaults = [None] * (len(plain) - len(args.defaults)) + [*args.defaults, *args.kw_defaults]
                for arg, default in zip([*plain, *args.kwonlyargs], defaults, strict=True):
                    if arg.arg not in ("self", "cls"):
                        annotation = ast.unparse(arg.annotation) if arg.annotation else ""
                        fields[arg.arg] = self._field(annotation, default)
        return fields

    def _field(self, annotation: str, default: ast.expr | None) -> Field:
        made = Field(_kind(annotation))
        made.default, made.has_default = self._value(default)
        return made

    def _value(self, node: ast.expr | None) -> tuple[Any, bool]:
        """Return a default, and whether the text tells it."""
        if node is None:
            return None, False
        try:
            value = ast.literal_eval(node)
            return (sorted(value) if isinstance(value, set) else value), True
        except ValueError:
            pass
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # SomeConfig.some_field
            field = self.fields(node.value.id).get(node.attr)
            return (field.default, field.has_default) if field is not None else (None, False)
        if not isinstance(node, ast.Call):
            return None, False
        called = _last_name(node.func)
        if called in ("get_field", "_get_field") and len(node.args) == 2:
            field = self.fields(_last_name(node.args[0])).get(str(ast.literal_eval(node.args[1])))
            return (field.default, field.has_default) if field is not None else (None, False)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in ("Field", "field"):
            if "default_factory" in given:
                kind = {"list": list, "dict": dict, "set": list}.get(_last_name(given["default_factory"]))
                return (kind() if kind else None), kind is not None
            return self._value(given.get("default", node.args[0] if node.args else None))
        return None, False

    def read_flags(self, tree: ast.AST, *, is_server: bool) -> None:
        """Note the options that are added to a command line: their short names, and the server's own."""
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and _last_name(node.func) == "add_argument"):
                continue
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            long = [text[2:].replace("-", "_") for text in texts if text.startswith("--")]
            self.short |= {text: long[0] for text in texts if long and not text.startswith("--")}
            if is_server and long:
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                action = ast.unparse(given["action"]) if "action" in given else ""
                is_flag = "store_true" in action or "BooleanOptional" in action
                made = Field("flag" if is_flag else "list" if "nargs" in given else "value")
                made.default, made.has_default = self._value(given.get("default"))
                if is_flag and "default" not in given:
                    made.default, made.has_default = False, True
                self.flags[long[0]] = made


def read(archive: Path) -> Version:
    """Parse the files of `READ` in a source distribution."""
    version = Version()
    with tarfile.open(archive) as files:
        for member in files:
            path = member.name.partition("/")[2]
            file = files.extractfile(member) if path.startswith(READ) and path.endswith(".py") else None
            if file is None:
                continue
            tree = ast.parse(file.read(), filename=path)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    version.classes.setdefault(node.name, []).append(node)
            if path.startswith("vllm/engine") or path.endswith(FLAG_FILES):
                version.read_flags(tree, is_server=path.endswith(FLAG_FILES))
    return version


def modules(archive: Path) -> dict[str, list[str]]:
    """Return vLLM's modules, no deeper than two levels below its package, with the public names of each.

    Names are classes, functions and constants, and in a package what it imports, too. They are kept for
    modules that scripts import from, those of `SCRIPTED`, at any depth.
    """
    names: dict[str, list[str]] = {}
    with tarfile.open(archive) as files:
        for member in files:
            path = member.name.partition("/")[2]
            if not path.startswith("vllm/") or not path.endswith(".py"):
                continue
            parts = path.removesuffix(".py").removesuffix("/__init__").split("/")[1:]
            name = ".".join(parts[:2])
            names.setdefault(name, [])
            whole = ".".join(parts)
            if whole in SCRIPTED and (file := files.extractfile(member)):
                tree = ast.parse(file.read(), filename=path)
                names[whole] = sorted(set(_public_names(tree, is_package=path.endswith("__init__.py"))))
    return names


def signatures(archive: Path) -> dict[str, dict[str, str | None]]:
    """Return the public methods of the classes of `SIGNED`, with their arguments as Python writes them.

    Types are left out. A property or a field has None. What a base has comes first.
    """
    classes: dict[str, ast.ClassDef] = {}
    with tarfile.open(archive) as files:
        for member in files:
            path = member.name.partition("/")[2]
            file = (
                files.extractfile(member) if path.startswith(SIGNED_FILES) and path.endswith(".py") else None
            )
            for node in ast.walk(ast.parse(file.read())) if file is not None else ():
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, node)
    return {name: dict(_members(name, classes)) for name in SIGNED if name in classes}


def names_of(arguments: str) -> list[str]:
    """Return the names of arguments as Python writes them."""
    [function] = ast.parse(f"def f({arguments}): ...").body
    assert isinstance(function, ast.FunctionDef)
    parameters = function.args
    return [each.arg for each in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)]


def _members(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[tuple[str, str | None]]:
    for base in reversed(classes[name].bases):
        if _last_name(base) in classes:
            yield from _members(_last_name(base), classes)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and (field := ast.unparse(node.target))[0] != "_":
            yield field, None
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        args = _arguments(node.args)
        if node.name == "__init__" and "Output" in name:  # its arguments are its fields
            yield from dict.fromkeys(names_of(args)).items()
        elif node.name[0] != "_":
            is_property = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
            yield node.name, None if is_property else args


def _arguments(args: ast.arguments) -> str:
    """Return a method's arguments behind the object, without types."""
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if each is not None:
            each.annotation = None
    text = ast.unparse(args)
    first, _, others = text.partition(", ")
    return others if first in ("self", "cls") else text


def _public_names(tree: ast.Module, *, is_package: bool) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from (name for name in _listed(node.value) if not name.startswith("_"))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        elif is_package and isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        yield from (name for name in names if name[0] not in "_*" and name != "logger")


def _listed(node: ast.expr) -> list[str]:
    try:
        return list(ast.literal_eval(node))
    except ValueError:  # made by code
        return []


def table(archives: list[Path]) -> dict[str, Any]:
    """Return the content of `names.json` made from these archives, from the oldest version to the newest."""
    names: dict[str, dict[str, dict[str, Any]]] = {title: {} for title in SOURCES}
    short: dict[str, str] = {}
    versions = [archive.name.removeprefix("vllm-").removesuffix(".tar.gz") for archive in archives]
    for number, archive in zip(versions, archives, strict=True):
        version = read(archive)
        short |= version.short
        for title, sources in SOURCES.items():
            fields = dict(version.flags) if title == "FrontendArgs" else {}
            for source in reversed(sources):
                fields |= version.fields(source)
            for name, field in fields.items():
                entry = names[title].setdefault(name, {"since": number})
                entry |= {"last": number, "kind": field.kind}
                entry.pop("default", None)
                if field.has_default:
                    entry["default"] = field.default
    for entries in names.values():
        for entry in entries.values():
            if entry["last"] == versions[-1]:
                del entry["last"]
    made = {"versions": versions, "short": dict(sorted(short.items())), "names": names}
    calls = signatures(archives[-1])
    names_alone = {
        title: {name: None if text is None else names_of(text) for name, text in members.items()}
        for title, members in calls.items()
    }
    return made | {"modules": modules(archives[-1]), "signatures": names_alone, "calls": calls}


def lines(made: dict[str, Any]) -> Iterator[str]:
    """Yield the file's lines: one a name, so that a change of vLLM's is a line of a diff."""
    yield "{"
    for key in ("versions", "short"):
        yield f" {json.dumps(key)}: {json.dumps(made[key])},"
    yield ' "names": {'
    titles = [*made["names"].items()]
    for title, entries in titles:
        yield f"  {json.dumps(title)}: {{"
        rows = [f"   {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
        yield ",\n".join(rows)
        yield "  }" if title == titles[-1][0] else "  },"
    yield " },"
    yield ' "modules": {'
    yield from _rows(made["modules"], "  ")
    yield " },"
    for key in ("signatures", "calls"):
        yield f" {json.dumps(key)}: {{"
        classes = [*made[key].items()]
        for name, members in classes:
            yield f"  {json.dumps(name)}: {{"
            row_entries = {each: said for each, said in members.items() if key == "signatures" or said}
            yield from _rows(row_entries, "   ")
            yield "  }" if name == classes[-1][0] else "  },"
        yield " }," if key == "signatures" else " }"
    yield "}"


def _rows(entries: dict[str, Any], margin: str) -> Iterator[str]:
    yield ",\n".join(f"{margin}{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))


def _kind(annotation: str) -> str:
    parts = {part.strip() for part in annotation.replace("Optional[", "").rstrip("]").split("|")}
    if parts - {"None"} == {"bool"}:
        return "flag"
    is_list = any(re.match(r"(list|set|List|Set|Sequence)\b", part) for part in parts)
    return "list" if is_list else "value"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _order(archive: Path) -> list[int]:
    number = archive.name.removeprefix("vllm-").removesuffix(".tar.gz")
    return [int(part) for part in number.split(".") if part.isdigit()]


if __name__ == "__main__":
    given = sorted(map(Path, sys.argv[1:]), key=_order)
    if not given:
        sys.exit(__doc__)
    NAMES.write_text("\n".join(lines(table(given))) + "\n")
