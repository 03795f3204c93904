"""Sockets of ZeroMQ on which an engine tells of its prefix cache, and again to those who missed something."""

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from jaxpaged.checks import InputError
from jaxpaged.kv_events import messages
from jaxpaged.kv_events.messages import Event
from jaxpaged.kv_events.options import KVEvents

WAIT_MS = 100  # between two looks whether the publisher was closed


@dataclasses.dataclass(frozen=True)
class Batch:
    """Events that wait to be sent."""

    number: int
    seconds: float
    events: Sequence[Event]


class Publisher:
    """Publisher of one replica's events. For one thread at a time; it sends in a thread of its own.

    Nothing waits for followers: who is slow misses messages, sees it by their numbers, and asks for a replay.
    Of batches beyond `max_queue_size`, which wait to be sent, only the numbers are left.
    Raises `InputError` for addresses that cannot be used, and where pyzmq is missing.
    """

    def __init__(self, options: KVEvents, rank: int = 0) -> None:
        try:
            import msgpack  # noqa: F401
            import zmq
        except ImportError as error:
            rule = "None without pyzmq and msgpack: pip install 'jaxpaged[events]'"
            raise InputError(f"kv_events_config={options!r} must be {rule}") from error
        self._zmq: Any = zmq
        self._rank, self._topic = rank, options.topic.encode("utf-8", "surrogatepass")
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=options.buffer_steps)
        self._lock, self._closed, self._number = threading.Lock(), threading.Event(), 0
        self._waiting: queue.Queue[Batch | None] = queue.Queue(options.max_queue_size)
        self._threads: list[threading.Thread] = []
        context: Any = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(options.hwm)
        self._replays: Any = None
        endpoint = for_replica(options.endpoint, rank)
        is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
            if options.replay_endpoint is not None:
                endpoint = for_replica(options.replay_endpoint, rank)
                self._replays = context.socket(zmq.ROUTER)
                self._replays.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise InputError(f"kv_events_config: {endpoint} cannot be used: {error}") from error
        logging.info("events of the prefix cache are on %s", for_replica(options.endpoint, rank))
        for name, run in (("events", self._send), ("replays", self._serve)):
            if name == "events" or self._replays is not None:
                self._threads.append(threading.Thread(target=run, name=f"jaxpaged-{name}", daemon=True))
                self._threads[-1].start()

    def publish(self, events: Sequence[Event]) -> None:
        """Let events be sent as one batch."""
        batch, self._number = Batch(self._number, time.time(), [*events]), self._number + 1
        try:
            self._waiting.put_nowait(batch)
        except queue.Full:
            log = logging.log_first_n
            log(logging.WARNING, "events are lost: more than max_queue_size batches wait to be sent", 1)

    def close(self) -> None:
        """Send the waiting messages, and close the sockets. What was sent is still delivered for a second."""
        self._closed.set()
        if self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        for socket in (self._socket, self._replays):
            if socket is not None:
                socket.close(linger=1000)

    def _send(self) -> None:
        """Send the batches that wait, in order."""
        while (batch := self._waiting.get()) is not None:
            try:
                payload = messages.encode(batch.seconds, batch.events, self._rank)
                with self._lock:
                    self._kept.append((batch.number, payload))
                frames = self._topic, batch.number.to_bytes(8, "big"), payload
                with contextlib.suppress(self._zmq.Again):
                    self._socket.send_multipart(frames, flags=self._zmq.DONTWAIT)
            except Exception:  # no memory, say: who follows sees that a number is missing
                logging.exception("events cannot be sent")

    def _serve(self) -> None:
        """Answer requests for a replay: by the kept messages from a number on, and one that ends them."""
        while not self._closed.is_set():
            if not self._replays.poll(WAIT_MS):
                continue
            try:
                who, *_, first = self._replays.recv_multipart()
                start = int.from_bytes(first[:8], "big")
                with self._lock:
                    kept = [each for each in self._kept if each[0] >= start]
                for number, payload in [*kept, (None, b"")]:
                    header = messages.END if number is None else number.to_bytes(8, "big")
                    self._replays.send_multipart((who, b"", header, payload))
            except Exception:  # whatever somebody sends
                logging.exception("a request for a replay of events cannot be answered")


def for_replica(endpoint: str, rank: int) -> str:
    """Return the address of one replica of an engine. Raises `ValueError` for tcp without a port."""
    if not rank:
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"
