"""Output of commands: each answer as it comes, and clear errors where streams break."""

import errno
import io
import json
import sys

import pytest

from jaxpaged import cli
from jaxpaged.batch import prompt_files
from jaxpaged.checks import InputError
from tests.commands.fast import FAST


class Stream(io.TextIOWrapper):
    """A file to write to, which notes after each flush how many lines have come, and may break."""

    def __init__(self, path, breaks_at=99, **options):
        super().__init__(io.BufferedWriter(io.FileIO(path, "w")), **options)
        self.flushed = []
        self.num_left = breaks_at

    def write(self, text):
        if self.num_left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_left -= 1
        return super().write(text)

    def flush(self):
        super().flush()
        with open(self.buffer.name, encoding=self.encoding) as file:
            self.flushed.append(len(file.readlines()))


def three_answers(model, monkeypatch, tmp_path, **stream):
    """Ask for three answers, the first of which is the longest.

    Returns: the exit code, the lines that stood in the file after each flush, and what it holds.
    """
    out = Stream(tmp_path / "out", **stream)
    lines = [
        {"prompt_token_ids": [i], "max_tokens": n, "ignore_eos": True} for i, n in ((1, 40), (2, 2), (3, 2))
    ]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "stdout", out)
    code = cli.main(
        ["generate", "--model", model, *FAST, "--prompts-file", str(tmp_path / "prompts"), "--json"]
    )
    monkeypatch.undo()
    flushed = [number for number in out.flushed if number]
    out.close()
    with open(tmp_path / "out") as file:
        return code, flushed, [json.loads(line) for line in file]


def test_each_answer_is_written_when_it_and_all_before_it_are_there(model, monkeypatch, tmp_path):
    code, flushed, answers = three_answers(model, monkeypatch, tmp_path)
    assert (code, flushed) == (0, [1, 2, 3])
    assert [answer["index"] for answer in answers] == [0, 1, 2]


def test_a_full_disk_loses_nothing_that_was_written(model, monkeypatch, tmp_path, capsys):
    code, _, answers = three_answers(model, monkeypatch, tmp_path, breaks_at=2)
    assert (code, len(answers)) == (2, 2)
    message = (
        "jaxpaged: standard output cannot be written: [Errno 28] No space left on device; 2 of 3 answers are"
    )
    assert message in capsys.readouterr().err


def test_what_an_encoding_cannot_say_is_escaped(model, monkeypatch, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("ab ä\u2603", encoding="utf-8")
    for json_lines in (True, False):
        out = Stream(tmp_path / "out", encoding="ascii")
        monkeypatch.setattr(sys, "stdout", out)
        arguments = ["--prompts-file", str(file), "--max-tokens", "1", *["--json"] * json_lines]
        assert cli.main(["generate", "--model", model, *FAST, *arguments]) == 0
        monkeypatch.undo()
        out.close()
        written = (tmp_path / "out").read_text(encoding="ascii")
        if json_lines:
            assert json.loads(written)["prompt"] == "ab ä\u2603"
        else:
            assert ">>> ab \\xe4\\u2603\n" in written


def test_closed_streams_are_one_line_or_none(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["info", "--model", model, *FAST]) == 2
    assert capsys.readouterr().err == "jaxpaged: standard output cannot be written: it is closed\n"
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["info", "--model", "no/such/model"]) == 2
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="--prompts-file '-': standard input is closed"):
        prompt_files.read("-", {})
