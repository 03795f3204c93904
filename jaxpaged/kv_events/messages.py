"""Messages about a prefix cache, in the form of vLLM since 0.24.

A message has three frames: the topic, a number that rises by one (8 bytes, big-endian), and a batch in
msgpack. A batch is an array: seconds since 1970, the events, and the number of the replica. An event is a map
with its kind under "type". What an event lacks may be left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

# vLLM's names of media: the memory that the model computes in, the host's, and disks.
DEVICE, HOST, STORAGE = "GPU", "CPU", "STORAGE"
END = (-1).to_bytes(8, "big", signed=True)  # number behind the last message of a replay


@dataclasses.dataclass(frozen=True)
class BlockStored:
    """Neighbouring blocks of a chain that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the block before; None for a chain's beginning
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE
    lora_name: str | None = None
    # What each block's key has beside tokens: the adapter's name, and in a chain's first block the salt.
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None  # group of layers
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclasses.dataclass(frozen=True)
class BlockRemoved:
    """Blocks that cannot be found any more."""

    block_hashes: list[int]
    medium: str | None = DEVICE
    group_idx: int | None = None


@dataclasses.dataclass(frozen=True)
class AllBlocksCleared:
    """The end of all that was stored."""


type Event = BlockStored | BlockRemoved | AllBlocksCleared
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
# Fields of vLLM's that are left out where they are None.
MAY_LACK = {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}


def encode(seconds: float, events: Sequence[Event], rank: int) -> bytes:
    """Return a batch as bytes. `rank` is the replica's number."""
    import msgpack

    return msgpack.packb([seconds, [_map(event) for event in events], rank])


def _map(event: Event) -> dict[str, Any]:
    made: dict[str, Any] = {"type": type(event).__name__}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if value is not None or field.name not in MAY_LACK:
            made[field.name] = value
    return made


def decode(payload: bytes) -> tuple[float, list[Event], int]:
    """Read a batch: its seconds, its events, and the replica's number. Fields that are unknown are dropped.

    Raises `ValueError` for what is no batch.
    """
    import msgpack

    try:
        seconds, events, *rest = msgpack.unpackb(payload, strict_map_key=False)
        return float(seconds), [_event(each) for each in events], int(rest[0] or 0) if rest else 0
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError(f"these {len(payload)} bytes are no batch of events: {error}") from error


def _event(fields: dict[str, Any]) -> Event:
    kind = KINDS[fields["type"]]
    known = {field.name for field in dataclasses.fields(kind)}
    made = {name: value for name, value in fields.items() if name in known}
    if made.get("extra_keys") is not None:
        made["extra_keys"] = [None if each is None else tuple(each) for each in made["extra_keys"]]
    return kind(**made)
