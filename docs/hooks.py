"""MkDocs hooks: fill in the parts of pages that come from the code.

A page holds a marker comment, and the hook puts text in its place:

- `<!-- include: FILE -->`: a Markdown file of the repository's root.
- `<!-- map -->`: every module with the first line of its docstring.

`python docs/hooks.py` prints the map. `python docs/hooks.py options` renews the table of the fields of
`EngineConfig` in the guide to them: it is in the file, so that it can be read there.
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxpaged", "pallas_kernels", "reference", "benchmarks")
CONFIG = ROOT / "jaxpaged" / "config.py"
GUIDE = ROOT / "docs" / "guides" / "engine.md"
CONTINUES = ("Of ", "auto:", "None:")  # beginnings of comments that do not stand alone


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's Markdown with its markers replaced."""
    here = PurePosixPath(page.file.src_uri).parent
    markdown = re.sub(r"<!-- include: (\S+) -->", lambda found: included(found[1], here), markdown)
    return markdown.replace("<!-- map -->", code_map()) if "\n<!-- map -->\n" in markdown else markdown


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
    """Return a Markdown table of the fields of `EngineConfig`: name, type, default and meaning.

    The meaning is the comment above the field, or the help of the option's flag, or both where the comment
    continues the help.
    """
    sys.path.insert(0, str(ROOT))
    from jaxpaged.config import EngineConfig  # it does not import JAX

    options = {field.name: field for field in dataclasses.fields(EngineConfig)}
    source = CONFIG.read_text()
    lines = source.splitlines()
    rows = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.ClassDef) and node.name == "EngineConfig"):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and (name := ast.unparse(field.target)) in options:
                option = options[name]
                help_ = (option.metadata.get("flag") or {}).get("help", "")
                help_ = re.sub(r" \(default:? [^()]*\)", "", help_)
                comment = comment_above(lines, field.lineno)
                texts = [help_, comment] if comment.startswith(CONTINUES) else [comment or help_]
                meaning = " ".join(f"{each[0].upper()}{each[1:].rstrip('.')}." for each in texts if each)
                kind = ast.unparse(field.annotation)
                cells = (f"`{name}`", f"`{kind}`", f"`{option.default!r}`", meaning)
                rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def with_options(guide: str) -> str:
    """Return the guide to the engine's options with the table that the code makes now."""
    above, _, below = guide.partition("<!-- engine options -->")
    rest = below.partition("<!-- end of engine options -->")[2]
    return f"{above}<!-- engine options -->\n{engine_options()}\n<!-- end of engine options -->{rest}"


def comment_above(lines: list[str], number: int) -> str:
    """Return the comment in the lines right above a line. Lines count from 1."""
    above: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("#"):
            break
        above.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(above)


if __name__ == "__main__":
    if sys.argv[1:] == ["options"]:
        GUIDE.write_text(with_options(GUIDE.read_text()))
    else:
        print(code_map())
