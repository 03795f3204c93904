"""New weights, pauses and sleep over HTTP: whole or not at all, with a key, from under a root."""

import contextlib
import json
import os
import struct
import threading

import httpx
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from jaxpaged.checks import InputError
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import random_weights
from jaxpaged.serve import updates
from jaxpaged.serve.options import ServerOptions
from tests import tiny
from tests.serve.conftest import serving, soon

NEW = random_weights(tiny.CONFIG, NAMES, seed=7)
NORM = "model.norm.weight"
KEY = {"authorization": "Bearer trainer"}
BINARY = KEY | {"content-type": "application/octet-stream"}
ASKED = {"prompt": [5, 6, 7], "max_tokens": 40, "seed": 3, "ignore_eos": True, "return_token_ids": True}
ASKED |= {"return_weight_versions": True}
ROUTES = ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "release_kv_cache_memory")
ROUTES += ("start_weight_update", "update_weights", "finish_weight_update", "init_weight_transfer_engine")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def served(llm, root):
    options = {"api_keys": ("trainer",), "enable_weight_updates": True, "weights_root": str(root)}
    with serving(llm, **options) as made:
        made.http.headers.update(KEY)
        yield made
    llm.llm.update_weights(tiny.weights())  # other modules share the model


@pytest.fixture(autouse=True)
def old(llm):
    """Give the engine its first weights, awake."""
    llm.llm.wake_up()
    llm.llm.resume_generation()
    llm.llm.update_weights(tiny.weights())


def post(served, path, **more):
    reply = served.http.post(path, **more)
    return reply.status_code, reply.json()


def sent(served, weights, path="/update_weights"):
    return post(
        served, path, content=weights if isinstance(weights, bytes) else save(weights), headers=BINARY
    )


def said(reply):
    """Return the status and the message of an error in OpenAI's form."""
    status, body = reply
    return status, body["error"]["message"]


def complete(served, **more):
    reply = served.http.post("/v1/completions", json=ASKED | more)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return choice


def versions(*spans):
    names = "version", "start", "end"
    return [dict(zip(names, span, strict=True)) for span in spans]


def test_new_weights_come_by_a_path_as_a_body_or_in_parts(served, llm, root):
    first = complete(served)
    version = llm.weight_version
    assert first["weight_versions"] == versions((str(version), 0, 40))
    status, body = sent(served, NEW)
    assert (status, body) == (200, {"message": "Weights updated", "weight_version": str(version + 1)})
    new = complete(served)
    assert new["token_ids"] != first["token_ids"]
    (root / "step 9").mkdir()
    save_file(tiny.weights(), root / "step 9" / "model.safetensors")
    by_path = {"update_info": {"path": "step 9"}, "weight_version": str(version + 9)}
    assert post(served, "/update_weights", json=by_path)[1]["weight_version"] == str(version + 9)
    assert complete(served)["token_ids"] == first["token_ids"]
    halves = [dict(list(NEW.items())[i::2]) for i in (0, 1)]
    assert post(served, "/start_weight_update")[0] == 200
    for half in halves:
        assert sent(served, half)[1]["message"] == "Weights received"
        assert complete(served)["token_ids"] == first["token_ids"]
    assert said(sent(served, {"x": NEW[NORM]})) == (400, "weight 'x' is none that the model has")
    status, body = post(served, "/finish_weight_update", json={"weight_version": version + 20})
    assert (status, body["weight_version"]) == (200, str(version + 20))
    assert complete(served)["token_ids"] == new["token_ids"]
    assert served.http.get("/weight_info").json() == {"weight_version": str(version + 20)}
    assert served.http.get("/get_world_size").json() == {"world_size": 1}


