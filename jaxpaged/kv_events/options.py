"""Option `kv_events_config`: who is told what the prefix cache has, in vLLM's words."""

import dataclasses
from typing import Any

from jaxpaged.checks import check, checked_bool, checked_choice, checked_int, checked_mapping, parsed_json

PUBLISHERS = ("zmq", "null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEvents:
    """Addresses and sizes of the events of a prefix cache.

    publisher: "zmq", or "null": nobody outside is told, but the router between an engine's replicas is.
    endpoint: the address of a PUB socket, bound if it has "*" or "::" in it or is ipc:// or inproc://, else
        connected. Replica r has the port r higher, or the suffix "_dp" and r.
    replay_endpoint: that of a ROUTER socket, always bound, which sends what was missed; None: there is none.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that are kept for replays
    hwm: int = 100_000  # batches that wait for a slow follower, who misses what comes then
    max_queue_size: int = 100_000  # batches that wait to be sent at all; beyond that, events are lost
    topic: str = ""

    def __post_init__(self) -> None:
        """Check the values. Raises `InputError`."""
        checked_bool("kv_events_config: enable_kv_cache_events", self.enable_kv_cache_events)
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq")
        checked_choice("kv_events_config: publisher", self.publisher, PUBLISHERS)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            is_address = isinstance(value, str) and "://" in value and "\0" not in value
            is_none = value is None and name == "replay_endpoint"
            rule = "an address such as tcp://*:5557 or ipc:///run/events"
            check(f"kv_events_config: {name}", value, rule, is_address or is_none)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            checked_int(f"kv_events_config: {name}", getattr(self, name), "an int >= 1", 1)
        check("kv_events_config: topic", self.topic, "a string", isinstance(self.topic, str))


def kv_events(name: str, value: Any) -> KVEvents | None:
    """Return the option's value: None, a `KVEvents`, a mapping of its fields, or such a mapping in JSON.

    None where no events are asked for. Raises `InputError`.
    """
    rule = 'None or a mapping such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
    value = parsed_json(name, value, rule)
    if value is not None and not isinstance(value, KVEvents):
        value = KVEvents(**checked_mapping(name, value, rule, KVEvents.__dataclass_fields__))
    return value if value is not None and value.enable_kv_cache_events else None
