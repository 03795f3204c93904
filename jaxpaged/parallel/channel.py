"""A channel: messages of bytes over a connected stream socket, with a key where both ends have one.

Each message goes as its length (8 bytes, big-endian) and its bytes. With a key, both ends first prove that
they have it, before anything else is read: each sends a nonce, then an HMAC-SHA256 over both nonces. Every
message is then followed by an HMAC-SHA256 over its number and its bytes, with a key of its own for each
direction. The key authenticates; it does not encrypt.
"""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Sequence

from jaxpaged.checks import InputError, check

LENGTH_BYTES = 8
NONCE_BYTES = TAG_BYTES = 32
LEAST_KEY_BYTES = 16
CHUNK = 2**20  # bytes asked for at once: memory grows with what has come, not with what a length announces


class Channel:
    """One end of a connection.

    connection: a connected stream socket; its timeout is kept, and `TimeoutError` ends a wait.
    most_bytes: a message that announces more is refused before it is read.
    key: at least 16 bytes, which the other end must have, too; None: none is asked for.

    Raises `ConnectionError` if the other end does not prove that it has the key.
    """

    def __init__(self, connection: socket.socket, most_bytes: int, key: bytes | None = None) -> None:
        self._connection, self._most_bytes = connection, most_bytes
        self._sending_key = self._receiving_key = b""
        self._num_sent = self._num_received = 0
        if key is not None:
            check_key("key", key)
            self._prove(key)

    def send(self, *chunks: bytes | bytearray | memoryview) -> None:
        """Send one message, given in chunks; return when all its bytes are sent."""
        views = [memoryview(chunk).cast("B") for chunk in chunks]
        length = sum(map(len, views))
        whole = [memoryview(length.to_bytes(LENGTH_BYTES, "big")), *views]
        if self._sending_key:
            whole.append(memoryview(_tag(self._sending_key, self._num_sent, views)))
        for part in whole if length > CHUNK else [b"".join(whole)]:  # a short one goes in one packet
            self._connection.sendall(part)
        self._num_sent += 1

    def receive(self) -> bytearray | None:
        """Wait for the next message; None when the other end has closed and all were received.

        Raises `ConnectionError` for an end in the middle of a message, or for one whose tag is wrong;
        `InputError` for one that is longer than `most_bytes`.
        """
        head = self._read(LENGTH_BYTES, may_end=True)
        if head is None:
            return None
        length = int.from_bytes(head, "big")
        if length > self._most_bytes:
            raise InputError(f"a message of {length} bytes must have at most most_bytes={self._most_bytes}")
        data = self._read(length) or bytearray()
        if self._receiving_key:
            want = _tag(self._receiving_key, self._num_received, [memoryview(data)])
            if not hmac.compare_digest(want, self._read(TAG_BYTES) or b""):
                raise ConnectionError("a message was not made with the channel's key")
        self._num_received += 1
        return data

    def close(self) -> None:
        """Close the connection, also for a thread that waits in `receive`."""
        self._connection.close()

    def _prove(self, key: bytes) -> None:
        mine = secrets.token_bytes(NONCE_BYTES)
        self._connection.sendall(mine)
        peer_nonce = bytes(self._read(NONCE_BYTES) or b"")
        if peer_nonce == mine:
            raise ConnectionError("the other end has sent back this end's nonce")
        # Each direction has a key of its own, so that nothing that was sent can be sent back.
        nonces = b"".join(sorted((mine, peer_nonce)))
        lower, higher = (hmac.digest(key, name + nonces, "sha256") for name in (b"lower", b"higher"))
        self._sending_key, self._receiving_key = (lower, higher) if mine < peer_nonce else (higher, lower)
        self._connection.sendall(hmac.digest(self._sending_key, b"hello", "sha256"))
        answer = self._read(TAG_BYTES) or b""
        if not hmac.compare_digest(hmac.digest(self._receiving_key, b"hello", "sha256"), answer):
            raise ConnectionError("the other end does not have this end's key")

    def _read(self, length: int, *, may_end: bool = False) -> bytearray | None:
        data = bytearray()
        while len(data) < length:
            chunk = self._connection.recv(min(CHUNK, length - len(data)))
            if not chunk:
                if may_end and not data:
                    return None
                missing = length - len(data)
                raise ConnectionError(
                    f"the other end has closed {missing} bytes before the end of a message of {length}"
                )
            data += chunk
        return data


def check_key(name: str, key: object) -> None:
    """Check that a value can be a channel's key. Raises `InputError`, which does not show it."""
    check(
        name,
        "..." if isinstance(key, bytes) else key,
        f"at least {LEAST_KEY_BYTES} bytes",
        isinstance(key, bytes) and len(key) >= LEAST_KEY_BYTES,
    )


def _tag(key: bytes, number: int, chunks: Sequence[memoryview]) -> bytes:
    """Return the HMAC over a message's number and bytes."""
    tag = hmac.new(key, number.to_bytes(8, "big"), hashlib.sha256)
    for chunk in chunks:
        tag.update(chunk)
    return tag.digest()
