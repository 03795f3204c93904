"""vLLM's first two generations: managers of sequences, with allocators of reference counted blocks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ints
from typing import Any

from jaxpaged.arithmetic import cdiv
from jaxpaged.research.verify.generations.base import Oracle, Pair, Refused
from jaxpaged.research.verify.oracles.v0.block import Device as V0Device
from jaxpaged.research.verify.oracles.v0.block import PhysicalTokenBlock
from jaxpaged.research.verify.oracles.v0.block_manager import BlockSpaceManager
from jaxpaged.research.verify.oracles.v0.sequence import Sequence as V0Sequence
from jaxpaged.research.verify.oracles.v0.sequence import SequenceGroup as V0SequenceGroup
from jaxpaged.research.verify.oracles.v0.sequence import SequenceStatus as V0Status
from jaxpaged.research.verify.oracles.v063.block import Device as V063Device
from jaxpaged.research.verify.oracles.v063.block import NoFreeBlocksError
from jaxpaged.research.verify.oracles.v063.block_manager import SelfAttnBlockSpaceManager
from jaxpaged.research.verify.oracles.v063.sequence import Sequence as V063Sequence
from jaxpaged.research.verify.oracles.v063.sequence import SequenceGroup as V063SequenceGroup
from jaxpaged.research.verify.oracles.v063.sequence import SequenceStatus as V063Status
from jaxpaged.research.verify.subjects import AllocStatus
from jaxpaged.status import Status

WATERMARK = 0.2


class ByName:
    """Mixin of a group of sequences that compares statuses by name, across packages."""

    def get_seqs(self, status: Any = None) -> list[Any]:
        seqs = super().get_seqs()  # type: ignore[misc]
        return [seq for seq in seqs if status is None or seq.status.name == status.name]

    def num_seqs(self, status: Any = None) -> int:
        return len(self.get_seqs(status))

    # Asked for since 0.4.

    def is_encoder_decoder(self) -> bool:
        return False

    def get_encoder_seq(self) -> None:
        return None


class V0Group(ByName, V0SequenceGroup):
    pass


class V0Seq(V0Sequence):
    @property
    def n_blocks(self) -> int:
        """Number of logical blocks, under the name of vLLM 0.6 and later."""
        return len(self.logical_token_blocks)


class V063Group(ByName, V063SequenceGroup):
    pass


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn a manager's error for too few blocks into `Refused`."""
    try:
        yield
    except NoFreeBlocksError:
        raise Refused(Status.OUT_OF_BLOCKS) from None
    except ValueError as error:
        if "Out of memory" not in str(error):
            raise
        raise Refused(Status.OUT_OF_BLOCKS) from None


