"""Tests of the server's guards: keys, limits, full queues, clients that go or do not read, and the end."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.serve import guard
from jaxpaged.serve.app import create_app
from jaxpaged.serve.json_route import JsonRequest
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import EventStream
from tests import tiny
from tests.serve.conftest import ENGINE, serving, soon

LONG = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True}


def through(llm, requests, **options):
    """Return the replies of an application of its own, asked in order without a network."""

    async def ask():
        transport = httpx.ASGITransport(create_app(llm, "tiny", ServerOptions(**options)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return [await http.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(ask())


def test_without_the_key_there_is_no_v1(llm):
    keys = ("first", "second")
    guarded = [("POST", "/v1/completions", {"json": LONG | {"max_tokens": 1}}), ("GET", "/v1/models", {})]
    guarded += [("POST", "/tokenize", {"json": {"prompt": "a"}}), ("GET", "/v1/nothing", {})]
    guarded += [("GET", "/page/nothing", {})]
    wrong = [None, "Bearer", "Bearer firs", "Bearer first2", "Basic first", "Bearer \xe9"]
    for method, path, more in guarded:
        for given in wrong:
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            [reply] = through(llm, [(method, path, more | {"headers": headers})], api_keys=keys)
            assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
        right = {"headers": {"authorization": "Bearer second"}}
        [reply] = through(llm, [(method, path, more | right)], api_keys=keys)
        assert reply.status_code == (404 if path.endswith("nothing") else 200)
    asks = {"origin": "http://a.b", "access-control-request-method": "POST"}
    free = [("GET", path, {}) for path in ("/health", "/metrics", "/version", "/load", "/ping", "/")]
    free += [("OPTIONS", "/v1/completions", {"headers": asks})]
    for reply in through(llm, free, api_keys=keys, allowed_origins=("http://a.b",)):
        assert reply.status_code == 200


def test_bodies_have_limits(llm):
    text = {"content-type": "text/plain"}
    kind = {"content-type": "application/json; charset=utf-8"}

    async def drip():
        yield b'{"prompt": "'
        await asyncio.sleep(5)

    async def pour():
        for _ in range(100):
            yield b" " * 100

    post = [
        ({"content": "{}", "headers": text}, 415),
        ({"content": b"[" * 1000, "headers": kind}, 400),
        ({"content": b'{"prompt": "' + b"[" * 1000 + b'", "max_tokens": 1}', "headers": kind}, 400),
        ({"content": b"{" * 5, "headers": kind}, 400),
        ({"content": b" " * 5000, "headers": kind}, 413),
        ({"content": pour(), "headers": kind}, 413),
        ({"content": drip(), "headers": kind}, 408),
        ({"content": b'{"prompt": "a\xff"}', "headers": kind}, 400),
        ({"content": b'{"prompt": "a", "max_tokens": 1}', "headers": kind}, 200),
    ]
    replies = through(
        llm,
        [("POST", "/v1/completions", more) for more, _ in post],
        max_body_bytes=4096,
        max_nesting=16,
        body_timeout_s=0.2,
    )
    assert [reply.status_code for reply in replies] == [status for _, status in post]
    assert "levels of nesting" in replies[1].json()["error"]["message"]
    assert "characters" in replies[2].json()["error"]["message"], "brackets in a text are no nesting"


def test_of_large_bodies_only_so_many_come_at_once(llm, monkeypatch):
    """What is not yet received whole takes memory, too; small ones come in beside them."""
    monkeypatch.setattr(guard, "SMALL", 100)
    monkeypatch.setattr(guard, "MOST_LARGE_BODIES", 2)

    async def run():
        rest = asyncio.Event()
        app = create_app(llm, "tiny", ServerOptions(max_body_bytes=1024))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

            async def body():
                yield b'{"prompt": "a", "max_tokens": 1, "user": "' + b"x" * 800
                await rest.wait()
                yield b'"}'

            def ask(content):
                kind = {"content-type": "application/json"}
                return asyncio.ensure_future(http.post("/v1/completions", content=content, headers=kind))

            asked = [ask(body()) for _ in range(4)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            small = await ask(b'{"prompt": "a", "max_tokens": 1}')
            rest.set()
            replies = await asyncio.gather(*asked)
            return [reply.status_code for reply in (*replies, small, await ask(body()))]

    *asked, small, later = asyncio.run(run())
    assert sorted(asked) == [200, 200, 503, 503]
    assert (small, later) == (200, 200)


def test_a_body_is_parsed_once_and_its_bytes_are_not_kept(llm, monkeypatch):
    """Else each answer that is waited for would hold them."""
    seen = []
    parse = guard.parsed
    monkeypatch.setattr(guard, "parsed", lambda body, limits: seen.append(parse(body, limits)) or seen[-1])
    json_of = JsonRequest.json

    async def told(self):
        assert await self.body() == b"{}"
        value = await json_of(self)
        assert value is seen[-1]
        return value

    monkeypatch.setattr(JsonRequest, "json", told)
    app = create_app(llm, "tiny", ServerOptions(enable_lora_updates=True))

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            routes = ("v1/completions", "v1/chat/completions", "v1/responses", "v1/messages")
            routes += ("tokenize", "detokenize")
            updates = ("v1/load_lora_adapter", "v1/unload_lora_adapter")
            return [(await http.post(f"/{each}", json={"x": 1})).status_code for each in (*routes, *updates)]

    assert asyncio.run(run()) == [400] * 8
    assert len(seen) == 8


def test_a_full_queue_refuses_and_takes_again(llm, brake):
    with serving(llm, max_queue=2) as served:
        hold = brake(llm.engine)

        def ask(**more):
            return served.http.post("/v1/completions", json=LONG | {"max_tokens": 2} | more)

        running = [tiny.start(ask) for _ in range(6)]  # four rows, two places in the queue
        soon(lambda: served.service.num_open == 6)
        refused = ask()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "RateLimitError"
        too_many = ask(n=7)
        assert too_many.status_code == 400
        hold.off()
        assert [each.result(30).status_code for each in running] == [200] * 6
        assert ask().status_code == 200
        assert (
            b'jaxpaged:requests_refused_total{engine="0",model_name="tiny"} 1.0'
            in served.http.get("/metrics").content
        )


@pytest.mark.parametrize("kind", ["stream", "whole", "queued"])
def test_a_client_that_goes_frees_its_blocks_within_a_second(served, brake, kind):
    served.wait_for_silence()
    hold = brake(served.llm.engine)
    others = []
    if kind == "queued":
        others = [
            tiny.start(served.http.post, "/v1/completions", json=LONG | {"prompt": [7, i]}) for i in range(4)
        ]
        soon(lambda: served.service.num_open == 4)
    number, engine = len(others), served.llm.engine
    body = json.dumps(LONG | {"stream": kind == "stream"})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        soon(lambda: len(served.service.open_runs) == number + 1)
        [run] = [run for run in served.service.open_runs if len(run.prompts[0].prompt_token_ids) == 1]
        if kind != "queued":
            soon(lambda: run.num_completion_tokens > 0, lambda: hold.allow(1))
        before = engine.stats.num_new_tokens
    gone = time.monotonic()
    soon(lambda: run not in served.service.open_runs)
    hold.off()
    if kind == "queued":
        assert time.monotonic() - gone < 1
    else:
        soon(lambda: engine.stats.num_free_blocks == engine.stats.num_blocks)
        assert time.monotonic() - gone < 1
        assert engine.stats.num_new_tokens - before < 50
    for other in others:
        assert other.result(30).status_code == 200
    served.wait_for_silence()


def test_who_does_not_read_is_given_up_and_others_are_not_slowed():
    """The stream alone: sockets hold megabytes before anybody is slow."""
    taken, told = [], []

    async def events():
        for i in range(1000):
            taken.append(i)
            yield b"x" * 100
            await asyncio.sleep(0)

    async def stuck(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async def run():
        stream = EventStream(
            events(),
            max_unread_bytes=2000,
            slow=lambda: told.append("slow"),
            closed=lambda: told.append("closed"),
        )
        await asyncio.wait_for(stream({}, receive, stuck), 5)

    asyncio.run(run())
    assert told == ["slow", "closed"]
    assert 20 < len(taken) < 50


def test_an_answer_has_a_time_limit(llm, brake):
    with serving(llm, request_timeout_s=0.3) as served:
        hold = brake(llm.engine)
        whole = tiny.start(served.http.post, "/v1/completions", json=LONG)
        stream = tiny.start(served.http.post, "/v1/completions", json=LONG | {"stream": True})
        soon(lambda: len(served.service.open_runs) == 2)
        time.sleep(0.4)
        hold.off()
        assert whole.result(30).status_code == 504
        *_, error, done = [line for line in stream.result(30).text.splitlines() if line]
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "GatewayTimeoutError"
        assert done == "data: [DONE]"
        served.wait_for_silence()


@pytest.mark.parametrize("has_time", [True, False])
def test_the_end_waits_for_what_runs_and_then_no_longer(llm, brake, has_time):
    with serving(llm, drain_seconds=30 if has_time else 0.2) as served:
        hold = brake(llm.engine)
        hold.allow(2)
        stream = tiny.start(served.http.post, "/v1/completions", json=LONG | {"stream": True})
        watching = tiny.start(served.http.get, "/page/events")
        soon(lambda: len(served.service.open_runs) == 1 and len(served.server.server_state.connections) == 2)
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        soon(served.service.is_stopping.is_set)
        with pytest.raises(httpx.TransportError):
            served.http.get("/health")
        if not has_time:
            time.sleep(0.3)
        hold.off()
        events = [line for line in stream.result(30).text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        if has_time:
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            assert last["error"]["code"] == 503
        stopping.join(30)
        assert watching.result(5).status_code == 200
    assert llm.is_running


def test_the_engines_death_ends_all_with_an_error(model, brake, monkeypatch, caplog):
    llm = AsyncLLM(model, **ENGINE)
    with serving(llm) as served:
        hold = brake(llm.engine)
        hold.allow(3)
        whole = tiny.start(served.http.post, "/v1/completions", json=LONG)
        stream = tiny.start(
            served.http.post,
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "a"}], "stream": True},
        )
        soon(lambda: len(served.service.open_runs) == 2)
        assert served.http.get("/health").status_code == 200

        def die(*_):
            raise RuntimeError("out of luck")

        monkeypatch.setattr(tiny.driver_of(llm.engine), "_read", die)
        hold.off()
        assert whole.result(30).status_code == 500
        assert "out of luck" in whole.result().json()["error"]["message"]
        *_, error, _ = [line for line in stream.result(30).text.splitlines() if line]
        assert "out of luck" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert served.http.get("/health").status_code == 503
        assert served.http.post("/v1/completions", json=LONG).status_code == 500
        assert not served.service.open_runs
        assert served.service.num_open == 0
        assert llm.errored
