"""The live page in a real browser, and the events that feed it."""

import json
import re
import time

import numpy as np
import pytest

from jaxpaged.engine.occupancy import Occupancy, Progress
from jaxpaged.serve import page
from jaxpaged.step.state import Phase
from tests import tiny
from tests.serve import browser
from tests.serve.conftest import soon

pytest_needs_chromium = pytest.mark.skipif(not (browser.CHROMIUM and browser.DRIVER), reason=browser.MISSING)
LONG = {"max_tokens": 80, "ignore_eos": True}


def test_the_map_says_who_holds_what():
    holders = np.array([0, 1, 2, 0, 0, 1, 1, 0], np.int32)
    content = np.array([0, 1, 1, 1, 0, 0, 0, 0], bool)
    progress = [
        Progress(5, Phase.RUNNING, 20, 24, 25, 40, np.array([2, 1, 5])),
        Progress(7, Phase.WAITING, 8, 8, 8, 9, np.array([2, 6])),
    ]
    fields = page.occupancy_fields(Occupancy(holders, content, tuple(progress), 3))
    five, seven = (chr(page.FIRST_CHAR + page.HELD + i) for i in (5, 7))
    assert fields["map"] == f"{five}210{five}{seven}0"
    assert fields["blocks"] == {"free": 2, "cached": 1, "held": 3, "shared": 1}
    assert [each["blocks"] for each in fields["requests"]] == [3, 2]
    assert fields["queued"] == 3


def test_of_a_large_pool_a_cell_is_several_blocks():
    holders = np.zeros(1 + 5000, np.int32)
    holders[-1] = 1
    last = Progress(1, Phase.RUNNING, 1, 1, 1, 2, np.array([5000]))
    fields = page.occupancy_fields(Occupancy(holders, holders > 1, (last,), 0))
    assert fields["blocks_per_cell"] == 3
    assert fields["map"] == "0" * 1666 + chr(page.FIRST_CHAR + page.HELD + 1)


def test_nothing_is_read_while_nobody_looks(served, monkeypatch):
    asked = []
    occupancy = served.llm.engine.occupancy
    monkeypatch.setattr(served.llm.engine, "occupancy", lambda: asked.append(1) or occupancy())
    with (
        served.http.stream("GET", "/page/events") as first,
        served.http.stream("GET", "/page/events") as more,
    ):
        for reply in (first, more):
            lines = reply.iter_lines()
            fields = [
                json.loads(next(line for line in lines if line).removeprefix("data: ")) for _ in range(2)
            ]
        assert fields[1]["time"] > fields[0]["time"]
        assert len(fields[0]["map"]) == 64
    seen = len(asked)
    assert seen <= 4, "once a tick for all"
    time.sleep(1.2)
    assert len(asked) <= seen + 1


def test_the_page_allows_itself_only_what_is_on_it(served):
    reply = served.http.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert "http://" not in reply.text
    assert "https://" not in reply.text


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as made:
        yield made


@pytest_needs_chromium
@pytest.mark.parametrize(("width", "height"), [(360, 740), (1440, 1000)])
def test_the_page_shows_what_the_engine_reports(served, chromium, brake, width, height):
    served.wait_for_silence()
    engine = served.llm.engine
    soon(engine.reset_prefix_cache)
    hold = brake(engine)
    shared = tiny.prompts([48], seed=width)[0]

    def ask(i):
        return served.http.post("/v1/completions", json=LONG | {"prompt": [*shared, i], "max_tokens": 60})

    asking = [tiny.start(ask, 1)]
    soon(lambda: engine.stats.num_running == 1, lambda: hold.allow(1))
    asking += [tiny.start(ask, i) for i in range(2, 7)]
    soon(lambda: served.service.num_open == 6)
    soon(lambda: engine.stats.num_running == 4, lambda: hold.allow(1))
    chromium.open(served.url, width, height)

    def shows(**texts):
        def is_so():
            hold.allow(1)  # the engine answers between two runs
            time.sleep(0.05)
            return all(chromium.text(id_) == text for id_, text in texts.items())

        return is_so

    soon(shows(state="live", running="4", waiting="2", model="tiny"))
    rows = chromium.run("return [...document.querySelectorAll('.row')].map(row => row.dataset.phase)")
    assert rows.count("running") == 4
    amounts = chromium.run("return [...document.querySelectorAll('.amount')].map(each => each.textContent)")
    assert all(re.fullmatch(r"\d+ / 60 new|\d+ / 49 of prompt", amount) for amount in amounts), amounts
    assert amounts.count("0 / 49 of prompt") == 2, "those that wait"
    tops = chromium.run("return [...document.querySelectorAll('.tile')].map(each => each.offsetTop)")
    assert tops.count(tops[-1]) == tops.count(tops[0]), "no figure stands alone"
    for id_, said in (("ttft", "no first token"), ("itl", "no answer of two tokens")):
        of = f"newest.latency.{id_}"
        script = f"{of}.counts = {of}.counts.map(() => 0); draw(); "
        assert chromium.run(f"{script}return {id_}.getAttribute('aria-label')") == said
    shown = "return [drafts.hidden, drafts.textContent]"
    assert chromium.run(shown) == [True, ""], "nothing is drafted"
    chromium.run("newest.drafts = { drafted: 1200, accepted: 900 }; draw()")
    assert chromium.run(shown) == [False, "900 of 1,200 drafts accepted (75%)"]
    counts = {id_: int(chromium.text(id_)) for id_ in ("free", "held", "shared", "cached")}
    assert sum(counts.values()) == 64
    assert counts["shared"] == 6
    assert counts["held"] >= 4
    inside = "return [window.innerWidth, document.documentElement.scrollWidth <= window.innerWidth]"
    assert chromium.run(inside) == [width, True], "nothing sticks out"
    drawn = """
        const canvas = document.getElementById("map"), c = canvas.getContext("2d");
        const data = c.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
        for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
        return seen.size"""
    assert chromium.run(drawn) >= 6, "four sequences, shared blocks, free ones"
    hold.off()
    assert all(each.result(30).status_code == 200 for each in asking)
    soon(shows(running="0", waiting="0", held="0", shared="0", queued="none"))
    assert int(chromium.text("cached")) > 6
    chromium.run("question.value = 'ab'; document.getElementById('ask').requestSubmit()")
    soon(lambda: chromium.run("return document.querySelectorAll('.message.assistant').length") == 1)
    soon(lambda: not chromium.run("return document.getElementById('send').disabled"))
    want = served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "ab"}], "temperature": 0}
    )
    assert want.status_code == 200
    assert chromium.run("return document.querySelector('.message.user').textContent") == "ab"
    assert chromium.run("return document.querySelector('.message.assistant').textContent.length") > 0
    assert chromium.console_errors() == []
