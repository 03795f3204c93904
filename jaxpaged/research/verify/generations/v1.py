"""vLLM's third generation: a pool with a prefix cache, and the manager of its tables."""

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

from jaxpaged.arithmetic import cdiv
from jaxpaged.research.verify.generations.base import Oracle, Pair, Refused
from jaxpaged.research.verify.history import Disagreement
from jaxpaged.research.verify.oracles.v1.block_pool import BlockPool as V1BlockPool
from jaxpaged.research.verify.oracles.v1.kv_cache_manager import KVCacheManager
from jaxpaged.research.verify.oracles.v1.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    Request,
)
from jaxpaged.research.verify.oracles.v1.single_type import FullAttentionManager
from jaxpaged.research.verify.oracles.v1.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from jaxpaged.status import Status


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


class Labels:
    """Names of contents by the value that a pool writes into `block_hash`.

    A pool may write bytes, a tuple or an object of its own. Equal labels must stand for equal contents, and
    different ones for different contents.
    """

    def __init__(self) -> None:
        self.known: list[tuple[Any, BlockHash]] = []  # a label need not be hashable

    def note(self, block: Any, name: BlockHash) -> None:
        """Note the label of a block that has just been cached under a name.

        Raises: Disagreement if it has none, or if labels and names are no longer one to one.
        """
        label, its_name = block.block_hash, self.name_of(block)
        if label is None:
            raise Disagreement(f"block {block.block_id} was cached, and its block_hash is None")
        if its_name is None and all(other != name for _, other in self.known):
            self.known.append((label, name))
        elif its_name is None:
            raise Disagreement(
                f"block {block.block_id} holds the content of another, and their block_hash differ"
            )
        elif its_name != name:
            raise Disagreement(
                f"block {block.block_id} holds other content than another, and their block_hash are equal"
            )

    def name_of(self, block: Any) -> BlockHash | None:
        """Return the name of a block's content, or None if no content with its label was cached."""
        return next((name for label, name in self.known if label == block.block_hash), None)

    def keep(self, names: Collection[BlockHash]) -> None:
        """Forget all labels of other contents."""
        self.known = [(label, name) for label, name in self.known if name in names]


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
        self.pool = self.manager.coordinator.block_pool = pool(num_blocks, True, block_size)
        if not hasattr(self.pool, "hash_block_size"):  # a user's pool may do without
            self.pool.hash_block_size = block_size
        self.rows = WindowedFullAttention(spec, self.pool, enable_caching=True, kv_cache_group_id=0)
        self.manager.coordinator.single_type_managers = (self.rows,)
        self.host_pool = pool(num_host_blocks, False, block_size)
        self.host_tables: dict[int, list[KVCacheBlock]] = {}
        self.requests: dict[int, Request] = {}
        self.chains: dict[int, list[BlockHash] | None] = {}  # names of cached blocks; None: broken
        self.salts: dict[int, int] = {}
        self.identities, self.labels = Identities(), Labels()

    def _forget_dead(self) -> None:
        self.identities.forget_dead(self.pool)
        self.labels.keep(self.identities.names.values())

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
        self._forget_dead()
        return pairs

    def _hashes(self, tokens: list[int], salt: int) -> list[BlockHash]:
        """Return a name for each full block of a prompt; a new one for content that nobody holds."""
        hashes: list[BlockHash] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            parent: object = hashes[-1] if hashes else salt
            content = tuple(tokens[end - self.block_size : end])
            hashes.append(self.identities.name(parent, content, create=False))
        return hashes

    def hits(self, tokens: list[int], salt: int) -> list[int]:
        request = self._new_request(-1, tokens)
        request.block_hashes = self._hashes(tokens, salt)
        blocks, num_tokens, _ = self.manager.get_computed_blocks(request)
        assert num_tokens == len(blocks.blocks[0]) * self.block_size
        return [block.block_id for block in blocks.blocks[0]]

    def admit(self, row: int, tokens: list[int], salt: int) -> None:
        self._begin(row, tokens, salt, use_cache=True)

    def _begin(self, row: int, tokens: list[int], salt: int, *, use_cache: bool) -> list[Pair]:
        request = self._new_request(row, tokens)
        request.skip_reading_prefix_cache = not use_cache
        request.block_hashes = self._hashes(tokens, salt)
        hits, num_hit_tokens, _ = self.manager.get_computed_blocks(request)
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
        self._forget_dead()
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
            is_cached = self.pool.get_cached_block(name, [0]) is not None
            if blocks[i].is_null and is_cached:
                pass  # somebody else's block: the chain goes on through it
            elif blocks[i].is_null or (
                blocks[i].block_hash is not None and self.labels.name_of(blocks[i]) != name
            ):
                self.identities.names = before
                self.chains[row] = None
                continue
            elif blocks[i].block_hash is None:
                request.block_hashes = [*chain, name]
                self.pool.cache_full_blocks(request, blocks, i, i + 1, self.block_size, 0)
                self.labels.note(blocks[i], name)
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

    def free_twice(self, row: int) -> None:
        """Do nothing: V1's rule for a second free is about blocks, see `over_free`."""

    def over_free(self, row: int) -> dict[str, int]:
        """Free each block of a row once more than it is held, and return what the pool counts then.

        V1's pool raises nothing: a count goes below zero, and no block is free twice.
        """
        blocks = {block.block_id: block for block in self._blocks(row) if not block.is_null}.values()
        for block in blocks:
            for _ in range(1 + block.ref_cnt):
                self.pool.free_blocks([block])
        counts = {f"the number of holders of block {block.block_id}": block.ref_cnt for block in blocks}
        return counts | {"the number of free blocks": self.pool.get_num_free_blocks()}

    def _forget_rows_beyond(self, row: int, num_full: int) -> None:
        num_cached = self.rows.num_cached_block.get(str(row), 0)
        if num_full >= num_cached:
            return
        self.rows.num_cached_block[str(row)] = num_full
        if num_full == 0:
            self.chains[row] = []
            return
        name = self.labels.name_of(self._blocks(row)[num_full - 1])
        self.chains[row] = None if name is None else [BlockHash(b"?")] * (num_full - 1) + [name]

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
        self._forget_dead()
        return pairs

    def touch(self, block_ids: list[int]) -> None:
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def untouch(self, block_ids: list[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    def evict(self, block_ids: list[int]) -> None:
        self.pool.evict_blocks(block_ids)
        self._forget_dead()

    def reset_cache(self) -> None:
        if not self.manager.reset_prefix_cache():
            raise Refused(Status.BLOCKS_IN_USE)
        self._forget_dead()

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

    def blocks_by_content(self) -> dict[str, int]:
        """Return the ids of cached blocks by their contents' names.

        A content is told by its tokens, and by the number of its parent or the salt.
        """
        block_ids = {}
        for (parent, tokens), name in self.identities.names.items():
            behind = (
                f"content {int.from_bytes(parent, 'big')}" if isinstance(parent, bytes) else f"salt {parent}"
            )
            for block in self.pool.get_cached_block(name, [0]) or ():
                block_ids[f"the block found for tokens {list(tokens)} after {behind}"] = block.block_id
        return dict(sorted(block_ids.items()))

    def contents(self) -> list[list[int]]:
        """Return the blocks of each content, oldest first."""
        cached = self.pool.cached_block_hash_to_block._cache.values()
        groups = [list(blocks) if isinstance(blocks, dict) else [blocks.block_id] for blocks in cached]
        return sorted(groups)
