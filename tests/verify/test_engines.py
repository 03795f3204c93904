"""Judge of engines: the sound engine passes, planted faults are told, our own server holds."""

import json

import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.research.verify.engines import histories, report
from jaxpaged.research.verify.engines.contract import Answer, Ask
from jaxpaged.research.verify.engines.judge import EngineReport, verify_engine
from jaxpaged.research.verify.engines.properties import RULES
from tests.verify.mutants.engines import FAULTS, Fault, planted

FAST = {4, 12, 18}


def judged(engine, **options) -> EngineReport:
    return verify_engine(engine, **{"tolerance": 0.0, "slack_blocks": 0} | options)


def test_the_sound_engine_passes_and_every_property_is_checked():
    found = judged(
        planted(None), seconds=0.8, families=("warm", "partly warm", "same", "salts", "aborts", "options")
    )
    assert found.ok, report.text(found)
    assert all(found.seen.checks.get(name) for name in RULES)
    assert json.loads(report.as_json(found))["ok"]
    assert "passed" in report.text(found)


def found_in(fault: Fault, seconds: float) -> EngineReport:
    families = ("many salts",) if fault.number == 40 else ()
    found = judged(planted(fault), seconds=seconds, stop_at_first=True, families=families)
    assert not found.ok, f"{fault} is not found: {report.text(found)}"
    (finding,) = found.findings
    assert finding.name in fault.found_by, report.text(found)
    assert finding.reproduced == 2
    return found


@pytest.mark.parametrize("fault", [each for each in FAULTS if each.number in FAST], ids=str)
def test_a_planted_fault_is_found_and_made_small(fault):
    found = found_in(fault, 1.0)
    assert len(found.findings[0].history) == 2
    page = report.page(found)
    assert "<b class=bad>failed</b>" in page
    assert report.RULES[found.findings[0].name][:20] in page


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [each for each in FAULTS if each.number not in FAST], ids=str)
def test_every_planted_fault_is_found_and_reproduced(fault):
    found_in(fault, 60.0)


@pytest.mark.nightly
def test_the_sound_engine_passes_for_a_minute():
    found = judged(planted(None), seconds=60.0)
    assert found.ok, report.text(found)


class Forgetful:
    """Adapter that answers nothing but what was asked last."""

    token_ids = range(10)

    def __init__(self) -> None:
        self.last: tuple[int, ...] = ()

    def ask(self, asks: list[Ask]) -> list[Answer]:
        answers = [Answer(((sum(self.last or ask.prompt),) * ask.max_tokens,)) for ask in asks]
        self.last = asks[-1].prompt
        return answers


def test_an_adapter_of_two_names_is_enough_and_the_command_tells_by_its_exit_code(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name = "tests.verify.test_engines:Forgetful"
    files = ["--json", "found.json", "--html", "found.html"]
    assert cli.main(["verify", "engine", name, "--seconds", "0.3", *files]) == 1
    assert "reuse FAILED: token 0 is" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["reproduced"] == 2
    assert (tmp_path / "found.html").read_text().startswith("<!doctype html>")
    assert cli.main(["verify", "engine", "json:dumps", "--seconds", "0.3"]) == 2


def test_what_is_no_adapter_is_refused():
    with pytest.raises(InputError, match="the adapter has no ask"):
        verify_engine(object(), seconds=1)
    with pytest.raises(InputError, match="family='x' must be one of warm"):
        verify_engine(Forgetful(), seconds=1, families=("x",))


def test_a_history_becomes_smaller_in_every_way():
    one = histories.Request((("P", 8), ("S", 3)), 4, salt="a", n=2, options={"seed": 7})
    made = list(histories.smaller(((one, one), (one,))))
    assert ((one,),) in made
    assert any(each[0][0].parts == (("P", 4), ("S", 3)) for each in made)
    assert any(each[0][0].salt is None for each in made)
