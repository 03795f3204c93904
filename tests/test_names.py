"""Names of variables say what they are."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Pronouns and participles that stand for nothing where they are read.
EMPTY_NAMES = {"found", "its", "most", "own", "told"}
ROOMS = ("jaxpaged", "pallas_kernels", "reference")
# Rooms and files that are not held to it yet.
ROOMS_TO_FOLLOW = ("jaxpaged/handover/",)
TO_FOLLOW = {
    f"jaxpaged/{name}.py"
    for name in (
        *("engine/capacity", "engine/setup", "engine/start", "memory/kv_cache", "memory/transfer"),
        *("models/config", "models/decoder", "models/families/__init__", "models/feed_forward"),
    )
}


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of variables, parameters and functions, with their lines; fields are no variables."""
    for node in ast.walk(tree):
        fields = node.body if isinstance(node, ast.ClassDef) else []
        for field in fields:
            if isinstance(field, ast.AnnAssign):
                field.target = ast.Constant(0)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def test_no_variable_is_named_by_a_pronoun():
    seen = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(ROOMS_TO_FOLLOW):
            seen |= {
                (name, *each) for each in names_of(ast.parse(path.read_text())) if each[0] in EMPTY_NAMES
            }
    assert {each for each in seen if each[0] not in TO_FOLLOW} == set()
    assert {each[0] for each in seen} == TO_FOLLOW  # a file that is done leaves the list


def test_names_are_read_where_they_are_made():
    code = "class Row:\n    own: int\n\nasync def told(most):\n    for its in most:\n        found = own\n"
    assert sorted(names_of(ast.parse(code))) == [("found", 6), ("its", 5), ("most", 4), ("told", 4)]
