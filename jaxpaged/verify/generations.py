"""vLLM's block managers behind one face: rows instead of sequences, and ids that start after the null block.

Every verb does what its manager does, row by row, and raises `Refused` with the status that the functional
side must report. What a manager has no method for (giving back the last tokens) is done with its own parts.

Each takes the class it stands for: with somebody's own in the place of the oracle's, it is that one's face.
Then only what the generation's classes offer everybody is called.
"""

import copy
import functools
import pickle
from collections.abc import Callable
from collections.abc import Sequence as Ints
from typing import Any

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.block_pool import AllocStatus
from jaxpaged.status import Status
from jaxpaged.verify.oracles.v0.block import Device as V0Device
from jaxpaged.verify.oracles.v0.block import PhysicalTokenBlock
from jaxpaged.verify.oracles.v0.block_manager import BlockSpaceManager
from jaxpaged.verify.oracles.v0.sequence import Sequence as V0Sequence
from jaxpaged.verify.oracles.v0.sequence import SequenceGroup as V0SequenceGroup
from jaxpaged.verify.oracles.v0.sequence import SequenceStatus as V0Status
from jaxpaged.verify.oracles.v063.block_manager import SelfAttnBlockSpaceManager
from jaxpaged.verify.oracles.v063.interfaces import BlockAllocator
from jaxpaged.verify.oracles.v063.interfaces import Device as V063Device
from jaxpaged.verify.oracles.v063.sequence import Sequence as V063Sequence
from jaxpaged.verify.oracles.v063.sequence import SequenceGroup as V063SequenceGroup
from jaxpaged.verify.oracles.v063.sequence import SequenceStatus as V063Status
from jaxpaged.verify.oracles.v1.block_pool import BlockPool as V1BlockPool
from jaxpaged.verify.oracles.v1.kv_cache_manager import (
    FullAttentionManager,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
)
from jaxpaged.verify.oracles.v1.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    Request,
    make_block_hash_with_group_id,
)

Pair = tuple[int, int]
WATERMARK = 0.2  # of those that have one
FREE_PROFILES = {"lru": "classic", "lru_split": "split"}  # of V1, by policy


class Refused(Exception):
    """The oracle raised, or returned nothing: the functional side must report `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def _refused(error: ValueError) -> Refused:
    if "Out of memory" not in str(error):
        raise error
    return Refused(Status.OUT_OF_BLOCKS)


class Oracle:
    """What the three have in common. A row lives on the device or on the host; one without tokens nowhere."""

    # Whether the manager can do so with what has lost blocks to the window.
    forks_windowed = True
    swaps_windowed = False

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens: dict[int, list[int]] = {}  # of every row
        self.on_host: set[int] = set()

    def trial(self) -> "Oracle":
        """A copy to try something on: the managers stop half way when they raise, we must not."""
        try:
            return pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))  # five times as fast
        except Exception:  # of somebody's class, which may hold anything
            return copy.deepcopy(self)

    def num_held(self, row: int) -> int:
        return cdiv(len(self.tokens.get(row, [])), self.block_size)

    def device_rows(self) -> list[int]:
        return sorted(set(self.tokens) - self.on_host)

    def windowed(self) -> list[int]:
        """Rows of which blocks have left the window."""
        return [row for row in self.tokens if 0 in self.table(row)]

    def table(self, row: int) -> list[int]:
        raise NotImplementedError


class ByName:
    """Mixed into a group of sequences: statuses are equal by name, whoever's they are."""

    def get_seqs(self, status: Any = None) -> list[Any]:
        seqs = super().get_seqs()  # type: ignore[misc]
        return [seq for seq in seqs if status is None or seq.status.name == status.name]

    def num_seqs(self, status: Any = None) -> int:
        return len(self.get_seqs(status))


class V0Group(ByName, V0SequenceGroup):
    # Since 0.4.

    def is_encoder_decoder(self) -> bool:
        return False

    def get_encoder_seq(self) -> None:
        return None