def test_a_stream_and_a_chat_tell_the_versions_at_their_end(served, llm):
    version = str(llm.weight_version)
    for path, body in (
        ("/v1/completions", ASKED),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]} | ASKED),
    ):
        body = {name: value for name, value in body.items() if name != "prompt" or "messages" not in body}
        with served.http.stream("POST", path, json=body | {"stream": True, "max_tokens": 3}) as reply:
            chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        told = [c["choices"][0].get("weight_versions") for c in chunks]
        assert told == [None] * (len(told) - 1) + [versions((version, 0, 3))]
        whole = served.http.post(path, json=body | {"max_tokens": 3}).json()["choices"][0]
        assert whole["weight_versions"] == versions((version, 0, 3))
    assert "weight_versions" not in complete(served, return_weight_versions=False)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_under_way_while_weights_change(served, llm, brake, mode):
    """A request that comes during the pause waits, and is of the new weights alone."""
    first, version = complete(served), llm.weight_version
    assert post(served, "/update_weights", content=save(NEW), headers=BINARY)[0] == 200
    new = complete(served)
    assert post(served, "/update_weights", content=save(tiny.weights()), headers=BINARY)[0] == 200
    hold = brake(llm.engine)
    begun = tiny.start(complete, served)
    hold.allow(6)
    soon(lambda: llm.engine.stats.num_running)
    pausing = tiny.start(post, served, f"/pause?mode={mode}")
    soon(pausing.done, lambda: hold.allow(1))
    assert pausing.result()[1]["status"] == "paused"
    assert served.http.get("/is_paused").json() == {"is_paused": True}
    late = tiny.start(complete, served)
    soon(lambda: len(served.service.open_runs) == 1 + (mode == "keep"))
    assert sent(served, NEW)[0] == 200
    assert post(served, "/resume")[1]["status"] == "resumed"
    hold.off()
    assert late.result(30)["token_ids"] == new["token_ids"]
    assert late.result()["weight_versions"] == versions((str(version + 3), 0, 40))
    choice = begun.result(30)
    count = len(choice["token_ids"])
    if mode == "keep":
        [before, after] = choice["weight_versions"]
        end = before["end"]
        assert 0 < end < 40
        assert (before, after) == (*versions((str(version + 2), 0, end), (str(version + 3), end, 40)),)
        assert choice["token_ids"][:end] == first["token_ids"][:end]
    else:
        assert (choice["finish_reason"], count) == ("length", 40) if mode == "wait" else ("abort", count)
        assert choice["token_ids"] == first["token_ids"][:count]
        assert choice["weight_versions"] == versions((str(version + 2), 0, count))


def test_it_sleeps_and_wakes(served, llm):
    first = complete(served)
    assert post(served, "/sleep?level=2&mode=wait")[1]["status"] == "sleeping"
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert said(post(served, "/resume")) == (
        400,
        "sleep='the weights are away' must be over: wake_up(tags=['weights'])",
    )
    assert sent(served, tiny.weights())[0] == 200
    assert post(served, "/wake_up?tags=weights&tags=kv_cache")[1]["status"] == "awake"
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert complete(served)["token_ids"] == first["token_ids"]
    assert post(served, "/reset_prefix_cache")[0] == 200
    assert post(served, "/reset_prefix_cache?reset_running_requests=true")[0] == 200
    assert post(served, "/pause")[0] == 200
    assert post(served, "/release_kv_cache_memory")[0] == 200
    assert post(served, "/wake_up")[0] == 200
    assert complete(served)["token_ids"] == first["token_ids"]


def header(value, data=b""):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data


