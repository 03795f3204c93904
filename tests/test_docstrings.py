"""Docstrings stand alone: they start with a verb for functions and with a noun for the rest."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxpaged", "pallas_kernels", "reference", "benchmarks", "examples", "tests")
# What continues a sentence that is not there.
FRAGMENTS = {
    "Of",
    "That",
    "Those",
    "This",
    "These",
    "It",
    "Its",
    "They",
    "With",
    "Without",
    "Same",
    "And",
    "Nor",
    "Not",
    "Or",
    "But",
    "So",
    "As",
    "By",
    "In",
    "On",
    "At",
    "From",
    "To",
    "Into",
    "Until",
    "While",
    "Beside",
    "Because",
    "Likewise",
    "Also",
}
# What starts a clause that describes a value; a noun says it.
CLAUSES = {"What", "How", "Where", "Who", "Which", "When", "Why", "If"}
# First words of functions: the imperative.
VERBS = {*(ROOT / "tests" / "verbs.txt").read_text().split()}


def room_of(file: Path) -> str:
    """Return the folder, two levels deep at most, that a file lies in."""
    return "/".join(file.relative_to(ROOT).parts[:-1][:2])


def rooms() -> list[str]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted({room_of(file) for file in files})


def fault(node: ast.AST, docstring: str) -> str | None:
    """Return what is wrong with the first word of a docstring; None if nothing is."""
    word = docstring.split()[0].rstrip(",.:;")
    if word in FRAGMENTS or docstring.startswith("The same "):
        return "it continues a sentence that is not there"
    if isinstance(node, ast.ClassDef | ast.Module):
        return "it must start with a noun" if word in CLAUSES else None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if node.name.startswith("test_"):
        return None
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return "it must start with a noun, or with Whether" if word in CLAUSES else None
    return None if word in VERBS else "it must start with a verb of tests/verbs.txt"


@pytest.mark.parametrize("room", rooms())
def test_a_docstring_stands_alone(room):
    faults = []
    for file in sorted((ROOT / room).rglob("*.py")):
        if room_of(file) != room:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and (why := fault(node, docstring)):
                    line = getattr(node, "lineno", 1)
                    faults.append(f"{file.relative_to(ROOT)}:{line}: {docstring.splitlines()[0]!r}: {why}")
    assert not faults, f"{len(faults)} docstrings:\n" + "\n".join(faults)
