"""Documents: code blocks run or are checked, and every path, name, command and flag in them exists.

Python blocks of a page run in order, in one namespace and in a folder of their own. There, engines take a
tiny model in place of the model that a page names (`MODELS`), with the sizes of `tests.tiny`, so that all
share one compiled program. A block after `<!-- not run: REASON -->` is checked only. Commands are parsed
by the parsers that read them.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import sys
import tomllib
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.api import llm as llm_module
from jaxpaged.api.arg_utils import OF_LLM
from jaxpaged.config import EngineConfig
from jaxpaged.memory.policies import POLICIES
from jaxpaged.research.lab.belady import LAB_POLICIES
from jaxpaged.status import Status
from pallas_kernels.layouts import LAYOUTS
from tests import tiny, tiny_lora
from tests.lab import tracing
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MODELS = {"smollm2": "tiny.gguf", "Qwen3-Embedding-0.6B": ROOT / "tests" / "goldens" / "pooling" / "qwen3"}
# Pages whose engines share no program with other tests.
SLOW = {
    "docs/research/attention.md",
    "docs/research/layer_kinds.md",
    "docs/research/processors.md",
    "docs/research/sampler.md",
    "docs/research/lab.md",
    "docs/guides/adapters.md",
    "docs/concepts/layouts.md",
    "docs/guides/pooling.md",
    "docs/guides/speculation.md",
    "docs/guides/structured.md",
    "docs/guides/streams.md",
}
LANGUAGES = {"python", "sh", "json", "text"}
NOT_INSTALLED = {"ray", "torch", "tunix"}  # what may be missing where the tests run
NEEDING_THEM = ("jaxpaged.batch.ray", "jaxpaged.research.integrations.tunix")
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```(?P<language>\w*)\n(?P<source>.*?)^```$", re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its source, and why it is not run, if it is not."""

    page: Path
    line: int
    language: str
    source: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("source")) + 1,
            found["language"],
            found["source"],
            found["why"],
        )
        for found in BLOCK.finditer(text)
    ]


def of_language(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def pages_to_run() -> list[Any]:
    """Return the pages with a Python block that runs; those in `SLOW` are marked so."""
    found = {str(block.page.relative_to(ROOT)) for block in of_language("python") if block.why_not is None}
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in sorted(found)]