class V0Seq(V0Sequence):
    @property
    def n_blocks(self) -> int:
        """`len(logical_token_blocks)`, as it is called from 0.6 on."""
        return len(self.logical_token_blocks)


class V063Group(ByName, V063SequenceGroup):
    pass


class V0Oracle(Oracle):
    """`reference.v0`: policy `lifo`."""

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
        self.seqs: dict[int, V0Sequence] = {}
        # v0 has no null block. This one stands in for what has left the window, and is never given out.
        self.null_block = PhysicalTokenBlock(V0Device.GPU, -1, block_size)
        self.null_block.ref_count = 1 << 30

    def _sequence(self, row: int, tokens: Ints[int], status: V0Status) -> V0Sequence:
        seq = V0Seq(row, None, list(tokens), self.block_size)
        seq.status = status
        return seq

    def _group(self, seqs: list[V0Sequence]) -> V0SequenceGroup:
        return V0Group("group", seqs)

    def append(self, row: int, tokens: list[int]) -> list[Pair]:
        pairs = []
        try:
            if row not in self.tokens:
                seq = self._sequence(row, tokens, V0Status.WAITING)
                self.manager.allocate(self._group([seq]))
                seq.status = V0Status.RUNNING
                self.seqs[row] = seq
            else:
                for token in tokens:
                    self.seqs[row].append_token_id(token, {token: 0.0})
                    copies = self._append_slots(self.seqs[row])
                    pairs += [(a + 1, b + 1) for a, b in copies]
        except ValueError as error:
            raise _refused(error) from None
        self.tokens[row] = self.tokens.get(row, []) + tokens
        return pairs

    def _append_slots(self, seq: V0Sequence) -> list[Pair]:
        """By the name of 0.3, or that of from 0.4 on."""
        if not hasattr(self.manager, "append_slot"):
            return self.manager.append_slots(seq, 0)
        pair = self.manager.append_slot(seq)
        return [pair] if pair else []

    def fork(self, source: int, destination: int) -> None:
        self.seqs[destination] = self.seqs[source].fork(destination)
        self.manager.fork(self.seqs[source], self.seqs[destination])
        self.tokens[destination] = list(self.tokens[source])

    def free(self, row: int) -> None:
        self.manager.free(self.seqs.pop(row))
        del self.tokens[row]
        self.on_host.discard(row)

    def truncate(self, row: int, num_tokens: int) -> None:
        left = self.tokens[row][: len(self.tokens[row]) - num_tokens]
        table = self.manager.block_tables[row]
        num_left = cdiv(len(left), self.block_size)
        for block in table[num_left:]:
            self.manager.gpu_allocator.free(block)
        del table[num_left:]
        self.tokens[row] = left
        self.seqs[row] = self._sequence(row, left, V0Status.RUNNING)
        if not left:
            self.free(row)

    def window(self, row: int, num_skipped_tokens: int) -> None:
        table = self.manager.block_tables[row]
        for i in range(num_skipped_tokens // self.block_size):
            self.manager.gpu_allocator.free(table[i])
            table[i] = self.null_block

    def swap_out(self, rows: list[int]) -> list[Pair]:
        try:
            mapping = dict(self.manager.swap_out(self._group([self.seqs[row] for row in rows])))
        except ValueError as error:
            raise _refused(error) from None
        for row in rows:
            self.seqs[row].status = V0Status.SWAPPED
        self.on_host.update(rows)
        return [(source + 1, target + 1) for source, target in mapping.items()]

    def can_swap_in(self, rows: list[int]) -> bool:
        answer = self.manager.can_swap_in(self._group([self.seqs[row] for row in rows]))
        return getattr(answer, "name", answer) in (True, "OK")  # an AllocStatus since 0.4

    def swap_in(self, rows: list[int]) -> list[Pair]:
        try:
            mapping = dict(self.manager.swap_in(self._group([self.seqs[row] for row in rows])))
        except ValueError as error:
            raise _refused(error) from None
        for row in rows:
            self.seqs[row].status = V0Status.RUNNING
        self.on_host.difference_update(rows)
        return [(source + 1, target + 1) for source, target in mapping.items()]

    def reset(self) -> None:
        for row in sorted(self.on_host):
            self.free(row)
        # Rows are freed in order; the manager goes by when each was begun.
        self.manager.block_tables = dict(sorted(self.manager.block_tables.items()))
        self.manager.reset()
        self.tokens.clear()
        self.seqs.clear()

    @property
    def watermark_blocks(self) -> int:
        return self.manager.watermark_blocks

    def can_allocate(self, num_tokens: int) -> AllocStatus:
        seq = self._sequence(-1, [0] * num_tokens, V0Status.WAITING)
        return AllocStatus[self.manager.can_allocate(self._group([seq])).name]

    def table(self, row: int) -> list[int]:
        return [number + 1 for number in self.manager.get_block_table(self.seqs[row])]

    def num_free(self) -> tuple[int, int]:
        return self.manager.get_num_free_gpu_blocks(), self.manager.get_num_free_cpu_blocks()

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


class V063Oracle(Oracle):
    """`reference.v063` with naive allocators: policy `naive`. Its null block, taken first, is block 0.

    null_block: False where nothing leaves a window, so that none need be taken.
    """

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
        self.first_id = 0 if null_block else 1  # ours of their block 0
        self.manager = manager(block_size, num_blocks - self.first_id, num_host_blocks - 1, WATERMARK)
        if null_block:
            self.allocator = self.manager.block_allocator
            assert self.allocator.allocate_or_get_null_block().block_id == 0
            self.manager.num_total_gpu_blocks -= 1
        self.seqs: dict[int, V063Sequence] = {}

    def _group(self, rows: list[int]) -> V063SequenceGroup:
        return V063Group("group", [self.seqs[row] for row in rows])

    def append(self, row: int, tokens: list[int]) -> list[Pair]:
        pairs: list[Pair] = []
        try:
            if row not in self.tokens:
                self.seqs[row] = V063Sequence(row, tokens)
                self.manager.allocate(self._group([row]))
                self.seqs[row].status = V063Status.RUNNING
            else:
                for token in tokens:
                    self.seqs[row].append_token_id(token)
                copies = self.manager.append_slots(self.seqs[row], 0)
                pairs = [(a + self.first_id, b + self.first_id) for a, b in copies]
        except BlockAllocator.NoFreeBlocksError:
            raise Refused(Status.OUT_OF_BLOCKS) from None
        self.tokens[row] = self.tokens.get(row, []) + tokens
        return pairs

    def fork(self, source: int, destination: int) -> None:
        self.seqs[destination] = self.seqs[source].fork(destination)
        self.manager.fork(self.seqs[source], self.seqs[destination])
        self.tokens[destination] = list(self.tokens[source])

    def free(self, row: int) -> None:
        self.manager.free(self.seqs.pop(row))
        del self.tokens[row]
        self.on_host.discard(row)

    def truncate(self, row: int, num_tokens: int) -> None:
        left = self.tokens[row][: len(self.tokens[row]) - num_tokens]
        table = self.manager.block_tables[row]
        num_left = cdiv(len(left), self.block_size)
        for block in table.blocks[num_left:]:
            self.allocator.free(block)
        table.update(table.blocks[:num_left])
        table._num_full_slots = len(left)
        if left:
            del table.blocks[-1].token_ids[(len(left) - 1) % self.block_size + 1 :]
        self.tokens[row] = left
        seq = V063Sequence(row, left)
        seq.status = V063Status.RUNNING
        self.seqs[row] = seq
        if not left:
            self.free(row)

    def window(self, row: int, num_skipped_tokens: int) -> None:
        table = self.manager.block_tables[row]
        table._max_block_sliding_window = 0
        table._drop_blocks_out_of_window(num_skipped_tokens)
        table._max_block_sliding_window = None

    def _swap(self, rows: list[int], out: bool) -> list[Pair]:
        swap = self.manager.swap_out if out else self.manager.swap_in
        try:
            pairs = swap(self._group(rows))
        except BlockAllocator.NoFreeBlocksError:
            raise Refused(Status.OUT_OF_BLOCKS) from None
        for row in rows:
            self.seqs[row].status = V063Status.SWAPPED if out else V063Status.RUNNING
        # Places are counted from 0 on the host, where we have a null block first.
        first = self.first_id
        return [(a + first, b + 1) if out else (a + 1, b + first) for a, b in pairs]

    def swap_out(self, rows: list[int]) -> list[Pair]:
        pairs = self._swap(rows, out=True)
        self.on_host.update(rows)
        return pairs

    def swap_in(self, rows: list[int]) -> list[Pair]:
        pairs = self._swap(rows, out=False)
        self.on_host.difference_update(rows)
        return pairs

    def reset(self) -> None:
        for row in sorted(self.on_host) + self.device_rows():
            self.free(row)

    @property
    def watermark_blocks(self) -> int:
        return self.manager.watermark_blocks

    def can_allocate(self, num_tokens: int) -> AllocStatus:
        group = V063Group("group", [V063Sequence(-1, [0] * num_tokens)])
        return AllocStatus[self.manager.can_allocate(group).name]

    def table(self, row: int) -> list[int]:
        offset = self.num_blocks - 1 - self.first_id if row in self.on_host else -self.first_id
        return [block_id - offset for block_id in self.manager.get_block_table(self.seqs[row])]

    def num_free(self) -> tuple[int, int]:
        return self.manager.get_num_free_gpu_blocks(), self.manager.get_num_free_cpu_blocks()

    def _naive(self, on_host: bool) -> Any:
        return self.allocator._allocators[V063Device.CPU if on_host else V063Device.GPU]

    def ref_counts(self, on_host: bool) -> list[int]:
        refcounter = self._naive(on_host).refcounter
        if on_host:
            return [0] + [refcounter.get(self.num_blocks + i) for i in range(self.num_host_blocks - 1)]
        return [0] + [refcounter.get(i) for i in range(1, self.num_blocks)]

    def free_order(self, on_host: bool) -> list[int]:
        offset = self.num_blocks - 1 if on_host else 0
        return [block_id - offset for block_id in self._naive(on_host)._free_block_indices]


class Identities:
    """Stands in for V1's hash: the same name for the same content, for as long as some block holds it.

    vLLM names content by a hash of all tokens so far, and so finds the children of an evicted block again
    when their parent's content returns. Ours can't: it would have to believe the hash. That is the one
    difference.
    """

    def __init__(self) -> None:
        self.names: dict[tuple[object, tuple[int, ...]], BlockHash] = {}
        self.count = 0

    def name(self, parent: object, tokens: tuple[int, ...], *, create: bool) -> BlockHash:
        key = (parent, tokens)
        if key in self.names:
            return self.names[key]
        self.count += 1
        name = BlockHash(self.count.to_bytes(32, "big"))
        if create:
            self.names[key] = name
        return name

    def forget_dead(self, pool: Any) -> None:
        self.names = {
            key: name for key, name in self.names.items() if pool.get_cached_block(name, [0]) is not None
        }


class WindowedFullAttention(FullAttentionManager):
    """Full attention of which the test says how much is skipped."""

    num_skipped_tokens = 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self.num_skipped_tokens


class V1Oracle(Oracle):
    """`reference.v1`: policies `lru` (classic) and `lru_split` (split).

    V1 has no fork, copy-on-write, truncation or swap: these are done with its pool, in the order of v0, and
    last block first.
    """

    swaps_windowed = True

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        max_blocks: int,
        profile: str,
        pool: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(block_size, num_blocks, num_host_blocks)
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype="half")
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, max_blocks * block_size, free_profile=profile)
        pool = pool or functools.partial(V1BlockPool, free_profile=profile)
        self.pool = self.manager.block_pool = pool(num_blocks, True, block_size)
        self.rows = WindowedFullAttention(spec, self.pool, enable_caching=True, kv_cache_group_id=0)
        self.manager.single_type_managers = (self.rows,)
        self.host_pool = pool(num_host_blocks, False, block_size)
        self.host_tables: dict[int, list[KVCacheBlock]] = {}
        self.requests: dict[int, Request] = {}
        self.chains: dict[int, list[BlockHash] | None] = {}  # names of cached blocks; None: broken
        self.salts: dict[int, int] = {}
        self.identities = Identities()

    def _blocks(self, row: int) -> list[KVCacheBlock]:
        return self.rows.req_to_blocks[str(row)]

    def _new_request(self, row: int, tokens: list[int]) -> Request:
        return Request(str(row), tokens)

    def append(self, row: int, tokens: list[int]) -> list[Pair]:
        if row not in self.tokens:
            return self._begin(row, tokens, 0, use_cache=False)
        pairs = []
        blocks, num_tokens = self._blocks(row), len(self.tokens[row])
        try:
            if num_tokens % self.block_size:
                last = blocks[-1]
                if last.ref_cnt > 1:
                    [blocks[-1]] = self.pool.get_new_blocks(1)
                    self.pool.free_blocks([last])
                    pairs = [(last.block_id, blocks[-1].block_id)]
                else:
                    self.pool.evict_blocks([last.block_id])
        except ValueError:
            raise Refused(Status.OUT_OF_BLOCKS) from None
        request = self.requests[row]
        request.append_output_token_ids(tokens)
        if self.manager.allocate_slots(request, len(tokens), delay_cache_blocks=True) is None:
            raise Refused(Status.OUT_OF_BLOCKS)
        request.num_computed_tokens += len(tokens)
        self.tokens[row] = self.tokens[row] + tokens
        self.identities.forget_dead(self.pool)
        return pairs

    def _hashes(self, tokens: list[int], salt: int) -> list[BlockHash]:
        """A name for each full block of a prompt; of what nobody holds, a new one each time."""
        hashes: list[BlockHash] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            parent: object = hashes[-1] if hashes else salt
            content = tuple(tokens[end - self.block_size : end])
            hashes.append(self.identities.name(parent, content, create=False))
        return hashes

    def hits(self, tokens: list[int], salt: int) -> list[int]:
        request = self._new_request(-1, tokens)
        request.block_hashes = self._hashes(tokens, salt)
        blocks, num_tokens = self.manager.get_computed_blocks(request)
        assert num_tokens == len(blocks.blocks[0]) * self.block_size
        return [block.block_id for block in blocks.blocks[0]]

    def admit(self, row: int, tokens: list[int], salt: int) -> None:
        self._begin(row, tokens, salt, use_cache=True)

    def _begin(self, row: int, tokens: list[int], salt: int, *, use_cache: bool) -> list[Pair]:
        request = self._new_request(row, tokens)
        request.skip_reading_prefix_cache = not use_cache
        request.block_hashes = self._hashes(tokens, salt)
        hits, num_hit_tokens = self.manager.get_computed_blocks(request)
        num_new = len(tokens) - num_hit_tokens
        if (
            self.manager.allocate_slots(request, num_new, num_hit_tokens, hits, delay_cache_blocks=True)
            is None
        ):
            raise Refused(Status.OUT_OF_BLOCKS)
        request.num_computed_tokens = len(tokens)
        self.requests[row], self.tokens[row], self.salts[row] = request, tokens, salt
        self.chains[row] = request.block_hashes[: len(hits.blocks[0])]
        self.rows.num_cached_block[str(row)] = len(hits.blocks[0])
        self.identities.forget_dead(self.pool)
        return []

    def commit(self, row: int, num_tokens: int) -> None:
        num_cached = self.rows.num_cached_block.get(str(row), 0)
        blocks, request = self._blocks(row), self.requests[row]
        for i in range(num_cached, num_tokens // self.block_size):
            self.rows.num_cached_block[str(row)] = i + 1
            chain = self.chains[row]
            if chain is None:
                continue
            parent: object = chain[-1] if chain else self.salts[row]
            content = tuple(self.tokens[row][i * self.block_size : (i + 1) * self.block_size])
            before = dict(self.identities.names)
            name = self.identities.name(parent, content, create=True)
            key = make_block_hash_with_group_id(name, 0)
            found = self.pool.get_cached_block(name, [0]) is not None
            if blocks[i].is_null and found:
                pass  # somebody else's block: the chain goes on through it
            elif blocks[i].is_null or (blocks[i].block_hash is not None and blocks[i].block_hash != key):
                self.identities.names = before
                self.chains[row] = None
                continue
            elif blocks[i].block_hash is None:
                request.block_hashes = [*chain, name]
                self.pool.cache_full_blocks(request, blocks, i, i + 1, self.block_size, 0)
            chain.append(name)

    def fork(self, source: int, destination: int) -> None:
        blocks = self._blocks(source)
        self.pool.touch(blocks)
        self.rows.req_to_blocks[str(destination)] = list(blocks)
        self.rows.num_cached_block[str(destination)] = self.rows.num_cached_block.get(str(source), 0)
        self.tokens[destination] = list(self.tokens[source])
        self.requests[destination] = copy.deepcopy(self.requests[source])
        self.requests[destination].request_id = str(destination)
        self.chains[destination] = copy.copy(self.chains[source])
        self.salts[destination] = self.salts[source]

    def free(self, row: int) -> None:
        if row in self.on_host:
            self.host_pool.free_blocks(reversed(self.host_tables.pop(row)))
            self.rows.num_cached_block.pop(str(row), None)
            self.on_host.discard(row)
        else:
            self.manager.free(self.requests[row])
        self.requests.pop(row, None)
        del self.tokens[row], self.chains[row], self.salts[row]

    def _forget_rows_beyond(self, row: int, num_full: int) -> None:
        num_cached = self.rows.num_cached_block.get(str(row), 0)
        if num_full >= num_cached:
            return
        self.rows.num_cached_block[str(row)] = num_full
        if num_full == 0:
            self.chains[row] = []
            return
        key = self._blocks(row)[num_full - 1].block_hash
        if key is None:
            self.chains[row] = None
        else:
            self.chains[row] = [BlockHash(b"?")] * (num_full - 1) + [BlockHash(key[:-4])]

    def truncate(self, row: int, num_tokens: int) -> None:
        left = self.tokens[row][: len(self.tokens[row]) - num_tokens]
        blocks = self._blocks(row)
        num_left = cdiv(len(left), self.block_size)
        self.pool.free_blocks(reversed(blocks[num_left:]))
        del blocks[num_left:]
        self._forget_rows_beyond(row, len(left) // self.block_size)
        self.tokens[row] = left
        request = self._new_request(row, left)
        request.num_computed_tokens = len(left)
        self.requests[row] = request
        if not left:
            self.free(row)

    def window(self, row: int, num_skipped_tokens: int) -> None:
        self.rows.num_skipped_tokens = num_skipped_tokens
        self.rows.remove_skipped_blocks(str(row), 0)
        self.rows.num_skipped_tokens = 0

    def _move(
        self, tables: dict[int, list[KVCacheBlock]], source: Any, target: Any
    ) -> tuple[dict[int, list[KVCacheBlock]], list[Pair]]:
        ids = list(dict.fromkeys(b.block_id for table in tables.values() for b in table if not b.is_null))
        try:
            new = dict(zip(ids, target.get_new_blocks(len(ids)), strict=True))
        except ValueError:
            raise Refused(Status.OUT_OF_BLOCKS) from None
        moved = {
            row: [target.null_block if b.is_null else new[b.block_id] for b in table]
            for row, table in tables.items()
        }
        named = [{b.block_id for b in table} for table in tables.values()]
        for table in tables.values():
            source.free_blocks(reversed(table))
        for block_id, twin in new.items():
            twin.ref_cnt = sum(block_id in ids for ids in named)
        return moved, [(block_id, twin.block_id) for block_id, twin in new.items()]

    def swap_out(self, rows: list[int]) -> list[Pair]:
        tables = {row: self._blocks(row) for row in rows}
        moved, pairs = self._move(tables, self.pool, self.host_pool)
        for row in rows:
            del self.rows.req_to_blocks[str(row)]
        self.host_tables.update(moved)
        self.on_host.update(rows)
        return pairs

    def swap_in(self, rows: list[int]) -> list[Pair]:
        tables = {row: self.host_tables[row] for row in rows}
        moved, pairs = self._move(tables, self.host_pool, self.pool)
        for row in rows:
            del self.host_tables[row]
            self.rows.req_to_blocks[str(row)] = moved[row]
        self.on_host.difference_update(rows)
        self.identities.forget_dead(self.pool)
        return pairs

    def touch(self, block_ids: list[int]) -> None:
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def untouch(self, block_ids: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    def evict(self, block_ids: list[int]) -> None:
        self.pool.evict_blocks(block_ids)
        self.identities.forget_dead(self.pool)

    def reset_cache(self) -> None:
        if not self.manager.reset_prefix_cache():
            raise Refused(Status.BLOCKS_IN_USE)
        self.identities.forget_dead(self.pool)

    def reset(self) -> None:
        for row in sorted(self.on_host) + self.device_rows():
            self.free(row)

    def table(self, row: int) -> list[int]:
        return [
            block.block_id for block in (self.host_tables if row in self.on_host else self._tables())[row]
        ]

    def _tables(self) -> dict[int, list[KVCacheBlock]]:
        return {row: self._blocks(row) for row in self.device_rows()}

    def ref_counts(self, on_host: bool) -> list[int]:
        return [block.ref_cnt for block in (self.host_pool if on_host else self.pool).blocks]

    def free_order(self, on_host: bool) -> list[int]:
        pool = self.host_pool if on_host else self.pool
        return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]

    def num_free(self) -> tuple[int, int]:
        return self.pool.get_num_free_blocks(), self.host_pool.get_num_free_blocks()

    def found(self) -> list[tuple[str, list[int]]]:
        """Of each content that has a name, the block that is found for it.

        A content is told by the number of its parent, or "salt", and its tokens.
        """
        found = []
        for (parent, tokens), name in self.identities.names.items():
            behind = int.from_bytes(parent, "big") if isinstance(parent, bytes) else f"salt {parent}"
            blocks = self.pool.get_cached_block(name, [0]) or ()
            found.append((f"behind {behind}: {tokens}", [block.block_id for block in blocks]))
        return sorted(found)

    def contents(self) -> list[list[int]]:
        """The blocks of each content, oldest first."""
        cached = self.pool.cached_block_hash_to_block._cache.values()
        groups = [list(found) if isinstance(found, dict) else [found.block_id] for found in cached]
        return sorted(groups)


# By policy: block size, blocks of both pools, blocks of a row.
ORACLES: dict[str, Callable[[int, int, int, int], Oracle]] = {"lifo": V0Oracle, "naive": V063Oracle} | {
    policy: functools.partial(V1Oracle, profile=profile) for policy, profile in FREE_PROFILES.items()
}
