"""Parsers of strangers' bytes refuse what is wrong in one sentence, and do nothing else.

Each run of the tests gives each parser seconds; `python -m tests.fuzz` goes on with other inputs, ten minutes
for each parser at night.
"""

from pathlib import Path

import pytest

from jaxpaged.checks import InputError
from tests.fuzz.fuzzer import FoundError, Fuzzer, Target
from tests.fuzz.targets import TARGETS

# Seeds, with the processor time of their tests, by the target that first runs them.
SEEDS = (
    (0, 2),
    pytest.param(1, 3, marks=pytest.mark.slow),
    *(pytest.param(i, 8, marks=pytest.mark.nightly) for i in (2, 3, 4)),
)
FOUND_WITHIN = 30  # seconds, on a busy machine


# NumPy warns of a dump's damaged numbers, and ours of nothing else.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("seed", "seconds"), SEEDS)
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_wrong_is_refused(name: str, seed: int, seconds: float, tmp_path: Path) -> None:
    Fuzzer(TARGETS[name], tmp_path, seed).run(seconds)


def parse_planted(data: bytes, _: Path) -> None:
    """Refuse what does not begin with "{}", and fail at what does."""
    if data == b"right":
        return
    if data[:1] == b"{":
        following = data[1:2]
        if following == b"}":
            raise KeyError(following)
    raise InputError("it is wrong")


def test_a_bug_behind_two_bytes_is_found(tmp_path: Path) -> None:
    """Luck would need some 65,536 inputs; new lines lead there in a few hundred."""
    fuzzer = Fuzzer(Target("planted", parse_planted, lambda: [b"right"], ("test_fuzz",)), tmp_path)
    with pytest.raises(FoundError, match=r"planted: KeyError: .*python -m tests.fuzz planted --input"):
        fuzzer.run(FOUND_WITHIN)
    assert fuzzer.num_inputs < 20_000
    assert (tmp_path / "found-planted").read_bytes().startswith(b"{}")


@pytest.mark.parametrize(
    ("error", "found"), [(InputError("two\nlines"), "not one sentence"), (OSError(), "OSError")]
)
def test_only_one_sentence_is_a_refusal(error: Exception, found: str, tmp_path: Path) -> None:
    def parse(data: bytes, _: Path) -> None:
        if data != b"right":
            raise error

    with pytest.raises(FoundError, match=found):
        Fuzzer(Target("planted", parse, lambda: [b"right"], ()), tmp_path).run(FOUND_WITHIN)
