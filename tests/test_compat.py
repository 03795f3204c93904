"""Import paths of the tables: every name of vLLM's is there, and every old path warns and leads on."""

import argparse
import asyncio
import importlib
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jaxpaged.api import vllm_helpers as helpers
from jaxpaged.api import vllm_server
from jaxpaged.api.argument_parser import FlexibleArgumentParser
from jaxpaged.checks import InputError
from jaxpaged.compat import OLD_PATHS, REFUSED_PATHS, VLLM_PATHS, look_up
from jaxpaged.vllm_names.judge import known_names
from jaxpaged.vllm_names.make import SCRIPTED

ROOT = Path(__file__).parents[1] / "jaxpaged"

NAMES = [(path, name, location) for path, names in VLLM_PATHS.items() for name, location in names.items()]


@pytest.mark.parametrize(("path", "name", "location"), NAMES)
def test_a_path_of_vllms_has_the_object_itself(path, name, location):
    module = importlib.import_module(f"jaxpaged.{path}")
    assert getattr(module, name) is look_up(location, name)
    assert name in getattr(module, "__all__", [name])
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from jaxpaged.{path} import no_such_name")


@pytest.mark.parametrize(
    ("old", "new"),
    [(old, new) for old, new in OLD_PATHS.items() if old != "ray"],  # Ray's import warns, too
)
def test_an_old_path_warns_and_leads_to_the_new_module(old, new, monkeypatch):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"jaxpaged.{old}.")]:
        monkeypatch.delitem(sys.modules, name)
    moved = importlib.import_module(f"jaxpaged.{new}")
    with pytest.warns(DeprecationWarning, match=f"jaxpaged.{old} has moved to jaxpaged.{new}"):
        shim = importlib.import_module(f"jaxpaged.{old}")
    [name, *_] = [name for name in vars(moved) if not name.startswith("__")] or ["__doc__"]
    assert name == "__doc__" or getattr(shim, name) is getattr(moved, name)


@pytest.mark.parametrize("path", ["no_such_module", "step.no_such_module", "verify.no_such_module"])
def test_a_module_that_is_nowhere_is_told_by_the_name_that_was_asked_for(path):
    with (
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),  # an old path
        pytest.raises(ModuleNotFoundError, match=f"No module named 'jaxpaged.{path}'") as raised,
    ):
        importlib.import_module(f"jaxpaged.{path}")
    assert raised.value.name == f"jaxpaged.{path}"


def is_served(path):
    own = (ROOT / path.replace(".", "/")).with_suffix(".py"), ROOT / path.replace(".", "/") / "__init__.py"
    known = any(f"{known}.".startswith(f"{path}.") for known in [*VLLM_PATHS, *OLD_PATHS])
    return not path or known or any(file.exists() for file in own)


def test_each_module_and_name_of_vllms_is_there_or_refused_in_a_sentence():
    for path, names in known_names()["modules"].items():
        full = f"jaxpaged.{path}".rstrip(".")
        if path.partition(".")[0] == "ray":  # our own of that name, which needs a package of its own
            continue
        if not is_served(path):
            with pytest.raises(ModuleNotFoundError, match="is not served: "):
                importlib.import_module(full)
            continue
        module = importlib.import_module(full)
        for name in names if path in SCRIPTED else ():
            refused = f"{path}.{name}".lstrip(".") + " is not served"
            try:
                value = getattr(module, name)
            except ImportError as error:
                value = str(error)
            assert not isinstance(value, str) or refused in value or name.startswith("__"), (path, name)


def test_each_refusal_says_what_to_use():
    assert [path for path, told in REFUSED_PATHS.items() if told.count("; use ") != 1] == []


def test_what_is_not_served_says_what_to_take():
    with pytest.raises(ImportError, match="kv_transfer is not served: .*LLM.export_blocks"):
        importlib.import_module("jaxpaged.distributed.kv_transfer.kv_connector.v1.base")
    with pytest.raises(ImportError, match="config.WeightTransferConfig is not served: .*EngineArgs"):
        from jaxpaged.config import WeightTransferConfig  # noqa: F401
    with pytest.raises(ImportError, match="ModelRegistry is not served: .*jaxpaged.models"):
        from jaxpaged import ModelRegistry  # noqa: F401
    assert not hasattr(importlib.import_module("jaxpaged.config"), "nobody_has_this")


def test_helpers_of_scripts_do_what_vllms_do(capsys, monkeypatch, tmp_path):
    logger = helpers.init_logger("a.script")
    assert logger.name == "a.script"
    assert len({helpers.random_uuid() for _ in range(9)}) == 9
    assert len(helpers.random_uuid()) == 32
    ports = helpers.get_open_ports_list(3)
    assert len({*ports, helpers.get_open_port()}) >= 3
    assert min(ports) > 0
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert helpers.get_ip() == "10.1.2.3"
    monkeypatch.delenv("VLLM_HOST_IP")
    assert helpers.get_ip().count(".") == 3
    helpers.print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0])
    helpers.print_embeddings([1.0], "One")
    assert capsys.readouterr().out == (
        "Embeddings: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\nOne: [1.0] (size=1)\n"
    )
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    for source in (tmp_path / "template.jinja", "{{ messages }}"):
        assert helpers.load_chat_template(source) == "{{ messages }}"
    assert helpers.load_chat_template(None) is None
    with pytest.raises(InputError, match="chat_template='absent' must be a file or a template"):
        helpers.load_chat_template("absent")
    platform = helpers.current_platform
    assert (platform.device_type, platform.is_cpu(), platform.is_cuda()) == ("cpu", True, False)
    helpers.set_ulimit(64)
    helpers.cleanup_dist_env_and_memory()


def test_a_handler_ends_when_its_client_goes():
    class Request:
        def __init__(self, *kinds):
            self.kinds = [*kinds]

        async def receive(self):
            while not self.kinds:
                await asyncio.sleep(60)
            return {"type": self.kinds.pop(0)}

    ended = []

    @vllm_server.with_cancellation
    async def answer(seconds, raw_request):
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(seconds)

    async def run():
        gone = Request("http.request", "http.disconnect")
        return await answer(60, gone), await answer(0, raw_request=Request("http.request"))

    assert asyncio.run(run()) == (None, "done")
    assert ended == [60, 0]


def test_a_scripts_own_app_is_served_on_its_socket():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"an answer"})

    async def run():
        with socket.create_server(("127.0.0.1", 0)) as bound:
            serve = vllm_server.serve_http(app, bound, log_level="error", lifespan="off")
            serving = asyncio.create_task(serve)
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answers.append(await reader.read())
            writer.close()
            signal.raise_signal(signal.SIGINT)  # uvicorn's own way to end
            await (await serving)

    answers = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert b"an answer" in answers[0]
    with pytest.raises(InputError, match="enable_ssl_refresh=True must be False"):
        asyncio.run(vllm_server.serve_http(app, enable_ssl_refresh=True))


def test_a_port_on_the_command_line():
    assert FlexibleArgumentParser.check_port("8000") == 8000
    with pytest.raises(argparse.ArgumentTypeError, match="Port must be an integer"):
        FlexibleArgumentParser.check_port("80")


def test_an_old_path_runs_as_a_program():
    command = [sys.executable, "-W", "ignore", "-m", "jaxpaged.replay", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "state" in done.stdout
