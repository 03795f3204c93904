"""One server over the tiny model for all tests here, in a thread, so that its engine can be looked at."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import httpx
import openai
import pytest

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.serve.app import create_app
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.server import Server, bind, url
from jaxpaged.serve.service import Service
from tests import tiny
from tests.tiny_gguf import write_gguf

# The same shapes as in test_cli.py and test_llm.py, so that they share a program.
ENGINE = tiny.DEFAULTS | {"structured_outputs_mib": 0}
# Takes tools, and shows how calls are written.
TEMPLATE = (
    "{% for t in tools or [] %}<tool_call>{{ t.function.name }};{% endfor %}"
    "{% for d in documents or [] %}document:{{ d.text }};{% endfor %}"
    "{% if reasoning_effort %}effort:{{ reasoning_effort }}{{ enable_thinking }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.items() | list }})"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def soon(is_so, meanwhile=lambda: None):
    """Wait, at most half a minute, for what others do; `meanwhile` is done again and again."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "not within 30 s"
        meanwhile()
        time.sleep(0.005)


@dataclasses.dataclass
class Served:
    """A server that runs."""

    url: str
    llm: AsyncLLM
    service: Service
    server: Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def close(self) -> None:
        """Close the clients; the server runs on."""
        self.http.close()
        self.openai.close()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def wait_for_silence(self) -> None:
        """Wait until no request is open or runs, and no block is held."""
        soon(lambda: not self.service.open_runs and self.llm.engine.is_idle)


@contextlib.contextmanager
def serving(llm: AsyncLLM, **options):
    chosen = ServerOptions(port=0, **{"chat_template": TEMPLATE} | options)
    ready, loops = threading.Event(), []

    def is_ready():
        loops.append(asyncio.get_running_loop())
        ready.set()

    with bind(chosen) as bound:
        server = Server(create_app(llm, "tiny", chosen), chosen, is_ready)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        assert ready.wait(30)
        served = Served(url(chosen, bound), llm, server.service, server, thread, loops[0])
        try:
            yield served
        finally:
            served.close()
            if thread.is_alive():
                served.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("serve") / "tiny.gguf"))


@pytest.fixture(scope="session")
def llm(model):
    made = AsyncLLM(model, **ENGINE)
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def served(llm):
    with serving(llm) as made:
        yield made


@pytest.fixture
def says(served, monkeypatch):
    """Make the model write a text: the engine's own outputs, with their texts exchanged."""
    stream = served.llm.stream

    def speak(text):
        async def scripted(prompts, request_id):
            left, count = text, prompts[0].requests[0].params.max_tokens
            size = -(-len(text) // count)
            async for i, output in stream(prompts, request_id):
                [answer] = output.outputs
                reason = "stop" if answer.finish_reason else None
                end = len(left) if reason else size * len(answer.token_ids)
                fragment, left = left[:end], left[end:]
                answer = dataclasses.replace(answer, text=fragment, finish_reason=reason)
                yield i, dataclasses.replace(output, outputs=[answer])

        monkeypatch.setattr(served.llm, "stream", scripted)

    return speak
