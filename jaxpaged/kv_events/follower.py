"""Follower of an engine's events over ZeroMQ, for routers: it keeps the order and asks for what it missed."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jaxpaged.checks import InputError
from jaxpaged.kv_events import messages
from jaxpaged.kv_events.messages import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event
from jaxpaged.routing import Router

REPLAY_MS = 2000  # that a replay may take between two messages


class Follower:
    """Follower of one publisher. For one thread. Raises `InputError` where pyzmq is missing.

    endpoint, replay_endpoint: addresses to connect to; None: what is missed is not asked for.

    A publisher that begins anew, as after a restart, is told by the time of its messages.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        try:
            import zmq
        except ImportError as error:
            raise InputError("pyzmq is missing: pip install 'jaxpaged[events]'") from error
        context: Any = zmq.Context.instance()
        self._zmq: Any = zmq
        self._next, self._seconds = 0, 0.0  # number of the next message, and the time of the last one
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self.num_missed = 0  # messages that could not be had again

    def poll(self, timeout_ms: int = 0) -> list[Event]:
        """Return the events received so far, in order, with missed ones replayed before them."""
        events: list[Event] = []
        while self._socket.poll(timeout_ms):
            timeout_ms = 0
            _, number, payload = self._socket.recv_multipart()
            events += self._taken(int.from_bytes(number, "big"), payload)
        return events

    def ask(self) -> list[Event]:
        """Ask for all that is kept and has not come, as after a late start. Return those events."""
        return [event for number, payload in self._replayed() for event in self._taken(number, payload)]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)

    def _taken(self, number: int, payload: bytes) -> list[Event]:
        """Return a message's events, preceded by the events of missed messages."""
        seconds, events, _ = messages.decode(payload)
        events_before: list[Event] = []
        if number < self._next:
            if seconds <= self._seconds:
                return []
            self._next, events_before = 0, [AllBlocksCleared()]
        if number > self._next:
            for missed, missed_payload in self._replayed():
                if self._next <= missed < number:
                    self.num_missed += missed - self._next
                    events_before += messages.decode(missed_payload)[1]
                    self._next = missed + 1
            self.num_missed += number - self._next
        self._next, self._seconds = number + 1, seconds
        return [*events_before, *events]

    def _replayed(self) -> Iterator[tuple[int, bytes]]:
        """Yield the messages that the publisher keeps, from the next one on."""
        if self._replay_endpoint is None:
            return
        socket = self._zmq.Context.instance().socket(self._zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while socket.poll(REPLAY_MS):
                _, number, payload = socket.recv_multipart()
                if number == messages.END:
                    return
                yield int.from_bytes(number, "big"), payload
        finally:
            socket.close(linger=0)


def tell(router: Router[Any], name: Hashable, events: Sequence[Event]) -> None:
    """Pass a replica's cached blocks, as the events left them, to a router."""
    for event in events:
        match event:
            case AllBlocksCleared():
                router.forget(name)
            case BlockStored(medium=medium, group_idx=group) if not group:
                router.tell(name, stored=_keys(event.block_hashes), medium=medium or DEVICE)
            case BlockRemoved(medium=medium, group_idx=group) if not group:
                router.tell(name, removed=_keys(event.block_hashes), medium=medium or DEVICE)


def _keys(hashes: list[int]) -> list[bytes]:
    return [each.to_bytes(8, "big") for each in hashes]
