"""Several processes with one engine: the first tells the others what it has its devices do.

All make the same engine. Then process 0 alone takes requests; before each call to its devices it sends the
others the call's name and host arrays, and they make the same calls in the same order. They wait for them at
a connection, never inside a collective, and a process that has gone is noticed as its connection closes, even
by one that waits for its devices.

What they send each other is data (`messages`), over connections on which both ends have proved that they have
one key (`channel`): made from the secret that all processes were given, or, on loopback without one,
drawn by process 0 and sent by way of JAX. JAX's own connections between processes have no key at all.
"""

import atexit
import contextlib
import hmac
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jaxpaged.checks import InputError, shown
from jaxpaged.parallel import messages
from jaxpaged.parallel.calls import SendCall
from jaxpaged.parallel.channel import LEAST_KEY_BYTES, Channel

START_SECONDS = 120  # for all processes to come
LEAVE_SECONDS = 5  # for JAX to take leave of the others
KEY_BYTES = 32
HELLO_SECONDS = 10  # for a connection to prove that it has the key, and to send its number
MOST_STRANGERS = 32  # connections that may be proving that at a time
MOST_BYTES = 2**34  # of a message
SECRET, SECRET_FILE = "JAXPAGED_SECRET", "JAXPAGED_SECRET_FILE"
# A machine that has gone without a word is noticed after 3 + 3 * 2 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}


class Line:
    """A connection to another process, for messages of plain values."""

    def __init__(self, connection: socket.socket, key: bytes, classes: Sequence[type]) -> None:
        """Connect, once both ends have proved to each other that they have the key. Raises as `Channel`
        does.
        """
        self._connection, self._classes = connection, classes
        self._channel = Channel(connection, MOST_BYTES, key)

    def send(self, value: Any) -> None:
        """Send a message."""
        self._channel.send(*messages.encode(value, self._classes))

    def receive(self) -> Any:
        """Wait for the next message. Raises `EOFError` where the other end has closed, and `OSError` or
        `InputError` for one that is damaged.
        """
        data = self._channel.receive()
        if data is None:
            raise EOFError
        return messages.decode(data, self._classes)

    def stay(self) -> None:
        """Set the connection so that calls are sent at once, are waited for without limit, and a lost
        peer is noticed.
        """
        connection = self._connection
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Leader:
    """Process 0, connected to the others. Where one of them ends, this process does, with a sentence."""

    def __init__(self, lines: dict[int, Line]) -> None:
        self._lines, self._num_processes = lines, len(lines) + 1
        self._received: dict[int, queue.SimpleQueue[Mapping[str, str]]] = {
            i: queue.SimpleQueue() for i in lines
        }
        self._is_ending = False
        for process_id in lines:
            threading.Thread(target=self._watch, args=(process_id,), daemon=True).start()
        atexit.register(self._end)  # after the engine has closed, for it is made later

    def agree(self, mine: Mapping[str, str]) -> None:
        """Wait for all to come here, and let them go on. Raises `InputError` if one's engine has another
        value for one of these names.
        """
        for process_id, received in sorted(self._received.items()):
            from_follower = received.get()
            for name, value in mine.items():
                if (other := from_follower.get(name)) != value:
                    raise InputError(
                        f"process {process_id}'s {name} must be process 0's, {value}, but is {other}"
                    )
        self.tell("", ())

    def tell(self, name: str, arrays: Sequence[Any]) -> None:
        """Send a call to all other processes."""
        for process_id, line in self._lines.items():
            try:
                line.send((name, tuple(arrays)))
            except OSError:
                _fail(process_id, self._num_processes)

    def _watch(self, process_id: int) -> None:
        with contextlib.suppress(EOFError, OSError, InputError):
            while True:
                self._received[process_id].put(self._lines[process_id].receive())
        if not self._is_ending:
            _fail(process_id, self._num_processes)

    def _end(self) -> None:
        self._is_ending = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(None)


class WorkerProcess:
    """Process other than process 0, connected to it; it ends when process 0 ends unexpectedly."""

    def __init__(self, line: Line, num_processes: int) -> None:
        self._line, self._num_processes = line, num_processes
        self._calls: queue.SimpleQueue[tuple[str, Sequence[Any]] | None] = queue.SimpleQueue()
        self._waits = False  # the main thread, for process 0, and not for its devices
        threading.Thread(target=self._listen, daemon=True).start()

    def agree(self, mine: Mapping[str, str]) -> None:
        """Say what this engine is, and wait until process 0 has heard all and found them the same; raise
        `SystemExit` if it ends.
        """
        with contextlib.suppress(OSError):  # it has gone: `_listen` ends this process
            self._line.send(dict(mine))
        self._waits = True
        if self._calls.get() is None:
            raise SystemExit(f"jaxpaged: {_has_ended(0, self._num_processes)}")
        self._waits = False

    def follow(self, call: SendCall) -> NoReturn:
        """Make the calls that process 0 makes, until it ends; then raise `SystemExit`, without an error."""
        self._waits = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: process 0 decides
        while (sent := self._calls.get()) is not None:
            call(*sent)
        raise SystemExit(0)

    def _listen(self) -> None:
        try:
            while (message := self._line.receive()) is not None:
                name, arrays = message
                self._calls.put((name, arrays))
        except (EOFError, OSError, ValueError, TypeError):
            _fail(0, self._num_processes)
        if not self._waits:  # but loads, or perhaps waits for devices that will not answer
            late = threading.Timer(LEAVE_SECONDS, _fail, [0, self._num_processes])
            late.daemon = True
            late.start()
            with contextlib.suppress(RuntimeError):  # else process 0 would wait for this one at its end
                jax.distributed.shutdown()
            _fail(0, self._num_processes)
        self._calls.put(None)