ZEROS = np.zeros(32, np.float32).tobytes()
F32 = {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body cannot be read"),
        (b"\x80\x04\x95.", "the body cannot be read"),
        (b"PK\x03\x04" + bytes(100), "with a header of at most 16777216 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "with a header of at most 16777216 bytes"),
        (struct.pack("<Q", 2**20) + b"{}", "the body cannot be read"),
        (header(b"{" * 1000), "the body cannot be read"),
        (header({NORM: F32}), "the body cannot be read"),
        (header({NORM: F32}, ZEROS[1:]), "the body cannot be read"),
        (header({NORM: F32}, ZEROS + b"x"), "the body cannot be read"),
        (header({NORM: F32 | {"data_offsets": [-4, 124]}}, ZEROS), "the body cannot be read"),
        (header({NORM: F32 | {"shape": [2**62, 4]}}, ZEROS), "the body cannot be read"),
        (header({NORM: F32 | {"dtype": "I32"}}, ZEROS), "has type int32, must be float32"),
        (
            header({NORM: F32 | {"dtype": "U32"}}, ZEROS),
            "the body cannot be read: 'model.norm.weight' has type U32",
        ),
        (header({NORM: F32 | {"dtype": "O"}}, ZEROS), "the body cannot be read"),
        (header({NORM: F32 | {"shape": [4, 8]}}, ZEROS), r"has shape (4, 8), must be (32,)"),
        (header({"../x": F32}, ZEROS), "weight '../x' is none that the model has"),
    ],
)
def test_hostile_bodies_change_nothing(served, llm, body, message, tmp_path, monkeypatch):
    monkeypatch.setattr(updates.tempfile, "tempdir", str(tmp_path))
    version, params = llm.weight_version, tiny.driver_of(llm.engine).device.params
    status, told = said(sent(served, body))
    assert (status, message in told) == (400, True), told
    assert str(tmp_path) not in told
    assert (llm.weight_version, tiny.driver_of(llm.engine).device.params is params) == (version, True)
    assert not [*tmp_path.iterdir()]


def test_a_part_may_be_wrong_and_an_update_is_still_whole_or_nothing(served, llm):
    """A wrong version, and a tensor that comes twice, are found at the end: nothing of the update happens."""
    first, version = complete(served), llm.weight_version
    assert said(post(served, "/finish_weight_update")) == (
        400,
        "no update has begun: post to /start_weight_update before",
    )
    for finish, parts, message in (
        ({}, [], "parts=0 must be at least one"),
        ({}, [NEW, {NORM: NEW[NORM]}], f"weight '{NORM}' must come once"),
        ({"weight_version": version}, [NEW], "must be above the version of the present weights"),
        ({"weight_version": "v2"}, [NEW], "weight_version='v2' must be a whole number"),
    ):
        assert post(served, "/start_weight_update")[0] == 200
        assert [sent(served, part)[0] for part in parts] == [200] * len(parts)
        status, told = said(post(served, "/finish_weight_update", json=finish))
        assert (status, message in told) == (400, True), told
        assert complete(served)["token_ids"] == first["token_ids"]
    assert post(served, "/start_weight_update")[0] == 200
    assert said(sent(served, NEW, "/update_weights?weight_version=9"))[0] == 400
    assert llm.weight_version == version
    assert post(served, "/start_weight_update")[0] == 200  # drops what came
    assert said(post(served, "/finish_weight_update"))[0] == 400