class ManagerOracle(Oracle):
    """Oracle around a block manager of vLLM: a row is a sequence, in a group of its own or of the rows that
    it is swapped with.
    """

    manager: Any
    group: Callable[..., Any]
    status: Any  # the enumeration of a sequence's statuses
    first_id = 1  # ours of the device's block 0

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(block_size, num_blocks, num_host_blocks)
        self.seqs: dict[int, Any] = {}

    def _sequence(self, row: int, tokens: Ints[int]) -> Any:
        raise NotImplementedError

    def _extend(self, seq: Any, tokens: list[int]) -> list[Pair]:
        """Append tokens to rows that have begun; return the copies in the manager's block ids."""
        raise NotImplementedError

    def _cut(self, table: Any, num_tokens: int) -> None:
        """Free a table's blocks beyond the given number of tokens."""
        raise NotImplementedError

    def _group(self, rows: list[int]) -> Any:
        return self.group("group", [self.seqs[row] for row in rows])

    def append(self, row: int, tokens: list[int]) -> list[Pair]:
        copies: list[Pair] = []
        with _refusing():
            if row not in self.tokens:
                self.seqs[row] = self._sequence(row, tokens)
                self.manager.allocate(self._group([row]))
                self.seqs[row].status = self.status.RUNNING
            else:
                copies = self._extend(self.seqs[row], tokens)
        self.tokens[row] = self.tokens.get(row, []) + tokens
        return [(source + self.first_id, target + self.first_id) for source, target in copies]

    def fork(self, source: int, destination: int) -> None:
        self.seqs[destination] = self.seqs[source].fork(destination)
        self.manager.fork(self.seqs[source], self.seqs[destination])
        self.tokens[destination] = list(self.tokens[source])

    def free(self, row: int) -> None:
        self.manager.free(self.seqs.pop(row))
        del self.tokens[row]
        self.on_host.discard(row)

    def free_twice(self, row: int) -> None:
        """Free a sequence, and then again: a manager takes no notice of one without a table."""
        seq = self.seqs[row]
        self.free(row)
        self.manager.free(seq)

    def over_free(self, row: int) -> dict[str, int]:
        """Free the first block of a row once more than it is held, by the manager's allocator.

        That raises in both generations. Returns: what is counted then, empty if the class shows no allocator.
        """
        raise NotImplementedError

    def truncate(self, row: int, num_tokens: int) -> None:
        left = self.tokens[row][: len(self.tokens[row]) - num_tokens]
        self._cut(self.manager.block_tables[row], len(left))
        self.tokens[row] = left
        self.seqs[row] = self._sequence(row, left)
        self.seqs[row].status = self.status.RUNNING
        if not left:
            self.free(row)

    def swap_out(self, rows: list[int]) -> list[Pair]:
        pairs = self._swap(self.manager.swap_out, rows, self.status.SWAPPED)
        self.on_host.update(rows)
        return [(source + self.first_id, target + 1) for source, target in pairs]

    def swap_in(self, rows: list[int]) -> list[Pair]:
        pairs = self._swap(self.manager.swap_in, rows, self.status.RUNNING)
        self.on_host.difference_update(rows)
        return [(source + 1, target + self.first_id) for source, target in pairs]

    def _swap(self, swap: Callable[..., Any], rows: list[int], status: Any) -> list[Pair]:
        """Swap rows and return the pairs in the manager's own count, from 0 on the host, where ours has a
        null block first.
        """
        with _refusing():
            pairs = swap(self._group(rows))
        for row in rows:
            self.seqs[row].status = status
        return list(pairs.items() if isinstance(pairs, Mapping) else pairs)

    @property
    def watermark_blocks(self) -> int:
        return self.manager.watermark_blocks

    def can_allocate(self, num_tokens: int) -> AllocStatus:
        group = self.group("group", [self._sequence(-1, [0] * num_tokens)])
        return AllocStatus[self.manager.can_allocate(group).name]

    def num_free(self) -> tuple[int, int]:
        return self.manager.get_num_free_gpu_blocks(), self.manager.get_num_free_cpu_blocks()