Processes = Leader | WorkerProcess


def join(address: str, num_processes: int, process_id: int, classes: Sequence[type] = ()) -> Processes:
    """Join the other processes of an engine at "HOST:PORT" of process 0, and connect to them.

    To be called before JAX is asked for its devices, and once in a process.

    classes: the dataclasses that calls may have among their arguments.

    Raises `InputError` for a second call, and where HOST is not on loopback and no secret is given.
    """
    host = address.rpartition(":")[0].strip("[]")
    secret = _secret()
    if secret is None and not _is_loopback(host):
        raise InputError(
            f"distributed_init={address!r} must be on loopback unless {SECRET} or {SECRET_FILE} gives all "
            f"processes the same secret, of at least {LEAST_KEY_BYTES} bytes"
        )
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
        # By itself JAX would listen at all addresses of the machine.
        jax.distributed.initialize(
            *(address, num_processes, process_id),
            coordinator_bind_address=address if process_id == 0 else None,
            initialization_timeout=START_SECONDS,
        )
    except RuntimeError as error:
        raise InputError(
            f"distributed_init={address!r} must be joined by a process's first engine: {error}"
        ) from error
    late = threading.Timer(START_SECONDS, _say_and_exit, [f"not all {num_processes} processes have come"])
    late.daemon = True
    late.start()
    try:
        if process_id == 0:
            return Leader(_lead(host, num_processes, secret, classes))
        return WorkerProcess(_follow(host, process_id, secret, classes), num_processes)
    finally:
        late.cancel()


def _secret() -> bytes | None:
    """Return the secret by which the processes authenticate each other; None if none was given. Raises
    `InputError`.
    """
    text, file = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    try:
        secret = Path(file).read_bytes().strip() if file else (text or "").encode()
    except OSError as error:
        raise InputError(f"{SECRET_FILE}={shown(file)} cannot be read: {error.strerror or error}") from error
    if secret and len(secret) < LEAST_KEY_BYTES:
        raise InputError(f"{SECRET_FILE if file else SECRET} must have at least {LEAST_KEY_BYTES} bytes")
    if file and not secret:
        raise InputError(f"{SECRET_FILE}={shown(file)} must name a file that is not empty")
    return secret or None


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are on loopback. Raises `InputError` for an unknown host."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"distributed_init: the host {host!r} is not known: {error}") from error
    return all(
        ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in addresses
    )


def _lead(host: str, num_processes: int, secret: bytes | None, classes: Sequence[type]) -> dict[int, Line]:
    """Listen until each of the other processes has connected, and proved that it has the key."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family, backlog=128) as server:
        drawn = os.urandom(KEY_BYTES)
        _shared((bytes(KEY_BYTES) if secret else drawn) + server.getsockname()[1].to_bytes(2))
        return welcome(server, num_processes, _key(secret) or drawn, classes)


def welcome(
    server: socket.socket, num_processes: int, key: bytes, classes: Sequence[type] = ()
) -> dict[int, Line]:
    """Return the connections of processes 1 to `num_processes - 1`, by their numbers, as they come.

    Other programs may connect, too: each is given a short while to prove that it has the key, and is then
    logged.
    """
    came: dict[int, Line] = {}
    lock, is_full, room = threading.Lock(), threading.Event(), threading.Semaphore(MOST_STRANGERS)

    def hear(connection: socket.socket, where: object) -> None:
        try:
            connection.settimeout(HELLO_SECONDS)
            line = Line(connection, key, classes)
            process_id = line.receive()
            with lock:
                if type(process_id) is not int or not 0 < process_id < num_processes or process_id in came:
                    raise InputError(f"process_id={shown(process_id)} must be of a process that has not come")
                line.stay()
                came[process_id] = line
                if len(came) == num_processes - 1:
                    is_full.set()
        except (OSError, EOFError, InputError) as error:
            logging.warning("a connection from %s is none of this engine's processes: %s", where, error)
            connection.close()
        finally:
            room.release()

    server.settimeout(0.1)
    while not is_full.is_set():
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection, where = server.accept()
            if room.acquire(blocking=False):
                threading.Thread(target=hear, args=(connection, where), daemon=True).start()
            else:
                connection.close()  # whoever has the key tries again
    return came


def _follow(host: str, process_id: int, secret: bytes | None, classes: Sequence[type]) -> Line:
    shared = _shared(bytes(KEY_BYTES + 2))
    return reach(
        host, int.from_bytes(shared[KEY_BYTES:]), process_id, _key(secret) or shared[:KEY_BYTES], classes
    )


def reach(host: str, port: int, process_id: int, key: bytes, classes: Sequence[type] = ()) -> Line:
    """Connect to process 0. Tries again while process 0 is busy with too many other connections.

    Raises `InputError` if it does not prove within `START_SECONDS` that it has the key.
    """
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=HELLO_SECONDS)
            try:
                line = Line(connection, key, classes)
                line.send(process_id)
                line.stay()
                return line
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            if time.monotonic() > end:
                raise InputError(
                    f"process 0 at {host} port {port} does not have this process's secret"
                ) from error
            time.sleep(0.2)


def _key(secret: bytes | None) -> bytes | None:
    """Return the key of the connections that a secret gives."""
    return hmac.digest(secret, b"jaxpaged processes", "sha256") if secret else None


def _shared(mine: bytes) -> bytes:
    """Return process 0's bytes, in all processes."""
    shared = multihost_utils.broadcast_one_to_all(np.frombuffer(mine, np.uint8).astype(np.int32))
    return bytes(np.asarray(shared).tolist())


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