def test_paths_stay_under_the_root(served, llm, root, tmp_path):
    outside = tmp_path / "outside"
    for folder in (outside, root / "linked file", root / "pickled", root / "indexed", root / "pipe"):
        folder.mkdir()
    save_file(NEW, outside / "model.safetensors")
    (root / "linked").symlink_to(outside)
    (root / "linked file" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04\x95.")
    os.mkfifo(root / "pipe" / "model.safetensors")
    index = {"weight_map": {NORM: "../../outside/model.safetensors"}}
    (root / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    version = llm.weight_version
    places = [
        "..",
        "../outside",
        str(outside),
        "linked",
        "linked file",
        "nothing",
        "a\0b",
        "/etc",
        "x" * 3000,
    ]
    for path, message in (
        *((place, "must be a directory under --weights-root, with all its files") for place in places),
        ("pickled", "pytorch_model.bin is of another form, which is not read"),
        ("pipe", "model.safetensors must be a file"),
        ("indexed", "must be a .safetensors file in the same directory"),
        ("", "update_info.path"),
        (3, "update_info.path"),
    ):
        status, told = said(post(served, "/update_weights", json={"update_info": {"path": path}}))
        assert (status, message in told) == (400, True), told
        assert str(root) not in told
    assert said(post(served, "/update_weights", json={"update_info": {"names": ["a"]}}))[0] == 400
    assert said(post(served, "/init_weight_transfer_engine", json={"init_info": {"world_size": 2}}))[0] == 400
    assert post(served, "/init_weight_transfer_engine", json={"init_info": {}})[0] == 200
    assert said(post(served, "/pause?mode=now"))[0] == 400
    assert said(post(served, "/wake_up?tags=all"))[0] == 400
    assert said(post(served, "/sleep?level=3"))[0] == 400
    assert llm.weight_version == version


def test_bodies_have_limits_and_come_one_at_a_time(served, llm, tmp_path, monkeypatch):
    """A body is refused by its length, by what comes of it, and when it does not go on."""
    monkeypatch.setattr(updates.tempfile, "tempdir", str(tmp_path))
    table = "model.embed_tokens.weight"
    small, version = save({table: NEW[table]}), llm.weight_version
    rest = threading.Event()

    def drip(most_s):
        yield small[:20]
        rest.wait(most_s)
        yield small[20:]

    def pour():
        yield small
        for _ in range(100):
            yield bytes(1000)

    options = {
        "api_keys": ("trainer",),
        "enable_weight_updates": True,
        "max_weight_bytes": 2 * len(small) - 1,
    }
    with serving(llm, body_timeout_s=0.2, **options) as other:
        other.http.headers.update(KEY)
        assert said(sent(other, bytes(2 * len(small))))[0] == 413
        late = post(other, "/update_weights", content=drip(0.5), headers=BINARY)
        assert said(late) == (408, "the body did not come in time")
        no_root = 400, "path='.' must be left out without --weights-root"
        assert said(post(other, "/update_weights", json={"update_info": {"path": "."}})) == no_root
        assert post(other, "/start_weight_update")[0] == 200
        assert sent(other, small)[0] == 200
        assert said(sent(other, small))[0] == 413  # together they are too many
        assert post(other, "/finish_weight_update")[0] == 200
        with contextlib.suppress(httpx.TransportError):  # closed while it still sends
            assert said(post(other, "/update_weights", content=pour(), headers=BINARY))[0] == 413
    slow = tiny.start(post, served, "/update_weights", content=drip(20), headers=BINARY)
    soon(lambda: [*tmp_path.iterdir()])
    assert said(sent(served, small))[0] == 409
    assert said(post(served, "/start_weight_update"))[0] == 409
    rest.set()
    assert slow.result(30)[0] == 200
    assert llm.weight_version == version + 2
    assert not [*tmp_path.iterdir()]


def test_nothing_of_it_is_there_without_the_option_or_a_key(served, llm):
    version = llm.weight_version
    for wrong in ({}, {"authorization": "Bearer traine"}):
        with httpx.Client(base_url=served.url, headers=wrong) as http:
            replies = [http.post(f"/{route}") for route in ROUTES]
            replies += [http.get(f"/{route}") for route in ("is_paused", "is_sleeping", "weight_info")]
            kind = {"content-type": "application/octet-stream"}
            replies.append(http.post("/update_weights", content=save(NEW), headers=kind))
        assert [reply.status_code for reply in replies] == [401] * len(replies)
    kind = {"content-type": "text/plain"}
    assert said(post(served, "/update_weights", content=b"x", headers=kind))[0] == 415
    assert said(post(served, "/pause", content=b"x", headers=kind))[0] == 415
    with serving(llm, api_keys=("trainer",)) as other:
        other.http.headers.update(KEY)
        for route in ROUTES:
            assert said(post(other, f"/{route}", json={}))[0] == 404
        assert said(post(other, "/pause"))[0] == 415
    assert (llm.weight_version, llm.engine.is_paused) == (version, False)
    for options, message in (
        ({"enable_weight_updates": True}, r"^api_keys=\(\) must be given with enable_weight_updates"),
        ({"weights_root": "/tmp"}, "^weights_root='/tmp' must be left out without enable_weight_updates$"),
        (
            {"max_weight_bytes": 2000},
            "^max_weight_bytes=2000 must be left out without enable_weight_updates$",
        ),
        (
            {"enable_weight_updates": True, "api_keys": ("a",), "weights_root": "/nowhere"},
            "^weights_root='/nowhere' must be a directory$",
        ),
    ):
        with pytest.raises(InputError, match=message):
            ServerOptions(**options)