class V0Oracle(ManagerOracle):
    """`reference.v0`: policy `lifo`."""

    group = V0Group
    status = V0Status

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        max_blocks: int,
        manager: Callable[..., Any] = BlockSpaceManager,
    ) -> None:
        super().__init__(block_size, num_blocks, num_host_blocks)
        self.manager = manager(block_size, num_blocks - 1, num_host_blocks - 1, WATERMARK)
        # v0 has no null block. This one stands in for what has left the window, and is never given out.
        self.null_block = PhysicalTokenBlock(V0Device.GPU, -1, block_size)
        self.null_block.ref_count = 1 << 30

    def _sequence(self, row: int, tokens: Ints[int]) -> V0Sequence:
        return V0Seq(row, None, list(tokens), self.block_size)

    def _extend(self, seq: V0Sequence, tokens: list[int]) -> list[Pair]:
        copies = []
        for token in tokens:
            seq.append_token_id(token, {token: 0.0})
            copies += self._append_slots(seq)
        return copies

    def _append_slots(self, seq: V0Sequence) -> list[Pair]:
        """Append slots by the method's name in 0.3, or that from 0.4 on."""
        if not hasattr(self.manager, "append_slot"):
            return self.manager.append_slots(seq, 0)
        pair = self.manager.append_slot(seq)
        return [pair] if pair else []

    def _cut(self, table: Any, num_tokens: int) -> None:
        num_left = cdiv(num_tokens, self.block_size)
        for block in table[num_left:]:
            self.manager.gpu_allocator.free(block)
        del table[num_left:]

    def window(self, row: int, num_skipped_tokens: int) -> None:
        table = self.manager.block_tables[row]
        for i in range(num_skipped_tokens // self.block_size):
            self.manager.gpu_allocator.free(table[i])
            table[i] = self.null_block

    def over_free(self, row: int) -> dict[str, int]:
        tables, allocator = (getattr(self.manager, name, None) for name in ("block_tables", "gpu_allocator"))
        if tables is None or allocator is None:
            return {}
        block = tables[row][0]
        for _ in range(1 + block.ref_count):
            allocator.free(block)
        return {"the number of free blocks": self.manager.get_num_free_gpu_blocks()}

    def can_swap_in(self, rows: list[int]) -> bool:
        answer = self.manager.can_swap_in(self._group(rows))
        return getattr(answer, "name", answer) in (True, "OK")  # an AllocStatus since 0.4

    def reset(self) -> None:
        for row in sorted(self.on_host):
            self.free(row)
        # Rows are freed in order; the manager goes by when each was begun.
        self.manager.block_tables = dict(sorted(self.manager.block_tables.items()))
        self.manager.reset()
        self.tokens.clear()
        self.seqs.clear()

    def table(self, row: int) -> list[int]:
        return [number + 1 for number in self.manager.get_block_table(self.seqs[row])]

    def ref_counts(self, on_host: bool) -> list[int]:
        counts = [0] * (self.num_host_blocks if on_host else self.num_blocks)
        for row, table in self.manager.block_tables.items():
            if (row in self.on_host) == on_host:
                for block in table:
                    if block is not self.null_block:
                        counts[block.block_number + 1] = block.ref_count
        return counts

    def free_order(self, on_host: bool) -> list[int]:
        allocator = self.manager.cpu_allocator if on_host else self.manager.gpu_allocator
        assert all(block.ref_count == 0 for block in allocator.free_blocks)
        return [block.block_number + 1 for block in reversed(allocator.free_blocks)]


class V063Oracle(ManagerOracle):
    """`reference.v063` with naive allocators: policy `naive`. Its null block, taken first, is block 0.

    null_block: False where nothing leaves a window, so that none need be taken.
    """

    group = V063Group
    status = V063Status
    forks_windowed = False

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        max_blocks: int,
        manager: Callable[..., Any] = SelfAttnBlockSpaceManager,
        null_block: bool = True,
    ) -> None:
        super().__init__(block_size, num_blocks, num_host_blocks)
        self.first_id = 0 if null_block else 1
        self.manager = manager(block_size, num_blocks - self.first_id, num_host_blocks - 1, WATERMARK)
        if null_block:
            self.allocator = self.manager.allocator
            assert self.allocator.allocate_or_get_null_block().block_id == 0
            self.manager.num_total_blocks[V063Device.GPU] -= 1

    def _sequence(self, row: int, tokens: Ints[int]) -> V063Sequence:
        return V063Sequence(row, list(tokens))

    def _extend(self, seq: V063Sequence, tokens: list[int]) -> list[Pair]:
        for token in tokens:
            seq.append_token_id(token)
        return self.manager.append_slots(seq, 0)

    def _cut(self, table: Any, num_tokens: int) -> None:
        num_left = cdiv(num_tokens, self.block_size)
        for block in table.blocks[num_left:]:
            self.allocator.free(block)
        del table.blocks[num_left:]
        table.num_tokens = num_tokens
        if num_tokens:
            del table.blocks[-1].token_ids[(num_tokens - 1) % self.block_size + 1 :]

    def over_free(self, row: int) -> dict[str, int]:
        """Free the first block of a row twice: each table has a block of its own over shared memory."""
        manager = self.manager
        allocator = getattr(manager, "block_allocator", getattr(manager, "allocator", None))
        blocks = getattr(getattr(manager, "block_tables", {}).get(row), "blocks", None)
        if allocator is None or blocks is None:
            return {}
        block = blocks[0]
        allocator.free(block)
        allocator.free(block)
        return {"the number of free blocks": manager.get_num_free_gpu_blocks()}

    def window(self, row: int, num_skipped_tokens: int) -> None:
        self.manager.block_tables[row].drop_blocks(num_skipped_tokens // self.block_size)

    def table(self, row: int) -> list[int]:
        offset = self.num_blocks - 1 - self.first_id if row in self.on_host else -self.first_id
        return [block_id - offset for block_id in self.manager.get_block_table(self.seqs[row])]

    def _naive(self, on_host: bool) -> Any:
        return self.allocator.allocators[V063Device.CPU if on_host else V063Device.GPU]

    def ref_counts(self, on_host: bool) -> list[int]:
        counts = list(self._naive(on_host).ref_counts.values())
        return [0, *counts] if on_host else [0, *counts[1:]]

    def free_order(self, on_host: bool) -> list[int]:
        offset = self.num_blocks - 1 if on_host else 0
        return [block_id - offset for block_id in self._naive(on_host).free_ids]
