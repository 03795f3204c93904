"""Transports: the ways of blocks from one process to another."""

import socket
from typing import Protocol

from jaxpaged.handover.blocks import Blocks
from jaxpaged.parallel.channel import Channel

MOST_BYTES = 2**32  # of one message


class Transport(Protocol):
    """One end of a way on which blocks go, in the order in which they were sent."""

    def send(self, blocks: Blocks) -> None:
        """Give blocks to the other end; returns when they are on their way."""

    def receive(self) -> Blocks | None:
        """Wait for the next blocks; None when the other end has closed and all were received."""

    def close(self) -> None:
        """Send nothing more, and let the other end know."""


class SocketTransport:
    """A transport over a connected stream socket, TCP's or Unix'.

    Whoever writes to the socket says what K and V a prompt has: connect to whom you trust. Where both ends
    are not on loopback, give both the same key.

    connection: its timeout is kept: `TimeoutError` ends a wait.
    most_bytes: a message of more is refused before it is read; memory grows only with what has come.
    key: a secret of at least 16 bytes that both ends have. Both prove it before anything else is read, and
    every
        message is authenticated (see `jaxpaged.parallel.channel`); nothing is encrypted.

    Raises `ConnectionError` if the other end does not prove that it has the key.
    """

    def __init__(
        self, connection: socket.socket, most_bytes: int = MOST_BYTES, *, key: bytes | None = None
    ) -> None:
        self._channel = Channel(connection, most_bytes, key)

    def send(self, blocks: Blocks) -> None:
        self._channel.send(blocks.to_bytes())

    def receive(self) -> Blocks | None:
        """Wait for the next blocks; None when the other end has closed.

        Raises `ConnectionError` for an end in the middle of a message and for one without the key,
        `InputError` for a message that is too long or has no blocks.
        """
        data = self._channel.receive()
        return None if data is None else Blocks.from_bytes(data)

    def close(self) -> None:
        self._channel.close()
