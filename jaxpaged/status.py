"""Status bits of a compiled step: an array cannot raise, so it carries its error along."""

import enum


class Status(enum.IntFlag):
    """Result of a transition of `memory/` or `engine/`; bits of several steps combine with `|`.

    A transition whose status is not `OK` returns the state it was given, unchanged.
    """

    OK = 0
    OUT_OF_BLOCKS = 1 << 0
    TABLE_FULL = 1 << 1
    DOUBLE_FREE = 1 << 2
    TOO_MANY_BLOCKS = 1 << 3
    UNKNOWN_BLOCK = 1 << 4
    UNKNOWN_ROW = 1 << 5
    ROW_IN_USE = 1 << 6
    TOO_FEW_TOKENS = 1 << 7
    BLOCKS_IN_USE = 1 << 8
    SHARDS_DIFFER = 1 << 9
    UNCACHEABLE = 1 << 10
    UNKNOWN_TOKEN = 1 << 11


_SENTENCES = {
    Status.OUT_OF_BLOCKS: "out of blocks: raise num_blocks or lower max_num_seqs",
    Status.TABLE_FULL: "a sequence outgrows its row of the block table: raise max_model_len",
    Status.DOUBLE_FREE: "double free: a block was given back more often than it is held",
    Status.TOO_MANY_BLOCKS: "one operation concerns more blocks than its static limit: raise that limit",
    Status.UNKNOWN_BLOCK: "a block id is not one of the pool's: ids go from 0 to num_blocks - 1",
    Status.UNKNOWN_ROW: "a row does not exist, or holds no blocks where it must: name a row that was filled",
    Status.ROW_IN_USE: "a row to be filled holds blocks already, or is named twice: free it first",
    Status.TOO_FEW_TOKENS: "a row has fewer tokens than are to be given back, skipped or cached",
    Status.SHARDS_DIFFER: "the devices of a model have come to different states, and so would their answers: "
    "one of them computes wrongly",
    Status.BLOCKS_IN_USE: "the prefix cache cannot be reset while blocks are in use: free all rows first",
    Status.UNCACHEABLE: "blocks cannot be made findable: their places in the table of contents are taken",
    Status.UNKNOWN_TOKEN: "a sampler from outside has chosen a token that is not in the vocabulary",
}


class PagedMemoryError(RuntimeError):
    """A transition was refused. `status` holds the bits, the message one sentence for each."""

    def __init__(self, status: Status) -> None:
        super().__init__("; ".join(text for bit, text in _SENTENCES.items() if bit in status))
        self.status = status


def raise_if_error(status: int) -> None:
    """Raise `PagedMemoryError` unless `status`, a value read back from the device, is `Status.OK`."""
    if status != Status.OK:
        raise PagedMemoryError(Status(status))
