"""Replicas and workers on Ray, on one machine; some of them are killed in the middle of their work."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import socket
import threading
import time
import uuid
import warnings
from pathlib import Path

import httpx
import pytest

from jaxpaged.checks import InputError
from tests import tiny
from tests.tiny_gguf import write_gguf

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
# Ray replaces a proxy that is silent for seconds, and drops its connections: a busy machine is no fault.
os.environ |= {f"RAY_SERVE_PROXY_{kind}_CHECK_TIMEOUT_S": "120" for kind in ("HEALTH", "READY")}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own are not ours to mend
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxpaged[ray]'")
    from ray import serve

    import jaxpaged.batch.ray as on_ray

NUM_REQUESTS = 200
MARK = "JAXPAGED_RAY_TEST"  # by which processes of this test are known


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def cluster():
    os.environ[MARK] = uuid.uuid4().hex
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


def our_processes(title):
    """Return the ids of the cluster's processes with this title."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.environ[MARK].encode() in (folder / "environ").read_bytes()
            if is_ours and title in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_a_batch_whose_worker_is_killed_has_each_row_once(cluster, model, tmp_path):
    file, folder = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts = [[3 + i % 90, 4, 5 + i // 90] for i in range(120)]
    rows = [{"prompt_token_ids": prompt, "id": i} for i, prompt in enumerate(prompts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    killed = []

    def kill_one():
        """Kill a worker as soon as it has answered a few rows of a part."""
        end = time.monotonic() + 300  # a cluster takes a minute to start on a busy machine
        while not killed and time.monotonic() < end:
            if any(part.stat().st_size for part in folder.glob(".*.part")):
                for process in our_processes("MapWorker")[:1]:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
            time.sleep(0.002)

    killer = threading.Thread(target=kill_one)
    killer.start()
    options = tiny.DEFAULTS | {"num_workers": 1, "rows_per_part": 40}
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    num_answered = on_ray.answer_files([file], folder, model, sampling, **options)
    killer.join()
    assert killed
    assert 80 <= num_answered < 120  # of the killed worker's part only what it had not written
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().split("\n")[:-1]
    ]
    assert [(line["row"], line["id"]) for line in lines] == [(i, i) for i in range(120)]
    for i in (0, 39, 119):
        assert lines[i]["outputs"][0]["token_ids"] == list(tiny.reference_answer(tuple(prompts[i]), 40))
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    assert on_ray.answer_files([file], folder, model, sampling, **options) == 0


@pytest.fixture(scope="module")
def url(cluster, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(on_ray.application(model, {"served_model_names": ("tiny",)}, num_replicas=2, **tiny.DEFAULTS))
    return f"http://127.0.0.1:{port}"


def ask(client, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return client.post("/v1/completions", json=body | fields)


def total(client, pattern):
    """Return a metric of both replicas, which take turns when they are asked without a prompt."""
    texts = [client.get("/metrics").text for _ in range(2)]
    return [float(re.search(f"^vllm:{pattern} (\\S+)$", text, re.MULTILINE)[1]) for text in texts]


def test_prompts_go_where_their_beginnings_are(url):
    """All but the first request of an opening hit, where half would not by chance; both replicas answer."""
    with httpx.Client(base_url=url, timeout=60) as client:
        cached = []
        for turn in range(4):
            for opening in range(4):
                reply = ask(client, [10 + opening] * 40 + [turn]).json()
                cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0] * 4 + [40] * 12
        # New openings go to both replicas in turn, unless Ray still counts the request before.
        hits = total(client, "prefix_cache_hits_total{.*}")
        assert sum(hits) == 4 * 3 * 40
        assert min(hits) >= 3 * 40
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.post("/v1/completions", json={"prompt": "ab", "n": 0}).status_code == 400
        assert client.get("/").status_code == 404


def test_a_stream_comes_in_chunks_and_is_given_up_with_its_client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": [7, 8, 9], "max_tokens": 100, "temperature": 0, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = [line for line in reply.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert len(events) > 3
        with client.stream("POST", "/v1/completions", json=body | {"prompt": [[7, 8, 9]] * 40}) as reply:
            next(reply.iter_lines())  # and goes
        end = time.monotonic() + 20
        while not sum(total(client, 'request_success_total{.*="abort".*}')) > 0:
            assert time.monotonic() < end, "the answers that nobody waits for run on"
            time.sleep(0.1)


def test_every_request_is_answered_once_though_a_replica_is_killed(url):
    prompts = [[3 + i % 80, 5, 6 + i // 80] for i in range(NUM_REQUESTS)]
    num_done, lock = 0, threading.Lock()
    replicas = our_processes("ServeReplica:default:Replica")
    assert len(replicas) == 2

    def answer(client, prompt):
        nonlocal num_done
        reply = ask(client, prompt)
        with lock:
            num_done += 1
            if num_done == NUM_REQUESTS // 4:
                os.kill(replicas[0], signal.SIGKILL)
        return reply

    with (
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=16)) as client,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        replies = list(pool.map(lambda prompt: answer(client, prompt), prompts))
    assert num_done == NUM_REQUESTS
    assert [reply.status_code for reply in replies] == [200] * NUM_REQUESTS
    for prompt, reply in zip(prompts, replies, strict=True):
        [choice] = reply.json()["choices"]
        assert choice["token_ids"] == list(tiny.reference_answer(tuple(prompt), 4))
    assert len({reply.json()["id"] for reply in replies}) == NUM_REQUESTS
    assert not Path(f"/proc/{replicas[0]}").exists()


class DyingReplicas:
    """Stands for the handle of replicas: the first dies behind what it has sent, the second answers."""

    def __init__(self, *sent):
        self.sent, self.num_asked = sent, 0

    def options(self, **_):
        return self

    def remote(self, *_):
        self.num_asked += 1
        return DyingReplica(self.sent if self.num_asked == 1 else ANSWER, dies=self.num_asked == 1)


class DyingReplica:
    def __init__(self, sent, dies):
        self.sent, self.dies = sent, dies

    async def __aiter__(self):
        for message in self.sent:
            yield [message]
        if self.dies:
            raise ray.exceptions.RayActorError

    def cancel(self):
        pass


START = {"type": "http.response.start", "status": 200, "headers": []}
PART = {"type": "http.response.body", "body": b"part", "more_body": True}
END = {"type": "http.response.body", "body": b"end", "more_body": False}
EMPTY = {"type": "http.response.body", "body": b"", "more_body": False}
ANSWER = (START, PART, END)


@pytest.mark.parametrize(
    ("sent", "bodies", "num_asked"),
    [
        ((), [b"part", b"end"], 2),
        ((START,), [b"part", b"end"], 2),
        ((START, PART), [b"part", b'data: {"error"'], 1),
        (ANSWER, [b"part", b"end"], 1),
        ((START, PART, EMPTY), [b"part", b""], 1),
        ((START, EMPTY), [b""], 1),
    ],
)
def test_nothing_is_sent_behind_the_end_of_an_answer(sent, bodies, num_asked):
    """A replica may die between the last message of an answer and the end of its stream."""
    replicas = DyingReplicas(*sent)
    ingress = on_ray.Ingress(replicas, on_ray.ServerOptions(allowed_hosts=("*",)))
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/v1/models",
        "raw_path": b"/v1/models", "query_string": b"", "headers": [(b"host", b"a")], "state": {},
    }  # fmt: skip
    received = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        received.append(message)

    async def ask():
        await (await ingress(None))(scope, receive, send)

    asyncio.run(ask())
    assert [message["type"] for message in received] == [START["type"]] + [END["type"]] * len(bodies)
    for message, body in zip(received[1:], bodies, strict=True):
        assert message["body"].startswith(body)
    assert [message["more_body"] for message in received[1:]] == [True] * (len(bodies) - 1) + [False]
    assert replicas.num_asked == num_asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 0}, "num_replicas=0 must be"),
        ({"server_options": {"enable_lora_updates": True}}, "enable_lora_updates=True must be False"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"max_lead": -1}, "max_lead=-1 must be"),
    ],
)
def test_mistakes_are_told_before_anything_starts(options, message):
    with pytest.raises(InputError, match=message):
        on_ray.application("smollm2", **options)
    with pytest.raises(InputError, match="num_workers=0 must be"):
        on_ray.answer_files(["x"], "y", "smollm2", num_workers=0)
