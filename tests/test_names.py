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
ROOMS_WITH_SPLATS = ("jaxpaged/engine/", "jaxpaged/handover/", "jaxpaged/models/")
TO_FOLLOW = {
    f"jaxpaged/{name}.py"
    for name in ("engine/capacity", "engine/setup", "engine/start", "memory/kv_cache", "memory/transfer")
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


def splats_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of tuples that a function makes only to splat them into calls, with their lines."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        names = [(node.id, type(node.ctx)) for node in nodes if isinstance(node, ast.Name)]
        stars = [each for node in nodes if isinstance(node, ast.Call) for each in node.args]
        splats = [ast.unparse(each.value) for each in stars if isinstance(each, ast.Starred)]
        for node in nodes:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            name = ast.unparse(node.targets[0])
            is_plain = not any(isinstance(each, ast.Starred) for each in node.value.elts)
            num_uses = names.count((name, ast.Load))
            if is_plain and num_uses == splats.count(name) > 0 and names.count((name, ast.Store)) == 1:
                yield name, node.lineno


def test_no_tuple_only_shortens_a_call():
    seen = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(ROOMS_WITH_SPLATS):
            seen |= {(name, *each) for each in splats_of(ast.parse(path.read_text()))}
    assert seen == set()


def test_tuples_that_shorten_calls_are_found():
    lines = [
        "def f(a, b):",
        " these = a, b",
        " some = a, *b",
        " kept = a, b",
        " g(*these, *some, *kept, kept)",
    ]
    code = "\n".join(lines)
    assert list(splats_of(ast.parse(code))) == [("these", 2)]
