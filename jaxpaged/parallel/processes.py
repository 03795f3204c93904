"""Several processes with one engine: the first tells the others what it has its devices do.

All make the same engine. Then process 0 alone takes requests; before each call to its devices it sends the
others the call's name and host arrays, and they make the same calls in the same order. They wait for them at
a connection, never inside a collective, and a process that has gone is noticed as its connection closes, even
by one that waits for its devices.
"""

import atexit
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpaged.checks import InputError

START_SECONDS = 120  # for all processes to come
LEAVE_SECONDS = 5  # for JAX to take leave of the others
KEY_BYTES = 32
# A machine that has gone without a word is noticed after 3 + 3 * 2 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}

type Call = Callable[[str, Sequence[Any]], Any]


class Leader:
    """Process 0, connected to the others. Where one of them ends, this process does, with a sentence."""

    def __init__(self, connections: dict[int, Connection]) -> None:
        self._connections, self._num_processes = connections, len(connections) + 1
        self._said: dict[int, queue.SimpleQueue[Mapping[str, str]]] = {
            i: queue.SimpleQueue() for i in connections
        }
        self._is_ending = False
        for process_id in connections:
            threading.Thread(target=self._watch, args=(process_id,), daemon=True).start()
        atexit.register(self._end)  # after the engine has closed, for it is made later

    def agree(self, mine: Mapping[str, str]) -> None:
        """Wait for all to come here, and let them go on. Raises `InputError` if one's engine has another
        value for one of these names.
        """
        for process_id, said in sorted(self._said.items()):
            its = said.get()
            for name, value in mine.items():
                if its[name] != value:
                    raise InputError(
                        f"process {process_id}'s {name} must be process 0's, {value}, but is {its[name]}"
                    )
        self.tell("", ())

    def tell(self, name: str, arrays: Sequence[Any]) -> None:
        """Have the others make this call, too."""
        for process_id, connection in self._connections.items():
            try:
                connection.send((name, arrays))
            except OSError:
                _fail(process_id, self._num_processes)

    def _watch(self, process_id: int) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._said[process_id].put(self._connections[process_id].recv())
        if not self._is_ending:
            _fail(process_id, self._num_processes)

    def _end(self) -> None:
        self._is_ending = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)


class Follower:
    """Another process, connected to process 0. Where that ends without a word, so does this one."""

    def __init__(self, connection: Connection, num_processes: int) -> None:
        self._connection, self._num_processes = connection, num_processes
        self._calls: queue.SimpleQueue[tuple[str, Sequence[Any]] | None] = queue.SimpleQueue()
        self._waits = False  # the main thread, for process 0, and not for its devices
        threading.Thread(target=self._listen, daemon=True).start()

    def agree(self, mine: Mapping[str, str]) -> None:
        """Say what this engine is, and wait until process 0 has heard all and found them the same; raise
        `SystemExit` if it ends.
        """
        with contextlib.suppress(OSError):  # it has gone: `_listen` ends this process
            self._connection.send(mine)
        self._waits = True
        if self._calls.get() is None:
            raise SystemExit(f"jaxpaged: {_has_ended(0, self._num_processes)}")
        self._waits = False

    def follow(self, call: Call) -> NoReturn:
        """Make the calls that process 0 makes, until it ends; then raise `SystemExit`, without an error."""
        self._waits = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: process 0 decides
        while (told := self._calls.get()) is not None:
            call(*told)
        raise SystemExit(0)

    def _listen(self) -> None:
        try:
            while (told := self._connection.recv()) is not None:
                self._calls.put(told)
        except (EOFError, OSError):
            _fail(0, self._num_processes)
        if not self._waits:  # but loads, or perhaps waits for devices that will not answer
            late = threading.Timer(LEAVE_SECONDS, _fail, [0, self._num_processes])
            late.daemon = True
            late.start()
            with contextlib.suppress(RuntimeError):  # else process 0 would wait for this one at its end
                jax.distributed.shutdown()
            _fail(0, self._num_processes)
        self._calls.put(None)


Processes = Leader | Follower


def join(address: str, num_processes: int, process_id: int) -> Processes:
    """Meet the other processes at "HOST:PORT" of process 0, and connect to them.

    Before JAX is asked for its devices, and once in a process: `InputError` otherwise.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
        jax.distributed.initialize(address, num_processes, process_id, initialization_timeout=START_SECONDS)
    except RuntimeError as error:
        raise InputError(
            f"distributed_init={address!r} must be joined by a process's first engine: {error}"
        ) from error
    host = address.rpartition(":")[0].strip("[]")
    late = threading.Timer(START_SECONDS, _say_and_exit, [f"not all {num_processes} processes have come"])
    late.daemon = True
    late.start()
    try:
        return _lead(host, num_processes) if process_id == 0 else _follow(host, num_processes, process_id)
    finally:
        late.cancel()


def _lead(host: str, num_processes: int) -> Leader:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:  # a free port
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    key = os.urandom(KEY_BYTES)
    with Listener((host, port), family.name, backlog=num_processes, authkey=key) as listener:
        _shared(key + port.to_bytes(2))
        connections: dict[int, Connection] = {}
        while len(connections) < num_processes - 1:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # strangers
                connection = _kept_alive(listener.accept())
                connections[connection.recv()] = connection
    return Leader(connections)


def _follow(host: str, num_processes: int, process_id: int) -> Follower:
    told = _shared(bytes(KEY_BYTES + 2))
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    connection = Client((host, int.from_bytes(told[KEY_BYTES:])), family.name, authkey=told[:KEY_BYTES])
    connection.send(process_id)
    return Follower(_kept_alive(connection), num_processes)


def _shared(mine: bytes) -> bytes:
    """Process 0's, in all."""
    shared = multihost_utils.broadcast_one_to_all(np.frombuffer(mine, np.uint8).astype(np.int32))
    return bytes(np.asarray(shared).tolist())


def _kept_alive(connection: Connection) -> Connection:
    """With calls sent at once, and the system asking whether the other is still there."""
    with socket.socket(fileno=os.dup(connection.fileno())) as its:
        its.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has all
                its.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _fail(process_id: int, num_processes: int) -> NoReturn:
    _say_and_exit(_has_ended(process_id, num_processes))


def _has_ended(process_id: int, num_processes: int) -> str:
    return f"process {process_id} of {num_processes} has ended, and so must this one"


_saying = threading.Lock()


def _say_and_exit(sentence: str) -> NoReturn:
    """End this process at once: its devices may wait for ever. The first sentence is the only one."""
    _saying.acquire()
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"jaxpaged: {sentence}\n")
            sys.stderr.flush()
    os._exit(1)
