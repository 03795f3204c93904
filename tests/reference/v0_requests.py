"""Requests for the tests of the v0 oracle."""

from collections.abc import Callable
from typing import Any

import pytest

from reference.v0.block_manager import BlockSpaceManager
from reference.v0.sequence import Prefix, Sequence, SequenceGroup, SequenceStatus

OUT_OF_MEMORY = "Out of memory! No free blocks are available."


def make_group(
    num_tokens: int, block_size: int, seq_ids: tuple[int, ...] = (0,), prefix: Prefix | None = None
) -> SequenceGroup:
    """Return waiting sequences of one prompt: the prefix, if any, and then the tokens 0, 1, 2, ..."""
    tokens = [*(prefix.token_ids if prefix else ()), *range(num_tokens)]
    return SequenceGroup("g", [Sequence(i, "", list(tokens), block_size) for i in seq_ids], prefix=prefix)


def set_status(group: SequenceGroup, status: SequenceStatus) -> None:
    for seq in group.get_seqs():
        seq.status = status


def start(manager: BlockSpaceManager, group: SequenceGroup) -> None:
    manager.allocate(group)
    set_status(group, SequenceStatus.RUNNING)
    if group.prefix is not None:
        group.prefix.computed = True


def append_token(manager: BlockSpaceManager, seq: Sequence) -> tuple[int, int] | None:
    seq.append_token_id(7, {7: -0.5})
    return manager.append_slot(seq)


def error_of(call: Callable[..., Any], *args: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as info:
        call(*args)
    return str(info.value)