@pytest.fixture
def workplace(tmp_path, monkeypatch, request):
    """Make a folder with what pages name, and let engines be tiny, with programs that other tests have."""
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "trace.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in tracing.conversations(40))
    )
    (tmp_path / "adapters").mkdir()
    tiny_lora.write(tmp_path / "adapters" / "poet", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    make = llm_module.LLM.__init__

    def make_tiny(self, model="smollm2", **options):
        sizes = dict(tiny.DEFAULTS)
        has_automata = "structured.md" in request.node.name or options.get("structured_outputs_mib")
        if options.get("enable_lora") or has_automata:
            sizes |= tiny_lora.LORA
        if options.get("runner") == "pooling":
            sizes = {"dtype": "float32", "max_num_seqs": 4, "block_size": 8, "keep_programs": False}
        made.append(self)
        make(self, MODELS[str(model)], **options | sizes)

    made: list[Any] = []
    registries = [(registry, dict(registry)) for registry in (LAYOUTS, LAB_POLICIES)]
    tiny.replace(monkeypatch, llm_module.LLM, "__init__", make_tiny)
    yield tmp_path
    for registry, before in registries:
        registry.clear()
        registry.update(before)
    for llm in made:
        if "engine" in vars(llm):
            llm.engine.close()


@pytest.mark.parametrize("name", pages_to_run())
def test_the_python_blocks_of_a_page_run(name, workplace, monkeypatch):
    module = types.ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", module)
    for block in blocks(ROOT / name):
        if block.language == "python" and block.why_not is None:
            exec(compile("\n" * block.line + block.source, str(block), "exec"), vars(module))


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_the_names_that_a_python_block_imports_exist(block):
    for node in ast.walk(ast.parse(block.source)):
        if isinstance(node, ast.Import):
            modules, names = [alias.name for alias in node.names], []
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module or ""], [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            if top in NOT_INSTALLED or (block.why_not and module in NEEDING_THEM):
                continue
            for name in names:
                assert resolves(f"{module}.{name}"), f"{block}: {module}.{name}"
            assert importlib.util.find_spec(module) is not None, f"{block}: {module}"


def test_every_block_has_a_known_language_and_markers_stand_before_blocks():
    for name, page in zip(NAMES, PAGES, strict=True):
        assert {block.language for block in blocks(page)} <= LANGUAGES, name
        markers = page.read_text().count("<!-- not run: ") - page.read_text().count("`<!-- not run: ")
        assert markers == sum(block.why_not is not None for block in blocks(page)), name


def test_json_blocks_are_json():
    for block in of_language("json"):
        for line in block.source.splitlines():
            json.loads(line)


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command, without variables, redirections and comments."""
    found = []
    for line in block.source.replace("\\\n", " ").splitlines():
        for part in re.split(r"\s&&\s", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            if ">" in words:
                words = words[: words.index(">")]
            if words:
                found.append(words)
    return found


@pytest.mark.parametrize("block", of_language("sh"), ids=str)
def test_commands_exist_with_their_flags(block):
    for words in commands(block):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Check a command's name, and its flags by the parser that reads them."""
    program, *rest = words
    if program == "jaxpaged":
        assert cli.parser().parse_args(rest).command
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest[0] in targets, words
    elif program == "pip":
        check_pip(rest)
    elif program == "curl":
        check_curl(rest)
    elif program.endswith("python") and rest[0] == "-m":
        check_module(rest[1], rest[2:])
    elif program.endswith("python") or program == "sh":
        file = ROOT / rest[0]
        assert file.exists(), words
        if program == "sh":
            assert all(flag in file.read_text() for flag in rest[1:]), words
    else:
        assert program in {"unzip", "source", "pre-commit"}, words


def check_pip(rest: list[str]) -> None:
    """Check that the extras of this package that pip is to install exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert rest[0] in ("install", "download"), rest
    for extra in re.findall(r"^\.\[(.+)\]$", "\n".join(rest), re.M):
        assert set(extra.split(",")) <= set(extras), rest


def check_curl(rest: list[str]) -> None:
    """Check that the server has the route, and that the body is JSON."""
    url = next(word for word in rest if word.startswith("localhost"))
    source = "".join(file.read_text() for file in (ROOT / "jaxpaged" / "serve").glob("*.py"))
    assert f'"/{url.partition("/")[2].partition("?")[0]}"' in source, url
    if "-d" in rest:
        json.loads(rest[rest.index("-d") + 1])


def check_module(module: str, flags: list[str]) -> None:
    """Check that a module exists and that its source names the flags."""
    if module == "pytest":
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    source = Path(spec.origin).read_text()
    if Path(spec.origin).name == "__init__.py":
        source += Path(spec.origin).with_name("__main__.py").read_text()
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            name = flag.removeprefix("--").partition("=")[0]
            assert re.search(rf"\b{name.replace('-', '[-_]')}\b", source), (module, flag)


def resolves(dotted: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one, or a field of a class."""
    parts = dotted.split(".")
    for number in range(len(parts), 0, -1):
        name = ".".join(parts[:number])
        try:
            with warnings.catch_warnings(
                action="ignore"
            ):  # of others' packages: Ray's, where it comes in first
                value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and name.startswith(error.name):
                continue
            return (error.name or "").split(".")[0] in NOT_INSTALLED
        for attribute in parts[number:]:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # an old name
                if not hasattr(value, attribute):
                    return attribute in getattr(value, "__dataclass_fields__", {})
                value = getattr(value, attribute)
        return True
    return False


TICKED = re.compile(r"`([^`\n]+)`")
A_PATH = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|jsonl|cc|sh|json)|(?:[\w.-]+/)+")
OURS = (
    "jaxpaged/",
    "pallas_kernels/",
    "reference/",
    "tests/",
    "benchmarks/",
    "docs/",
    "examples/",
    "deploy/",
)


