"""`jaxpaged generate --output FILE --resume`: nothing that finished is lost, and nothing is asked twice."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxpaged import cli
from jaxpaged.batch import prompt_files
from jaxpaged.batch.answer_files import SIZES, AnswerFile, model_of
from jaxpaged.checks import InputError
from jaxpaged.commands import generate, output
from jaxpaged.config import EngineConfig
from tests import tiny
from tests.commands.fast import FAST

# The first is among the last to finish, and more follow than could be computed in one launch.
LONG = [{"prompt_token_ids": [i], "max_tokens": 90, "ignore_eos": True} for i in range(3, 33)]
LINES = [
    LONG[0],
    *({"prompt_token_ids": [i], "max_tokens": 2, "ignore_eos": True} for i in (1, 2)),
    *LONG[1:],
]
INTERRUPTED = re.compile(r"jaxpaged: interrupted: (\d+) of (\d+) answers are written(.*)\n$")


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def asking(model, tmp_path):
    """Call it with further arguments for a command line that asks `LINES`."""
    prompts = write(tmp_path / "prompts", LINES)
    return lambda *arguments: ["generate", "--model", model, *FAST, "--prompts-file", prompts, *arguments]


def interrupt_after(monkeypatch, of, name, number):
    """Send this process a Ctrl-C when a method has been called so many times."""
    method, calls = getattr(of, name), []

    def counted(*args):
        method(*args)
        calls.append(args)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)

    tiny.replace(monkeypatch, of, name, counted)


def test_an_interrupted_run_goes_on_where_it_was(asking, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    interrupt_after(monkeypatch, AnswerFile, "write", 3)
    assert cli.main(asking("--output", str(out))) == 130
    monkeypatch.undo()
    stdout, stderr = capsys.readouterr()
    first = read(out)
    number, total, rest = INTERRUPTED.search(stderr).groups()
    assert stdout == ""
    assert (int(number), int(total), rest) == (len(first), len(LINES), "; --resume goes on from there")
    assert 3 <= len(first) < len(LINES)
    assert {1, 2} <= {line["index"] for line in first}, "they wait for no other"

    half = out.read_bytes().splitlines(keepends=True)[-1][:-20]
    with out.open("ab") as file:
        file.write(half)
    assert cli.main(asking("--output", str(out), "--resume", "--max-num-batched-tokens", "132")) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("are no whole answer and are dropped") == 1
    assert f"; {len(LINES) - len(first)} answers in" in stderr
    assert f"; {len(first)} answers were there before" in stderr
    told = read(out)
    assert [line["index"] for line in told] == list(range(len(LINES)))
    for place in (0, 1, 2, len(LINES) - 1):
        asked = LINES[place]
        want = tiny.reference_answer(tuple(asked["prompt_token_ids"]), asked["max_tokens"])
        assert told[place]["token_ids"] == want
    assert [line for line in told if line["index"] in {line["index"] for line in first}] == sorted(
        first, key=lambda line: line["index"]
    )

    before = out.read_bytes()
    monkeypatch.delattr(generate, "_answer")  # nothing is left to ask
    assert cli.main(asking("--output", str(out), "--resume")) == 0
    assert out.read_bytes() == before
    assert f"all {len(LINES)} answers were there before" in capsys.readouterr().err


def test_standard_output_gets_what_waited_for_another_when_it_is_interrupted(asking, monkeypatch, capsys):
    interrupt_after(monkeypatch, generate.Stdout, "write", 2)
    assert cli.main(asking("--json")) == 130
    stdout, stderr = capsys.readouterr()
    indices = [json.loads(line)["index"] for line in stdout.splitlines()]
    assert {1, 2} <= set(indices)
    assert indices == sorted(indices)
    number, total, _ = INTERRUPTED.search(stderr).groups()
    assert (int(number), int(total)) == (len(indices), len(LINES))
    assert len(indices) < len(LINES)
    *_, last = re.findall(rf"(\d+)/{len(LINES)} ", stderr)
    assert int(last) == len(indices), "the bar counts the same"


@pytest.mark.slow
def test_a_process_writes_what_has_finished_and_its_progress_is_few_lines(asking, tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "jaxpaged", *asking("--output", str(out))]
    write(tmp_path / "prompts", LINES * 20)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not out.exists() or out.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    lines = read(out)
    number, total, _ = INTERRUPTED.search(stderr).groups()
    assert (int(number), int(total)) == (len(lines), 20 * len(LINES))
    assert len(stderr.splitlines()) < 8
    assert "\r" not in stderr


class Prompts:
    """Prompts, and files of answers to them, without a model."""

    def __init__(self, folder):
        self.file = folder / "out"
        self.lines = [{"prompt": "a", "temperature": 1.0, "n": 2}, {"prompt": "b"}, {"prompt": "c"}]
        self.model = model_of(EngineConfig(), {"model": "m"})

    def open(self, *, resume=True):
        asked = [prompt_files.of_row(line, {}) for line in self.lines]
        return AnswerFile(str(self.file), asked, self.model, resume=resume)


@pytest.fixture
def prompts(tmp_path):
    made = Prompts(tmp_path)
    with made.open(resume=False) as file:
        file.write(1, [{"error": "too long"}])
        file.write(0, [{"answer": 0, "text": "ä\ud800"}, {"answer": 1, "text": ""}])
    return made


def test_all_answers_to_a_prompt_count_or_none(prompts):
    content = prompts.file.read_bytes()
    with prompts.open() as file:
        assert (file.written, file.num_answers, file.num_dropped) == ({0, 1}, 2, 0)
    first, second, third = content.splitlines(keepends=True)
    for end in (second, second + third[:-1], second + third[:5]):
        prompts.file.write_bytes(first + end)
        with prompts.open() as file:
            assert (file.written, file.num_answers, file.num_dropped) == ({1}, 0, len(end))
        assert prompts.file.read_bytes() == first
    # What does not begin as a line of answers is somebody's, and is not dropped.
    for foreign in (b"all of my notes, with no line feed", content + b'{"prompt": "a"}', b"\x00\xffELF"):
        prompts.file.write_bytes(foreign)
        with pytest.raises(InputError, match="must be that of an earlier run: its last line is none"):
            prompts.open()
        assert prompts.file.read_bytes() == foreign
    prompts.file.write_bytes(content)
    with prompts.open() as file:
        file.write(2, [{"text": "c"}])
        file.put_in_order()
    assert [line["index"] for line in read(prompts.file)] == [0, 0, 1, 2]
    assert len(list(prompts.file.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.lines[1].update(prompt="d"), "line 1, must be of the same run: it answers prompt 1 with "
         "another prompt"),
        (lambda p: p.lines[0].update(seed=7), "prompt 0 with other sampling options"),
        (lambda p: p.model.update(model="n"), "with another model or other options of it"),
        (lambda p: p.model.update(dtype="bfloat16"), "with another model or other options of it"),
        (lambda p: p.lines.pop(), None),
        (lambda p: p.lines.__delitem__(slice(1, 3)), "line 1, must answer one of 1 prompts, not number 1"),
        (lambda p: p.file.write_bytes(2 * p.file.read_bytes()), "line 4, must not answer prompt 1 again"),
        (lambda p: p.file.write_text("notes\n"), "line 1, must be an answer of an earlier run with --output"),
        (lambda p: p.file.write_text('{"index": 0}\n'), "line 1, must be an answer of an earlier run"),
    ],
)  # fmt: skip
def test_a_file_of_another_run_is_refused_and_stays(prompts, change, message):
    change(prompts)
    before = prompts.file.read_bytes()
    if message is None:
        prompts.open().__exit__()
    else:
        with pytest.raises(InputError) as refused:
            prompts.open()
        assert f"--output '{prompts.file}', " in str(refused.value)
        assert message in str(refused.value)
    assert prompts.file.read_bytes() == before


def test_sizes_of_an_engine_change_no_digest():
    assert set(SIZES) <= set(EngineConfig.__dataclass_fields__)
    sized = EngineConfig(max_num_seqs=3, num_blocks=77, loop="host", process_id=0)
    drafting = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert model_of(sized, {}) == model_of(drafting, {}) == model_of(EngineConfig(), {})
    scaled = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 77.0}
    assert scaled.items() <= model_of(sized, scaled).items()
    assert model_of(EngineConfig(quantization="int8"), {}) != model_of(EngineConfig(), {})


def test_files_that_would_be_lost_are_refused(asking, prompts, capsys):
    for arguments, message in (
        (["--output", str(prompts.file)], "must be new or empty, or be given with --resume"),
        (["--resume"], "--resume must be given with --output"),
        (["--output", str(prompts.file.parent / "prompts")], "must be another file than --prompts-file"),
        (["--output", "/dev/null", "--resume"], "must be a file that can be read, with --resume"),
    ):
        assert cli.main(asking(*arguments)) == 2
        assert message in capsys.readouterr().err
    with prompts.open(), pytest.raises(InputError, match="is being written by another run"):
        prompts.open()


def test_progress_on_no_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    with output.bar(total=700, desc="answers", unit="req") as shown:
        for _ in range(700):
            shown.set_postfix_str("10 tok/s", refresh=False)
            shown.update()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "700/700" in lines[-1]
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.0)
    with output.bar(total=30, desc="answers", unit="req") as shown:
        for _ in range(30):
            time.sleep(0.001)
            shown.update()
    assert len(capsys.readouterr().err.splitlines()) > 15
