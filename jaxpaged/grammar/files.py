"""Bytes of an automaton, for files and between processes: safetensors, with masks as bits.

A file begins with the key of what its automaton is made from, and a digest of key and bytes.
"""

import hashlib
import struct

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.nodes import Limits

VERSION = 3
HEAD = struct.Struct("<32s32s")  # key and digest
TABLES = {
    "token_class": 1,
    "next_state": 2,
    "mask_of": 1,
    "masks": 2,
    "accepting": 1,
    "forced": 1,
    "numbers": 1,
}


def to_bytes(automaton: TokenAutomaton) -> bytes:
    """Return an automaton's bytes."""
    tables = {name: np.asarray(getattr(automaton, name)) for name in TABLES if name != "numbers"}
    tables["masks"] = np.packbits(automaton.masks, axis=1)
    tables["accepting"] = automaton.accepting.astype(np.uint8)
    tables["numbers"] = np.array([automaton.start, automaton.levels], np.int32)
    return save({name: np.ascontiguousarray(table) for name, table in tables.items()})


def from_bytes(content: bytes, vocab_size: int, limits: Limits) -> TokenAutomaton | None:
    """Return the automaton in these bytes; None if they are torn, or describe no valid automaton."""
    try:
        tables = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None
    if {name: table.ndim for name, table in tables.items()} != TABLES:
        return None
    classes, steps, mask_of, forced = (
        tables[name] for name in ("token_class", "next_state", "mask_of", "forced")
    )
    numbers = tables["numbers"]
    if any(table.dtype != np.int32 for table in (classes, steps, mask_of, forced, numbers)):
        return None
    packed, accepting, num_states = tables["masks"], tables["accepting"], len(steps)
    shapes = (classes.shape, mask_of.shape, accepting.shape, numbers.shape, forced.shape, packed.shape[1])
    if shapes != ((vocab_size,), (num_states,), (num_states,), (2,), (len(packed),), -(-vocab_size // 8)):
        return None
    if packed.dtype != np.uint8 or accepting.dtype != np.uint8 or not 0 < num_states <= limits.max_states:
        return None
    start, levels = numbers.tolist()
    bounds = (
        *((classes, 0, steps.shape[1]), (steps, -1, num_states), (mask_of, 0, len(packed))),
        (forced, -1, vocab_size),
    )
    if (
        not 0 <= start < num_states
        or levels < 0
        or any((x.min() < low or x.max() >= high) for x, low, high in bounds)
    ):
        return None
    masks = np.unpackbits(packed, axis=1, count=vocab_size).astype(bool)
    return TokenAutomaton(classes, steps, mask_of, masks, accepting.astype(bool), forced, start, levels)


def to_file(automaton: TokenAutomaton, key: bytes) -> bytes:
    """Return the content of an automaton's file, under the key, of 32 bytes, of its sources."""
    content = to_bytes(automaton)
    return HEAD.pack(key, _digest(key, content)) + content


def from_file(content: bytes, key: bytes, vocab_size: int, limits: Limits) -> TokenAutomaton | None:
    """Return the automaton of a file; None if it is of something else, or is not as it was written."""
    if len(content) < HEAD.size or HEAD.unpack_from(content) != (key, _digest(key, content[HEAD.size :])):
        return None
    return from_bytes(content[HEAD.size :], vocab_size, limits)


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(key + content).digest()
