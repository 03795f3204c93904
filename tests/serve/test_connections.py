"""Tests of connections before there is a request: they have bounds in bytes and time, and others are
served.
"""

import contextlib
import json
import resource
import socket
import time

import httpx
import pytest

from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.server import OTHER_FILES, file_room
from tests.serve.conftest import serving, soon

MOST = 2048  # bytes of a head
MOST_CONNECTIONS = 64
POST = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + "transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def strict(llm):
    """Start a server with small bounds."""
    with serving(
        llm, max_head_bytes=MOST, head_timeout_s=0.3, max_connections=MOST_CONNECTIONS, body_timeout_s=20
    ) as made:
        yield made


def connected(served):
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def poured(client, before, again, most=2**22):
    """Send `again` until the server closes; what it said, and how many bytes it took."""
    num_sent = 0
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        client.sendall(before.encode())
        while num_sent < most:
            client.sendall(again.encode())
            num_sent += len(again)
            time.sleep(0.0005)
    return said(client), num_sent


def said(client):
    """Return all that the server sends until it closes; a reset takes what was not read yet."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while fragment := client.recv(2**16):
            told += fragment
    return told.decode()


@pytest.mark.parametrize(
    ("before", "again"),
    [
        ("GET /health HTTP/1.1\r\nx: ", "a" * 100),
        ("GET /health HTTP/1.1\r\n" + "x" * 100, "x" * 100),
        ("GET /", "a" * 100),
        ("GET /health HTTP/1.1\r\n", "x: " + "y" * 95 + "\r\n"),
        (CHUNKED, "1;" + "x" * 100),
        (CHUNKED + "0\r\nx: ", "a" * 100),
        (CHUNKED + "0\r\n", "x: " + "y" * 95 + "\r\n"),
    ],
    ids=["value", "name", "address", "headers", "frame", "trailer", "trailers"],
)
def test_what_never_ends_is_cut_off(strict, before, again):
    """Long before a head's time is over; of what a body's frame holds, nothing is told."""
    with connected(strict) as client:
        told, num_sent = poured(client, before, again)
    assert num_sent < 2**20
    assert not told or told.startswith(("HTTP/1.1 431 ", "HTTP/1.1 400 "))


def test_a_head_is_refused_in_openai_s_form(strict):
    many = "".join(f"x{i}: 1\r\n" for i in range(300))
    for head, status in (
        (f"GET /health HTTP/1.1\r\nhost: localhost\r\nx: {'a' * MOST}\r\n\r\n", 431),
        (f"GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n", 431),
        ("GET /health HTTP/1.1\r\nno header\r\n\r\n", 400),
    ):
        with connected(strict) as client:
            client.sendall(head.encode())
            told, _, body = said(client).partition("\r\n\r\n")
            assert told.startswith(f"HTTP/1.1 {status} ")
            assert json.loads(body)["error"]["code"] == status
    with connected(strict) as client:
        client.sendall(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"a" * 1800 + b"\r\n\r\n"
        )
        assert said(client).startswith("HTTP/1.1 200 ")


HALF = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("begin", "is_second"), [(b"", False), (HALF[:15], False), (b"\r\n", True), (HALF, True)]
)
def test_a_head_has_a_time_limit(strict, begin, is_second):
    """The limit also holds for the second request on a connection."""
    with connected(strict) as client:
        if is_second:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")
        client.sendall(begin)
        told = said(client)
    assert told == "" or told.startswith("HTTP/1.1 408 ")


def test_who_dribbles_a_head_has_no_more_time(strict):
    began = time.monotonic()
    with connected(strict) as client, contextlib.suppress(ConnectionError):
        for char in "GET /health HTTP/1.1\r\nhost: localhost\r\n" + 1000 * "x":
            client.sendall(char.encode())
            time.sleep(0.02)
    assert time.monotonic() - began < 10, "it would take 20 s"


def test_the_half_open_make_room_for_others(strict):
    """More than there may be connections at all, and nobody else is refused."""
    with contextlib.ExitStack() as stack:
        for i in range(4 * MOST_CONNECTIONS):
            client = stack.enter_context(connected(strict))
            client.sendall(b"GET /hea")
            if i % 16 == 0:
                assert httpx.get(f"{strict.url}/health", timeout=10).status_code == 200
        soon(lambda: len(strict.server.server_state.connections) <= MOST_CONNECTIONS // 8 + 4)


def test_of_too_many_connections_the_last_is_told(strict):
    """Streams of the page are connections that nobody may take away."""
    with contextlib.ExitStack() as stack:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        soon(lambda: not strict.server.server_state.connections)
        for _ in range(MOST_CONNECTIONS):
            client = stack.enter_context(connected(strict))
            client.sendall(head + b"content-length: 100\r\n\r\n")
        soon(lambda: not strict.server.room.num_waiting)
        with connected(strict) as client:
            told = said(client)
        assert told.startswith("HTTP/1.1 503 ")
        assert "too many connections" in told


def test_requests_in_a_row_on_one_connection_are_few(strict):
    """Each is kept until the one before has its answer."""
    ask = b"GET /page/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(strict) as client:
        client.sendall(ask * 10_000)
        with contextlib.suppress(ConnectionError):
            while client.recv(2**16):
                pass
    few = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10
    with connected(strict) as client:
        client.sendall(few)
        told = b""
        while told.count(b"HTTP/1.1 200 ") < 10:
            told += client.recv(2**16)


@pytest.mark.parametrize(
    ("limits", "raised", "room"),
    [
        ((1024, 2**20), (4096 + OTHER_FILES, 2**20), 4096),
        ((1024, 2048), (2048, 2048), 2048 - OTHER_FILES),
        ((2**20, 2**20), None, 4096),
        ((-1, -1), None, 4096),
        ((1024, -1), (4096 + OTHER_FILES, -1), 4096),
    ],
)
def test_there_are_no_more_connections_than_files(limits, raised, room, monkeypatch):
    """Where files run out, the system resets connections, whosever they are."""
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: set_to.append(pair))
    assert file_room(ServerOptions(max_connections=4096)) == room
    assert set_to == ([] if raised is None else [raised])
