"""MkDocs hooks: fill in the parts of pages that come from the code.

A page holds a marker comment, and the hook puts text in its place:

- `<!-- include: FILE -->`: a Markdown file of the repository's root.
- `<!-- map -->`: every module with the first line of its docstring.
- `<!-- engine options -->`: the fields of `EngineConfig` with their defaults and comments.

`python docs/hooks.py` prints the map.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxpaged", "pallas_kernels", "reference", "benchmarks")
CONFIG = ROOT / "jaxpaged" / "config.py"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with its markers replaced."""
    here = PurePosixPath(page.file.src_uri).parent
    markdown = re.sub(r"<!-- include: (\S+) -->", lambda found: included(found[1], here), markdown)
    for marker, make in (("<!-- map -->", code_map), ("<!-- engine options -->", engine_options)):
        if f"\n{marker}\n" in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def included(name: str, here: PurePosixPath) -> str:
    """Return a file of the repository's root, with its links made relative to the folder of a page."""

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if target.startswith(("#", "http")):
            return found[0]
        if target.startswith("docs/"):
            return f"[{text}]({'../' * len(here.parts)}{target.removeprefix('docs/')})"
        return f"{text} (`{target}`)" if text != f"`{target}`" else text

    return re.sub(r"\[([^\]]*)\]\(([^)]+)\)", link, (ROOT / name).read_text())


def code_map() -> str:
    """Return a Markdown list of all modules, folder by folder, with their docstrings' first sentences."""
    return "\n".join(line for package in PACKAGES for line in _folder(ROOT / package, 2))


def _folder(folder: Path, level: int) -> Iterator[str]:
    own = folder / "__init__.py"
    yield f"\n{'#' * min(level, 4)} `{folder.relative_to(ROOT)}/`\n"
    if own.exists() and (sentence := first_sentence(own)):
        yield f"{sentence}\n"
    files = sorted(file for file in folder.glob("*.py") if file != own)
    if files:
        yield "| module | what it is |\n| --- | --- |"
    for file in files:
        yield f"| `{file.name}` | {first_sentence(file)} |"
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(below.glob("*.py")) and not below.is_symlink():
            yield from _folder(below, level + 1)


def first_sentence(file: Path) -> str:
    """Return the first line of a module's docstring, up to its first full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
    return re.split(r"(?<=[.])\s", first)[0]


def engine_options() -> str:
    """Return a Markdown table of the fields of `EngineConfig`: name, type, default and comment."""
    source = CONFIG.read_text()
    lines = source.splitlines()
    [config] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineConfig"
    ]
    rows = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in config.body:
        if isinstance(field, ast.AnnAssign) and field.value is not None:
            name, kind = ast.unparse(field.target), ast.unparse(field.annotation).replace("|", "\\|")
            meaning = comment_of(lines, field.lineno, field.end_lineno or field.lineno)
            rows.append(f"| `{name}` | `{kind}` | `{ast.unparse(field.value)}` | {meaning} |")
    return "\n".join(rows)


def comment_of(lines: list[str], first: int, last: int) -> str:
    """Return the comment on a field's lines, after the comment lines right above it. Lines count from 1."""
    above = []
    for line in reversed(lines[: first - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip())
    beside = [line.partition("  #")[2] for line in lines[first - 1 : last]]
    words = " ".join(text.strip().removeprefix("#").strip() for text in (*above, *beside) if text.strip())
    return words.replace("|", "\\|")


if __name__ == "__main__":
    print(code_map())
