"""Messages between processes are data and come back as they were; bytes from strangers do no harm."""

import contextlib
import dataclasses
import json
import logging
import os
import random
import socket
import threading

import jax
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.engine.device import CALL_CLASSES
from jaxpaged.parallel import messages, processes
from jaxpaged.step.features import Features
from jaxpaged.step.state import empty_rows

KEY = bytes(range(32))


def sent(value):
    return messages.decode(b"".join(messages.encode(value, CALL_CLASSES)), CALL_CLASSES)


def test_values_come_back_as_they_were():
    rows = empty_rows(2, 3, 97, Features.on(adapters=None))
    values = [
        *(None, True, 3, -(2**40), 0.5, "text é", [], (1, [2, (3,)]), {"a": {}, "b": [None]}),
        *(np.int32(7), np.bool_(True), np.zeros((0, 3), np.float16), np.arange(6).reshape(2, 3)[:, ::2]),
        np.arange(4, dtype=np.float32).astype(jax.numpy.bfloat16),
        ("_place", (rows, np.arange(2, dtype=np.int32))),
    ]
    for value in values:
        back = sent(value)
        assert type(back) is type(value)
        assert jax.tree.structure(back) == jax.tree.structure(value)
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
            assert type(one) is type(other)
            if isinstance(one, np.ndarray | np.generic):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert one.tobytes() == other.tobytes()
            else:
                assert one == other


class Other:
    """A value that has no form in a message."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """A class of a name that is listed, but another."""


@pytest.mark.parametrize("value", [Other(), Rows(), {1: 2}, np.array([Other()]), b"bytes", {1}])
def test_other_values_are_not_sent(value):
    with pytest.raises((TypeError, InputError)):
        messages.encode(value, CALL_CLASSES)


def test_bytes_that_are_no_message_are_refused():
    def message(described, arrays=b""):
        text = json.dumps(described).encode()
        return len(text).to_bytes(8, "big") + text + arrays

    wrong = [
        b"",
        b"\xff" * 40,
        message(7),
        message(["=", []]),
        message(["array", "m8[s/0]", [1]], bytes(8)),
        message(["array", "object", [1]], bytes(8)),
        message(["array", "int32", [-1]]),
        message(["array", "int32", [2**62]]),
        message(["array", "int32", [2]], bytes(9)),
        message(["of", "Popen", []]),
        message(["of", "Beams", []]),
        message(["list", 7]),
        (10**6).to_bytes(8, "big") + b"[" * 10**6,
    ]
    for data in wrong:
        with pytest.raises(InputError, match=r"^a message cannot be read: "):
            messages.decode(data, CALL_CLASSES)
    whole, rng = b"".join(messages.encode(("_place", [empty_rows(1, 2, 97)]), CALL_CLASSES)), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(InputError):
            messages.decode(damaged, CALL_CLASSES)


def test_strangers_neither_end_nor_delay_a_start(monkeypatch, caplog):
    """Processes 1 and 2 come beside silent ones, talkative ones, and one with another key."""
    monkeypatch.setattr(processes, "HELLO_SECONDS", 600)
    monkeypatch.setattr(processes, "START_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.WARNING):
        port = server.getsockname()[1]
        lines: dict[int, processes.Line] = {}
        listening = threading.Thread(
            target=lambda: lines.update(processes.welcome(server, 3, KEY, CALL_CLASSES))
        )
        listening.start()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        silent[0].sendall(os.urandom(10**4))
        silent[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(InputError, match="does not have this process's secret"):
            processes.reach("127.0.0.1", port, 1, b"another key" * 3)
        nobody = processes.reach("127.0.0.1", port, 3, KEY)
        with pytest.raises((EOFError, OSError)):
            nobody.receive()
        others = [processes.reach("127.0.0.1", port, i, KEY, CALL_CLASSES) for i in (2, 1)]
        listening.join(60)
        assert not listening.is_alive(), "nobody waits for those who are silent"
        assert sorted(lines) == [1, 2]
        lines[1].send(("_place", (np.int32(3),)))
        assert others[1].receive() == ("_place", (np.int32(3),))
        others[0].send({"dtype": "float32"})
        assert lines[2].receive() == {"dtype": "float32"}
        for each in (*silent, *(line._connection for line in (*others, *lines.values(), nobody))):
            each.close()
    assert "process_id=3 must be of a process that has not come" in caplog.text
    assert "is none of this engine's processes: the other end does not have this end's key" in caplog.text


def test_a_secret_is_asked_for_beyond_loopback(monkeypatch, tmp_path):
    for name in (processes.SECRET, processes.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"^distributed_init='0.0.0.0:1' must be on loopback unless"):
        processes.join("0.0.0.0:1", 2, 0)
    monkeypatch.setenv(processes.SECRET, "short")
    with pytest.raises(InputError, match=r"^JAXPAGED_SECRET must have at least 16 bytes$"):
        processes.join("127.0.0.1:1", 2, 0)
    monkeypatch.setenv(processes.SECRET_FILE, str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"^JAXPAGED_SECRET_FILE='.*none' cannot be read: No such file"):
        processes.join("127.0.0.1:1", 2, 0)
    (tmp_path / "none").write_text("a secret of all processes\n")
    assert processes._secret() == b"a secret of all processes"
