"""Choice of tokens: one function for answers and for drafts."""

import ast
from pathlib import Path

from jaxpaged.step import choice

PARTS_OF_A_CHOICE = {"sample", "sampled_by", "masked", "edited", "not_empty"}


def test_nothing_else_of_the_step_chooses_tokens():
    """A draft is chosen as the answer would be. Two functions for that would come apart."""
    calls = {
        (path.name, getattr(node.func, "id", None) or getattr(node.func, "attr", None))
        for path in Path(choice.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }
    assert {call for call in calls if call[1] in PARTS_OF_A_CHOICE} == {
        ("choice.py", part) for part in PARTS_OF_A_CHOICE
    }
