"""Requests as the v0 block manager reads them: sequences, groups of them, and the prompt prefix they share.

Sampling, LoRA and timing are carried or left out: no block decision looks at them.
"""

import copy
import enum
from collections.abc import Sequence as Tokens
from typing import Any

from .block import BlockTable, LogicalTokenBlock


class SequenceStatus(enum.Enum):
    """Place of a sequence in its life. The scheduler sets it; the block manager only reads it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @staticmethod
    def is_finished(status: "SequenceStatus") -> bool:
        return status not in (SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED)

    @staticmethod
    def get_finished_reason(status: "SequenceStatus") -> str | None:
        """Return the reason in the words of the OpenAI API, None while the sequence is not finished."""
        return {
            SequenceStatus.FINISHED_STOPPED: "stop",
            SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
            SequenceStatus.FINISHED_ABORTED: "abort",
            SequenceStatus.FINISHED_IGNORED: "length",  # the prompt alone was over the length cap
        }.get(status)


class SequenceData:
    """The tokens of a sequence, and the sum of its output's log probabilities."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.cumulative_logprob = 0.0

    def append_token_id(self, token_id: int, logprob: float) -> None:
        self.output_token_ids.append(token_id)
        self.cumulative_logprob += logprob

    def get_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def get_prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    def get_output_len(self) -> int:
        return len(self.output_token_ids)

    def get_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def get_last_token_id(self) -> int:
        return self.get_token_ids()[-1]


class Sequence:
    """One stream of tokens, cut into logical blocks of `block_size` as it grows."""

    def __init__(
        self,
        seq_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        block_size: int,
        lora_request: Any = None,
    ) -> None:
        self.seq_id = seq_id
        self.prompt = prompt
        self.block_size = block_size
        self.lora_request = lora_request
        self.data = SequenceData(prompt_token_ids)
        self.output_logprobs: list[dict[int, float]] = []
        self.logical_token_blocks: list[LogicalTokenBlock] = []
        self.status = SequenceStatus.WAITING
        self._append_tokens_to_blocks(prompt_token_ids)

    def _append_logical_block(self) -> None:
        self.logical_token_blocks.append(LogicalTokenBlock(len(self.logical_token_blocks), self.block_size))

    def _append_tokens_to_blocks(self, token_ids: Tokens[int]) -> None:
        for token_id in token_ids:
            if not self.logical_token_blocks or self.logical_token_blocks[-1].is_full():
                self._append_logical_block()
            self.logical_token_blocks[-1].append_tokens([token_id])

    def append_token_id(self, token_id: int, logprobs: dict[int, float]) -> None:
        """Add one generated token. AssertionError when `logprobs` does not know it."""
        assert token_id in logprobs, f"{token_id=} must be in {logprobs=}"
        self._append_tokens_to_blocks([token_id])
        self.output_logprobs.append(logprobs)
        self.data.append_token_id(token_id, logprobs[token_id])

    def get_len(self) -> int:
        return self.data.get_len()

    def get_prompt_len(self) -> int:
        return self.data.get_prompt_len()

    def get_output_len(self) -> int:
        return self.data.get_output_len()

    def get_token_ids(self) -> list[int]:
        return self.data.get_token_ids()

    def get_last_token_id(self) -> int:
        return self.data.get_last_token_id()

    def get_output_token_ids(self) -> list[int]:
        return self.data.output_token_ids

    def get_cumulative_logprob(self) -> float:
        return self.data.cumulative_logprob

    def is_finished(self) -> bool:
        return SequenceStatus.is_finished(self.status)

    def fork(self, new_seq_id: int) -> "Sequence":
        """Return a copy under another id that shares nothing with this one. `BlockSpaceManager.fork` shares
        the blocks.
        """
        child = copy.deepcopy(self)
        child.seq_id = new_seq_id
        return child

    def __repr__(self) -> str:
        return (
            f"Sequence(seq_id={self.seq_id}, status={self.status.name}, "
            f"num_blocks={len(self.logical_token_blocks)})"
        )


class Prefix:
    """The beginning of a prompt that many groups share, a whole number of blocks long.

    `block_table` is None until the first group that has this prefix is allocated; from then on the prefix
    is itself a holder of those blocks. `computed` is set from outside once they have been written.
    """

    def __init__(self, token_ids: Tokens[int], block_size: int) -> None:
        assert len(token_ids) % block_size == 0, f"{len(token_ids)=} must be a multiple of {block_size=}"
        self.token_ids = tuple(token_ids)
        self.block_size = block_size
        self.length = len(self.token_ids)
        self.hash = hash(self.token_ids)
        self.block_table: BlockTable | None = None
        self.computed = False

    @property
    def allocated(self) -> bool:
        return self.block_table is not None

    def get_num_blocks(self) -> int:
        return self.length // self.block_size

    def get_block_numbers(self) -> list[int]:
        """Return the prefix's block numbers; AssertionError before it is allocated."""
        assert self.block_table is not None, "the prefix is not allocated"
        return [block.block_number for block in self.block_table]

    def get_length(self) -> int:
        return self.length

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other  # equal tokens in two prefixes are still two sets of blocks

    def set_block_table(self, block_table: BlockTable) -> None:
        self.block_table = block_table.copy()


class SequenceGroup:
    """The sequences of one request: all began with the same prompt."""

    def __init__(
        self,
        request_id: str,
        seqs: list[Sequence],
        sampling_params: Any = None,
        arrival_time: float = 0.0,
        lora_request: Any = None,
        prefix: Prefix | None = None,
    ) -> None:
        self.request_id = request_id
        self.seqs_dict = {seq.seq_id: seq for seq in seqs}
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.lora_request = lora_request
        self.prefix = prefix

    @property
    def prompt(self) -> str | None:
        return self.get_seqs()[0].prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.get_seqs()[0].data.prompt_token_ids

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return the group's sequences in the order they joined, all of them or those of one status."""
        return [seq for seq in self.seqs_dict.values() if status is None or seq.status == status]

    def get_unfinished_seqs(self) -> list[Sequence]:
        return [seq for seq in self.get_seqs() if not seq.is_finished()]

    def get_finished_seqs(self) -> list[Sequence]:
        return [seq for seq in self.get_seqs() if seq.is_finished()]

    def num_seqs(self, status: SequenceStatus | None = None) -> int:
        return len(self.get_seqs(status))

    def num_unfinished_seqs(self) -> int:
        return len(self.get_unfinished_seqs())

    def num_finished_seqs(self) -> int:
        return len(self.get_finished_seqs())

    def find(self, seq_id: int) -> Sequence:
        """Return the sequence of this id; ValueError when the group has none."""
        if seq_id not in self.seqs_dict:
            raise ValueError(f"Sequence {seq_id} not found.")
        return self.seqs_dict[seq_id]

    def add(self, seq: Sequence) -> None:
        """Add a sequence to the group; ValueError if its id is taken."""
        if seq.seq_id in self.seqs_dict:
            raise ValueError(f"Sequence {seq.seq_id} already exists.")
        self.seqs_dict[seq.seq_id] = seq

    def remove(self, seq_id: int) -> None:
        """Remove a sequence from the group; ValueError if the group has none with this id."""
        if seq_id not in self.seqs_dict:
            raise ValueError(f"Sequence {seq_id} not found.")
        del self.seqs_dict[seq_id]

    def is_finished(self) -> bool:
        return not self.get_unfinished_seqs()

    def __repr__(self) -> str:
        return (
            f"SequenceGroup(request_id={self.request_id}, sampling_params={self.sampling_params}, "
            f"num_seqs={self.num_seqs()})"
        )
