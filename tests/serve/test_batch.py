"""`jaxpaged run-batch`: files of requests in OpenAI's form."""

import asyncio
import json

import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.serve import batch, batch_files
from jaxpaged.serve.batch_files import Output
from jaxpaged.serve.options import ServerOptions
from tests.commands.test_cli import FAST
from tests.serve.conftest import TEMPLATE

MOST = 20_000  # bytes of a body


@pytest.fixture(scope="module")
def app(llm):
    return batch.batch_app(llm, "tiny", ServerOptions(chat_template=TEMPLATE, api_keys=("secret",)))


@pytest.fixture
def run(app, tmp_path):
    """Call it with lines for the counts, and the lines of the output in their order."""
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def go(lines, max_inflight=3):
        files[0].write_bytes(b"\n".join(each if isinstance(each, bytes) else dumped(each) for each in lines))
        with Output(str(files[1])) as output:
            counts = asyncio.run(
                batch.run(
                    app,
                    batch_files.read(str(files[0]), MOST),
                    output,
                    max_inflight=max_inflight,
                    max_body_bytes=MOST,
                )
            )
        return counts, [json.loads(line) for line in files[1].read_text().splitlines()]

    go.output = files[1]
    return go


def dumped(value):
    return json.dumps(value).encode()


def asking(custom_id, prompt="ab c", url="/v1/completions", **body):
    said = {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {"prompt": prompt}
    its = {"model": "tiny", "temperature": 0, "max_tokens": 5, "ignore_eos": True, **said, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": its}


def test_answers_are_the_servers_and_what_is_there_is_not_asked_again(run, served):
    lines = [asking("a", n=2, logprobs=1, seed=1, temperature=1), asking("b", url="/v1/chat/completions")]
    lines += [asking(f"c{i}", prompt=[5, i]) for i in range(6)]
    counts, told = run([*lines[:2], b"", *lines[2:]])
    assert (counts.answered, counts.failed, counts.skipped) == (8, 0, 0)
    by_id = {line["custom_id"]: line for line in told}
    for line in lines:
        answer = by_id[line["custom_id"]]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        want = served.http.post(line["url"], json=line["body"]).json()
        body = answer["response"]["body"]
        for name in ("object", "model", "choices"):
            assert body[name] == want[name]
        assert body["id"].endswith(answer["response"]["request_id"])

    counts, again = run([*lines, asking("late")])
    assert (counts.answered, counts.skipped) == (1, 8)
    assert again[:8] == told
    assert again[8]["custom_id"] == "late"


def test_a_wrong_line_costs_itself_alone(run):
    wrong = [
        (b"no json", "line 1: must be JSON"),
        (b"\xff\xfe", "line 2: must be JSON"),
        (b"[1]", "line 3: must be an object"),
        (asking(7), "line 4: custom_id=7 must be a string"),
        (asking("u", url="/v1/load_lora_adapter"), "line 5: url='/v1/load_lora_adapter' must be one of"),
        (asking("m") | {"method": "GET"}, "line 6: method='GET' must be 'POST'"),
        (asking("s", stream=True), "line 7: body.stream=True must be false"),
        (asking("b") | {"body": None}, "line 8: body=None must be an object"),
        (b"[" * 20_000, "line 9: must be JSON"),
        (dumped(asking("long", prompt="a" * 100_000)), "line 10: must have a body of at most"),
    ]
    good = asking("good")
    counts, told = run([*(line for line, _ in wrong), good, good])
    assert (counts.answered, counts.failed) == (12, 11)
    messages = [line["error"]["message"] for line in told if line["response"] is None]
    for said in [*(said for _, said in wrong), "line 12: custom_id='good' must be unique"]:
        assert len([each for each in messages if each.startswith(said)]) == 1, said
    assert {line["error"]["code"] for line in told if line["response"] is None} == {"invalid_line"}
    # They are in the file, and so not told again; nor does that of the second "good" hide the first.
    counts, again = run([*(line for line, _ in wrong), good, good])
    assert (counts.answered, counts.skipped, again) == (0, 12, told)


def test_what_a_route_refuses_is_told_as_the_server_tells_it(run):
    lines = [asking("t", temperature=-1), asking("m", model="other"), asking("f", prompt=None), asking("ok")]
    lines.append(asking("deep", metadata=json.loads("[" * 80 + "]" * 80)))
    counts, told = run(lines)
    assert (counts.answered, counts.failed) == (5, 4)
    by_id = {line["custom_id"]: line for line in told}
    for custom_id, status, said in (
        ("t", 400, "temperature=-1.0 must be"),
        ("m", 404, "the model 'other' does not exist"),
        ("f", 400, "prompt"),
        ("deep", 400, "levels of nesting"),
    ):
        line = by_id[custom_id]
        assert line["response"]["status_code"] == status
        error = line["response"]["body"]["error"]
        assert said in error["message"]
        assert line["error"] == {"code": str(error["code"]), "message": error["message"]}


def test_a_line_that_was_cut_off_is_asked_again_and_other_files_are_kept(run):
    run([asking("a"), asking("b")], max_inflight=1)
    whole = run.output.read_bytes()
    run.output.write_bytes(whole[:-30])
    counts, told = run([asking("a"), asking("b")])
    assert (counts.answered, counts.skipped) == (1, 1)
    assert [line["custom_id"] for line in told] == ["a", "b"]
    for content in ("notes\n", '{"a": 1}\n', "[]\n"):
        run.output.write_text(content)
        with pytest.raises(
            InputError, match="must be new, or that of an earlier run: its line 1 is no answer"
        ):
            run([asking("a")])
        assert run.output.read_text() == content
    run.output.unlink()
    with Output(str(run.output)), pytest.raises(InputError, match="is being written by another run"):
        run([asking("a")])


class Full:
    """A file on a disk that has room for ten bytes."""

    def __init__(self, file):
        self.file = file

    def write(self, content):
        self.file.write(content[:10])
        raise OSError("no space left")

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    file, line = tmp_path / "out.jsonl", {"custom_id": "a", "response": {}, "error": None}
    with Output(str(file)) as output:
        output.write(line)
        lines = output._lines
        with monkeypatch.context() as patch:
            patch.setattr(lines, "_out", Full(lines._out))
            with pytest.raises(InputError, match="out.jsonl' cannot be written: no space left"):
                output.write(line | {"custom_id": "b"})
    assert json.loads(file.read_text()) == line
    with Output(str(file)) as output:
        assert output.answered == {batch_files.digest_of("a")}


def test_a_run_that_ends_early_keeps_what_it_wrote(run, llm, monkeypatch):
    lines = [asking(f"r{i}", prompt=[5, i]) for i in range(6)]
    write, dead = Output.write, EngineDeadError("it is closed")

    async def check_health():
        if run.output.read_bytes().count(b"\n") == 2:
            raise dead

    monkeypatch.setattr(llm, "check_health", check_health)
    with pytest.raises(EngineDeadError):
        run(lines, max_inflight=2)
    monkeypatch.undo()

    def full(self, answer):
        if self.num_written == 2:
            raise InputError("no space")
        write(self, answer)

    monkeypatch.setattr(Output, "write", full)
    with pytest.raises(InputError, match="no space"):
        run(lines, max_inflight=2)
    monkeypatch.undo()
    counts, told = run(lines)
    assert (counts.answered, counts.skipped) == (2, 4)
    assert {line["custom_id"] for line in told} == {f"r{i}" for i in range(6)}


def test_the_command_answers_a_file_and_says_how_many(model, tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(map(dumped, [asking("a"), asking("b", temperature=-1)])) + b"\n")
    command = ["run-batch", "-i", str(source), "-o", str(out), "--model", model, *FAST]
    assert cli.main([*command, "--served-model-name", "tiny"]) == 0
    assert "2 answers are written, 1 of them with an error; 0 were there before" in capsys.readouterr().err
    assert {json.loads(line)["custom_id"] for line in out.read_text().splitlines()} == {"a", "b"}
    for flags, said in (
        (["-i", str(tmp_path / "none"), "-o", str(out)], "must be a file that exists"),
        (["-i", str(source), "-o", str(source)], "must be another file than --input-file"),
        (["-i", "https://host/a", "-o", str(out)], "not of a place on the web"),
        (["-i", str(source), "-o", str(out), "--max-inflight", "0"], "max_inflight=0 must be an int in"),
        (["-i", str(source), "-o", str(tmp_path / "no" / "out")], "cannot be written"),
    ):
        assert cli.main(["run-batch", "--model", model, *flags]) == 2
        assert said in capsys.readouterr().err
