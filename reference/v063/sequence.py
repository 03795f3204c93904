"""Sequences and requests, as far as the block manager needs to know them."""

import enum


class SequenceStatus(enum.Enum):
    """A sequence's place in its life: not begun, in the device's memory, in the host's, or done."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class SequenceData:
    """A sequence's tokens, and the number of those whose keys and values have been computed."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self._num_computed_tokens = 0

    def get_num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    def update_num_computed_tokens(self, num_new_computed_tokens: int) -> None:
        """Count further tokens as computed. AssertionError: more than there are."""
        self._num_computed_tokens += num_new_computed_tokens
        assert self._num_computed_tokens <= len(self.prompt_token_ids) + len(self.output_token_ids)


class Sequence:
    """One stream of tokens. The scheduler sets its `status`."""

    def __init__(self, seq_id: int, prompt_token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.data = SequenceData(prompt_token_ids)

    def append_token_id(self, token_id: int) -> None:
        self.data.output_token_ids.append(token_id)

    def get_token_ids(self) -> list[int]:
        """Return the tokens of prompt and output."""
        return self.data.prompt_token_ids + self.data.output_token_ids

    def get_len(self) -> int:
        return len(self.get_token_ids())

    def fork(self, new_seq_id: int) -> "Sequence":
        """Return a second sequence with the same tokens, count and status."""
        child = Sequence(new_seq_id, self.data.prompt_token_ids)
        child.status = self.status
        child.data.output_token_ids = list(self.data.output_token_ids)
        child.data._num_computed_tokens = self.data._num_computed_tokens
        return child


class SequenceGroup:
    """The sequences of one request, which begin with the same prompt."""

    def __init__(self, request_id: str, seqs: list[Sequence]) -> None:
        self.request_id = request_id
        self.seqs = list(seqs)

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return all sequences, or those with a status."""
        return [seq for seq in self.seqs if status is None or seq.status == status]
