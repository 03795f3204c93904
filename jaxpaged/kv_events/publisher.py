"""Sockets of ZeroMQ on which an engine tells of its prefix cache, and again to those who missed something."""

import collections
import contextlib
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


class Publisher:
    """Publisher of one replica's events. For one thread at a time; replays have a thread of their own.

    Nothing waits for followers: who is slow misses messages, sees it by their numbers, and asks for a replay.
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
        if self._replays is not None:
            self._thread = threading.Thread(target=self._serve, name="jaxpaged-replays", daemon=True)
            self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Send events as one batch."""
        payload = messages.encode(time.time(), events, self._rank)
        with self._lock:
            number = self._number
            self._number += 1
            self._kept.append((number, payload))
        with contextlib.suppress(self._zmq.Again):
            frames = self._topic, number.to_bytes(8, "big"), payload
            self._socket.send_multipart(frames, flags=self._zmq.DONTWAIT)

    def close(self) -> None:
        """Close the sockets. What was sent is still delivered for a second."""
        self._closed.set()
        if self._replays is not None and hasattr(self, "_thread"):
            self._thread.join()
        for socket in (self._socket, self._replays):
            if socket is not None:
                socket.close(linger=1000)

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
                    told = messages.END if number is None else number.to_bytes(8, "big")
                    self._replays.send_multipart((who, b"", told, payload))
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