def is_others(path: str) -> bool:
    """Return whether a path in a page names a file of the reader's or of a model's, or a page on the web."""
    if path.startswith(OURS):
        return False
    of_data = path.endswith((".json", ".jsonl"))
    return of_data or path.startswith(("my_", "mine")) or path in ("original/", "site/")


@pytest.mark.parametrize("name", NAMES)
def test_paths_and_dotted_names_exist(name):
    text = BLOCK.sub("", (ROOT / name).read_text())
    for found in TICKED.findall(text):
        if test := re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)", found):
            assert f"def {test[2]}(" in (ROOT / test[1]).read_text(), found
        for word in re.findall(r"[\w./-]+", found):
            word = word.rstrip(".")
            if A_PATH.fullmatch(word) and not is_others(word):
                folders = ROOT, (ROOT / name).parent, ROOT / "benchmarks"
                assert any((folder / word).exists() for folder in folders), word
            elif re.fullmatch(r"(?:reference|benchmarks|tests|examples)(?:\.\w+)+", word):
                file = ROOT / word.replace(".", "/")
                assert file.is_dir() or file.with_suffix(".py").exists(), word
            elif re.fullmatch(r"(?:jaxpaged|pallas_kernels)(?:\.\w+)+", word):
                assert resolves(word), word
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert ((ROOT / name).parent / link).exists(), link
    for identifier in re.findall(r"^::: (\S+)$", text, re.M):
        assert resolves(identifier), identifier


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) < 10_000


def sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence of a page's prose: without blocks, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", BLOCK.sub("", text), flags=re.S)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!", ":::"))]
    prose = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", "\n".join(lines), flags=re.M)
    found = []
    for paragraph in re.split(r"\n\s*\n", prose):
        flat = re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split()))
        flat = re.sub(r"`[^`]*`", "code", flat)
        found += [
            sentence.split()
            for sentence in re.split(r"(?<=[.:!?])[*)\]]*\s+(?=[A-Z\[*`(])", flat)
            if sentence
        ]
    return [words for words in found if len(words) > 2]


@pytest.mark.parametrize("name", NAMES)
def test_sentences_are_short(name):
    lengths = [len(words) for words in sentences((ROOT / name).read_text())]
    assert not lengths or sum(lengths) / len(lengths) < 18


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["generation", "verification", pytest.param("research", marks=pytest.mark.nightly)]
)
def test_an_example_runs_and_draws(name, workplace, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--out", str(workplace)])
    runpy.run_module(f"examples.{name}", run_name="__main__")
    drawn = {file.name for file in workplace.glob("*.png")}
    page = (ROOT / "docs" / "research" / "examples.md").read_text()
    assert drawn == set(re.findall(rf"drawings/({name}\w*\.png)", page))


def hooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_and_the_options_are_complete():
    made = hooks()
    code_map = made.code_map()
    for package in made.PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if file.name != "__init__.py":
                assert f"`{file.name}`" in code_map, file
    options = made.engine_options()
    assert re.findall(r"^\| `(\w+)` ", options, re.M) == list(EngineConfig.__dataclass_fields__)
    assert not re.findall(r"^.*\|\s*\|$", options, re.M), "an option without a meaning"
    renewed = made.with_options(made.GUIDE.read_text())
    assert made.GUIDE.read_text() == renewed, "run python docs/hooks.py options"
    assert not [name for name in OF_LLM if f"`{name}`" not in renewed]


def test_the_contract_of_pools_has_all_codes_and_policies():
    text = (ROOT / "docs" / "research" / "verify.md").read_text()
    codes = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.M)
    known = {"OK": 0} | {status.name: status.value for status in Status}
    assert {name: int(code) for code, name in codes} == known
    assert re.findall(r"^\| `(\w+)` \| the (?:highest|lowest) id", text, re.M) == list(POLICIES)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(name.removeprefix("docs/") for name in NAMES if name.startswith("docs/"))
