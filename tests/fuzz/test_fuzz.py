"""Parsers of strangers' bytes refuse what is wrong in one sentence, and do nothing else.

Each gets the same inputs in every run; `python -m tests.fuzz` goes on from there, ten minutes each at night.
"""

from pathlib import Path

import pytest

from jaxpaged.checks import InputError
from tests.fuzz.fuzzer import FoundError, Fuzzer, Target
from tests.fuzz.targets import TARGETS

# Inputs that take about two seconds of a core.
NUM_INPUTS = {
    "blocks": 20_000, "dump": 120, "gguf": 250, "directory": 500, "adapter": 250, "trace": 1_500,
    "prompts": 1_500, "history": 500, "message": 12_000, "answer": 1_000, "body": 2_000,
}  # fmt: skip
# Files made of two parts, one of which says what another way to read it would take.
WARNINGS = "ignore:(overflow|invalid value) encountered:RuntimeWarning"


@pytest.mark.filterwarnings(WARNINGS)
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    Fuzzer(TARGETS[name], tmp_path).run(NUM_INPUTS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNINGS)
@pytest.mark.parametrize("name", TARGETS)
def test_what_else_is_wrong_is_refused(name: str, tmp_path: Path) -> None:
    Fuzzer(TARGETS[name], tmp_path, seed=1).run(2 * NUM_INPUTS[name])


def test_a_bug_behind_two_bytes_is_found(tmp_path: Path) -> None:
    """By luck it would take some 65,536 inputs; by lines reached a few hundred."""

    def parse(data: bytes, _: Path) -> None:
        if data[:1] == b"{":
            number = data[1:2]
            if number == b"}":
                raise KeyError(number)
        raise InputError("it is wrong")

    target = Target("planted", lambda data, folder: parse(data, folder) if data != b"right" else None,
                    lambda: [b"right"], ("test_fuzz",))  # fmt: skip
    with pytest.raises(FoundError, match=r"planted: KeyError: .*python -m tests.fuzz planted --input"):
        Fuzzer(target, tmp_path).run(20_000)
    assert (tmp_path / "found-planted").read_bytes().startswith(b"{}")


@pytest.mark.parametrize(
    ("error", "said"), [(InputError("two\nlines"), "not one sentence"), (OSError(), "OSError")]
)
def test_only_one_sentence_is_a_refusal(error: Exception, said: str, tmp_path: Path) -> None:
    def parse(data: bytes, _: Path) -> None:
        if data != b"right":
            raise error

    with pytest.raises(FoundError, match=said):
        Fuzzer(Target("planted", parse, lambda: [b"right"], ()), tmp_path).run(100)
