"""Verifying allocators: the oracles agree with themselves, bugs are found, and their histories made short."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.memory.policies import LIFO, Sweep, to_tail
from jaxpaged.research.verify import verify_allocator
from jaxpaged.research.verify.generations.v1 import BlockHash, Labels
from jaxpaged.research.verify.history import Disagreement
from jaxpaged.research.verify.oracles.v0.block_manager import BlockSpaceManager
from jaxpaged.research.verify.oracles.v063.block_manager import SelfAttnBlockSpaceManager
from jaxpaged.research.verify.oracles.v1.block_pool import BlockPool
from tests.verify.mutants import Mutant, planted
from tests.verify.mutants.allocators import MUTANTS
from tests.verify.mutants.sound import block_pool, pool

POOL = "tests/verify/mutants/sound"


class Split(BlockPool):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args, free_profile="split")


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        (BlockSpaceManager, "v0"),
        (SelfAttnBlockSpaceManager, "v063"),
        (BlockPool, "v1"),
        (Split, "v1_split"),
        (block_pool.BlockPool, "v1"),  # its labels of contents are tuples
    ],
)
def test_what_is_right_agrees(theirs: Any, kind: str) -> None:
    report = verify_allocator(theirs, kind, histories=12)
    assert report.ok, report


def test_labels_of_contents_are_one_to_one() -> None:
    labels, one, two = Labels(), BlockHash(b"1"), BlockHash(b"2")
    label = ["any", "thing"]
    labels.note(block_pool.Block(1, block_hash=label), one)
    labels.note(block_pool.Block(2, block_hash=list(label)), one)
    labels.note(block_pool.Block(3, block_hash=object()), two)
    assert labels.name_of(block_pool.Block(4, block_hash=label)) == one
    assert labels.name_of(block_pool.Block(4, block_hash=b"1")) is None
    for wrong, name, sentence in (
        (label, two, "block 5 holds other content than another, and their block_hash are equal"),
        (b"1", one, "block 5 holds the content of another, and their block_hash differ"),
        (None, one, "block 5 was cached, and its block_hash is None"),
    ):
        with pytest.raises(Disagreement, match=sentence):
            labels.note(block_pool.Block(5, block_hash=wrong), name)
    labels.keep([two])
    labels.note(block_pool.Block(6, block_hash=label), BlockHash(b"3"))


def test_a_v1_pool_of_another_profile_does_not() -> None:
    report = verify_allocator(BlockPool, "v1_split", histories=60)
    assert not report.ok
    assert len(report.history) <= 8, report


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_bug_is_found_and_its_history_repeats_it(
    mutant: Mutant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, name = mutant.path.partition(":")
    with planted(mutant, tmp_path) as theirs:
        report = verify_allocator(theirs, mutant.what, save=tmp_path, shrink_seconds=0.5)
        assert not report.ok, report
        assert report.history, report  # how short it is, those below test: they take the time
        assert cli.main(["verify", "allocator", report.name, "--replay", str(report.saved)]) == 1
    said = capsys.readouterr().out
    assert f"disagreement: {report.sentence}" in said
    # In the place of what the file names, what is right.
    right = f"jaxpaged.research.verify.oracles.{module}:{name}"
    assert cli.main(["verify", "allocator", right, "--replay", str(report.saved)]) == 0
    assert capsys.readouterr().out.endswith("the two sides agree\n")


OUT = "return {}, SimpleNamespace(status=OUT_OF_BLOCKS)\n            line"
COPY = "def free(state, rows):\n    new = state"
POOLS = [
    ("fewest in use are freed", "if not new.ref_count[block]:", "if new.ref_count[block] < 2:"),
    ("refused half way", OUT.format("state"), OUT.format("new")),
    ("written to in place", f"{COPY}.copy()", COPY),
]


def test_functions_are_driven_like_ours(tmp_path: Path) -> None:
    report = verify_allocator(pool, "policy", policy="lifo", histories=30)
    assert report.ok, report
    for name, right, wrong in POOLS:
        mutant = Mutant(name, POOL, "pool.py", right, wrong, "pool:create", "policy")
        with planted(mutant, tmp_path / name) as create:
            functions = __import__(create.__module__, fromlist=["create"])
            report = verify_allocator(functions, "policy", policy="lifo", shrink_seconds=1, save=tmp_path)
        assert not report.ok, name
        assert len(report.history) <= 8, report


@pytest.mark.slow
def test_a_policy_is_a_value() -> None:
    report = verify_allocator(LIFO, "policy", histories=6)
    assert report.ok, report
    fifo = dataclasses.replace(LIFO, name="fifo", sweeps=(Sweep(to_tail),))
    report = verify_allocator(fifo, "policy", policy="lifo", histories=20, block_sizes=[4])
    assert "of the free queue is" in str(report)
    with pytest.raises(InputError, match="policy=None must be the one that"):
        verify_allocator(fifo, "policy")


def test_a_class_that_raises_is_told_so(tmp_path: Path) -> None:
    class Broken(BlockPool):
        def get_new_blocks(self, num_blocks: int) -> Any:
            if num_blocks == 3:
                raise RuntimeError("three is too many")  # this line is told
            return super().get_new_blocks(num_blocks)

    report = verify_allocator(Broken, "v1", histories=40)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, each in enumerate(lines) if each.endswith("# this line is told"))
    place = f"three is too many (at {os.path.relpath(__file__)}:{line})"
    assert f"fails, where the oracle does not: RuntimeError: {place}" in str(report)
    assert len(report.history) <= 8, report


def test_what_cannot_be_constructed_is_told_so(tmp_path: Path) -> None:
    class Older(BlockPool):
        def __init__(self, num_gpu_blocks: int) -> None:
            super().__init__(num_gpu_blocks, True, 1)

    for theirs, kind, policy, sentence in (
        (Older, "v1", None, "the class cannot be constructed with (11, True, 1): TypeError: "),
        (lambda *sizes: None, "v0", None, "what the class constructs, a NoneType, has no can_allocate"),
        (object(), "policy", "lifo", "the allocator has no function create"),
        (pool.State, "policy", "lifo", "the allocator has no function create"),
    ):
        report = verify_allocator(theirs, kind, policy=policy, save=tmp_path)
        assert str(report).startswith(f"{kind}: FAILED {sentence}"), report
        assert str(report).count("\n") == 0
        assert not report.ok


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_manager.py").write_text(
        "from jaxpaged.research.verify.oracles.v0.block_manager import BlockSpaceManager as Right\n"
        "class Mine(Right):\n"
        "    def can_allocate(self, group):\n        return type(super().can_allocate(group)).OK\n"
    )
    verify = ["verify", "allocator"]
    assert cli.main([*verify, "my_manager:Right", "--as", "v0", "--histories", "4"]) == 0
    assert "v0: 4 histories of up to 40 steps agree" in capsys.readouterr().out
    functions = "tests.verify.mutants.sound.pool"  # all of a module
    assert cli.main([*verify, functions, "--as", "policy", "--policy", "lifo", "--histories", "2"]) == 0
    assert "policy: 2 histories of up to 40 steps agree" in capsys.readouterr().out
    assert cli.main([*verify, "my_manager:Mine", "--as", "v0"]) == 1
    said = capsys.readouterr().out
    assert "FAILED can_allocate: the answer is OK and must be LATER" in said or "must be NEVER" in said
    [trace] = tmp_path.glob("history-*.json")
    assert str(trace.name) in said
    saved = json.loads(trace.read_text())
    assert saved["made_with"]["path"] == "my_manager:Mine"
    assert len(saved["history"]) == 1
    assert cli.main([*verify, "my_manager:Mine", "--replay", trace.name]) == 1
    capsys.readouterr()
    # What a file names is neither imported nor called.
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('was_imported').touch()\n")
    for name, made_with, history in (
        ("import.json", {"path": "evil:Pool"}, []),
        ("verb.json", {}, [["save", ["elsewhere"]]]),
        ("private.json", {}, [["__init__", []]]),
    ):
        (tmp_path / name).write_text(
            json.dumps({"made_with": saved["made_with"] | made_with, "history": history})
        )
    (tmp_path / "deep.json").write_text("[" * 10**6)
    for wrong, message in (
        ([], "an allocator needs MODULE:NAME and --as, or --replay"),
        (["my_manager:Mine", "--as", "v0", "--steps", "0"], "steps=0 must be at least 1"),
        (["my_manager:Mine", "--as", "v0", "--block-size", "0"], "block_size=0 must be from 1 to 64"),
        (["my_manager:Mine", "--as", "policy"], "policy=None must be the one that my_manager:Mine equals"),
        (["--replay", "nowhere.json"], "'nowhere.json' must be a file of a history"),
        (["--replay", "import.json"], "the history is of 'evil:Pool': give MODULE:NAME"),
        (["my_manager:Mine", "--replay", "verb.json"], "verb='save' must be one of admit, append"),
        (["my_manager:Mine", "--replay", "private.json"], "verb='__init__' must be one of"),
        (["--replay", "deep.json"], "JSON must have at most 32 lists and objects inside each other"),
    ):
        assert cli.main([*verify, *wrong]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "was_imported").exists()
    assert not (tmp_path / "elsewhere").exists()
