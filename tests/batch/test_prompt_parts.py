"""Files of prompts in parts: each row is in one of them, and answered once, whoever was killed when."""

import json

import pytest

from jaxpaged import LLM
from jaxpaged.batch import prompt_parts
from jaxpaged.checks import InputError
from tests import tiny
from tests.tiny_gguf import write_gguf

SAMPLING = {"max_tokens": 3, "temperature": 0.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with_model = LLM(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"), **tiny.DEFAULTS)
    yield with_model
    with_model.engine.close()


def write(path, num_rows):
    texts = [json.dumps({"prompt_token_ids": [3 + i, 4, 5], "id": f"r{i}"}) for i in range(num_rows)]
    path.write_text("\ufeff" + "\n\n".join(texts))  # empty lines do not count; the last one has no end
    return path


def lines_of(path):
    return path.read_text().splitlines()


def written(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in lines_of(path)]


@pytest.mark.parametrize("rows_per_part", [1, 3, 7, 100])
def test_parts_have_each_row_once_and_in_order(tmp_path, rows_per_part):
    files = [write(tmp_path / "a.jsonl", 7), write(tmp_path / "b.jsonl", 4)]
    parts = prompt_parts.cut(files, rows_per_part)
    assert sorted(part.name for part in parts) == [part.name for part in parts]
    found = [json.loads(row)["id"] for part in parts for row in prompt_parts.rows(part)]
    assert found == [f"r{i}" for i in range(7)] + [f"r{i}" for i in range(4)]
    assert all(len(prompt_parts.rows(part)) == part.num_rows <= rows_per_part for part in parts)


@pytest.mark.parametrize("rows_per_part", [1, 4, 5, 100])
def test_parts_of_parquet_need_not_begin_where_its_groups_do(tmp_path, rows_per_part):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    table = pyarrow.table({"prompt": [f"p{i}" for i in range(11)], "seed": [None, *range(10)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    parts = prompt_parts.cut([tmp_path / "a.parquet"], rows_per_part)
    found = [row for part in parts for row in prompt_parts.rows(part)]
    assert found == [{"prompt": "p0"}, *({"prompt": f"p{i}", "seed": i - 1} for i in range(1, 11))]


def test_rows_are_answered_as_by_llm_and_mistakes_are_told_in_their_place(tmp_path, llm):
    path = write(tmp_path / "a.jsonl", 4)
    with path.open("ab") as file:
        file.write(b'\n{"prompt": "ab", "max_tokens": 2, "n": 2, "temperature": 1}\n')
        file.write(b'{"prompt": "ab", "x": 1}\n{"prompt": "\xff"}\n{')
    [part] = parts = prompt_parts.cut([path], 100)
    folder = prompt_parts.open_folder(tmp_path / "out", parts, SAMPLING)
    assert prompt_parts.missing(folder, parts) == parts
    assert prompt_parts.answer(llm, part, folder, SAMPLING) == 8
    lines = written(folder)
    assert [line["row"] for line in lines] == [*range(8)]
    assert [line.get("id") for line in lines] == ["r0", "r1", "r2", "r3"] + [None] * 4
    for i, line in enumerate(lines[:4]):
        assert line["outputs"][0]["token_ids"] == list(tiny.reference_answer((3 + i, 4, 5), 3))
    assert [len(each["token_ids"]) for each in lines[4]["outputs"]] == [2, 2]
    assert "option 'x' must be one of" in lines[5]["error"]
    assert all("must be JSON" in line["error"] for line in lines[6:])
    assert not prompt_parts.missing(folder, parts)


def test_who_takes_a_part_over_goes_on_where_others_were_killed(tmp_path, llm, monkeypatch):
    path = write(tmp_path / "a.jsonl", 9)
    [part] = parts = prompt_parts.cut([path], 100)
    folder = prompt_parts.open_folder(tmp_path / "out", parts, SAMPLING)
    answers = prompt_parts.answers_of

    def killed_after(num_rows):
        def some(*args):
            for i, line in enumerate(answers(*args)):
                if i == num_rows:
                    raise KeyboardInterrupt
                yield line

        monkeypatch.setattr(prompt_parts, "answers_of", some)
        with pytest.raises(KeyboardInterrupt):
            prompt_parts.answer(llm, part, folder, SAMPLING)

    killed_after(3)
    killed_after(2)
    files = sorted(folder.glob(".*.part"))
    assert [len(file.read_text().splitlines()) for file in files] in ([3, 2], [2, 3])
    with files[0].open("a") as file:
        file.write(files[1].read_text() + '{"row": 8, "outp')  # one that was thought dead, and a line cut off
    assert not written(folder)
    monkeypatch.undo()
    assert prompt_parts.answer(llm, part, folder, SAMPLING) == 4
    assert [line["row"] for line in written(folder)] == [*range(9)]
    assert [line["id"] for line in written(folder)] == [f"r{i}" for i in range(9)]
    assert sorted(file.name for file in folder.iterdir()) == [f"{part.name}.jsonl", "job.json"]
    assert prompt_parts.answer(llm, part, folder, SAMPLING) == 0


def test_a_folder_is_of_one_job(tmp_path):
    parts = prompt_parts.cut([write(tmp_path / "a.jsonl", 4)], 2)
    folder = prompt_parts.open_folder(tmp_path / "out", parts, SAMPLING)
    assert prompt_parts.open_folder(folder, parts, SAMPLING) == folder
    for other, sampling in ((parts[:1], SAMPLING), (parts, {})):
        with pytest.raises(InputError, match="answers of another job"):
            prompt_parts.open_folder(folder, other, sampling)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / f"{parts[0].name}.jsonl").write_text("notes")
    with pytest.raises(InputError, match=r"must be a new one: 0000-0+\.jsonl is of no job of ours"):
        prompt_parts.open_folder(tmp_path / "theirs", parts, SAMPLING)
    with pytest.raises(InputError, match=r"no\.jsonl' cannot be read"):
        prompt_parts.cut([tmp_path / "no.jsonl"], 2)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="at least one row"):
        prompt_parts.cut([tmp_path / "empty.jsonl"], 2)
