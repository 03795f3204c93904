"""How blocks get from one process to another."""

import socket
from typing import Protocol

from jaxpaged.checks import InputError
from jaxpaged.engine.blocks import Blocks

LENGTH_BYTES = 8  # big-endian, before each message


class Transport(Protocol):
    """One end of a way on which blocks go, in the order in which they were sent."""

    def send(self, blocks: Blocks) -> None:
        """Give blocks to the other end; returns when they are on their way."""

    def receive(self) -> Blocks | None:
        """Wait for the next blocks; None when the other end has closed and all were received."""

    def close(self) -> None:
        """Send nothing more, and let the other end know."""


class SocketTransport:
    """Over a connected stream socket, TCP's or Unix': of each `Blocks` its length, and its bytes.

    Whoever writes to the socket says what K and V a prompt has: connect to whom you trust. A message of
    more than `most_bytes` is refused before it is read. With a timeout of the socket, `TimeoutError` ends a
    wait.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = 2**36) -> None:
        self._connection, self._most_bytes = connection, most_bytes

    def send(self, blocks: Blocks) -> None:
        data = blocks.to_bytes()
        self._connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big"))
        self._connection.sendall(data)

    def receive(self) -> Blocks | None:
        """Raises `ConnectionError` for an end in the middle of a message, `InputError` for one that has no
        blocks.
        """
        head = self._read(LENGTH_BYTES, may_end=True)
        if head is None:
            return None
        length = int.from_bytes(head, "big")
        if length > self._most_bytes:
            raise InputError(f"a message of {length} bytes must have at most most_bytes={self._most_bytes}")
        return Blocks.from_bytes(self._read(length) or b"")

    def close(self) -> None:
        self._connection.close()

    def _read(self, length: int, *, may_end: bool = False) -> bytearray | None:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            count = self._connection.recv_into(rest)
            if count == 0:
                if may_end and len(rest) == length:
                    return None
                raise ConnectionError(
                    f"the other end has closed {len(rest)} bytes before the end of a message of {length}"
                )
            rest = rest[count:]
        return data
