"""Blocks, the queue of free blocks, and the hashes by which cached content is found again (vLLM V1)."""

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, overload

# The hash of a block's tokens and of all tokens before them.
BlockHash = NewType("BlockHash", bytes)
# A BlockHash followed by the id of a KV cache group in 4 bytes, big-endian.
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

# The parent of a prompt's first block: fixed, so that a run can be replayed. `init_none_hash` changes it.
NONE_HASH = BlockHash(bytes(32))


def init_none_hash(hash_function: Callable[[Any], bytes]) -> None:
    """Compute NONE_HASH from PYTHONHASHSEED, or draw it at random when that is not set."""
    global NONE_HASH
    seed = os.getenv("PYTHONHASHSEED")
    NONE_HASH = BlockHash(os.urandom(32) if seed is None else hash_function(seed))


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """Pack a hash and a group id in [0, 2**32) into one key."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> int:
    return int.from_bytes(key[-4:], "big")


# `eq=False`: two blocks are the same only if they are one object. Comparing fields would follow the links.
@dataclass(eq=False)
class KVCacheBlock:
    """One block of the cache, as the pool knows it.

    block_id: the block's place in the cache, from 0.
    ref_cnt: how many requests use the block. At 0 it is in the free queue, perhaps with content to be found.
    block_hash: the key of the content, None unless the block is full and cached.
    prev_free_block, next_free_block: its neighbours in the free queue, None outside of it.
    is_null: whether this is the placeholder, which is never given out, freed or cached.
    """

    block_id: int
    ref_cnt: int = 0
    _block_hash: BlockHashWithGroupId | None = None
    prev_free_block: "KVCacheBlock | None" = None
    next_free_block: "KVCacheBlock | None" = None
    is_null: bool = False

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        return self._block_hash

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashWithGroupId) -> None:
        assert self._block_hash is None, "The block already has a hash. This should not happen."
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        """Forget the content's key: the block is evicted."""
        self._block_hash = None

    def __repr__(self) -> str:
        prev_id = self.prev_free_block.block_id if self.prev_free_block is not None else None
        next_id = self.next_free_block.block_id if self.next_free_block is not None else None
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"_block_hash={self._block_hash!r}, prev_free_block={prev_id}, next_free_block={next_id})"
        )


def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
    left.next_free_block = right
    right.prev_free_block = left


class FreeKVCacheBlockQueue:
    """The free blocks in the order they will be taken, as a doubly linked list through the blocks themselves.

    The links let a block that is hit leave from the middle. Two blocks with id -1 mark the ends.
    At first the order is that of `blocks`.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        _link(self.fake_free_list_head, self.fake_free_list_tail)
        self.num_free_blocks = 0
        self.append_n(blocks)

    def _insert_between(
        self, left: KVCacheBlock | None, block: KVCacheBlock, right: KVCacheBlock | None
    ) -> None:
        assert left is not None, "the ends of the free queue are linked"
        assert right is not None, "the ends of the free queue are linked"
        _link(left, block)
        _link(block, right)
        self.num_free_blocks += 1

    def popleft(self) -> KVCacheBlock:
        """Take the first block. ValueError when there is none."""
        first_block = self.fake_free_list_head.next_free_block
        if first_block is None or first_block is self.fake_free_list_tail:
            assert self.num_free_blocks == 0, f"{self.num_free_blocks=} must be 0: the queue is empty"
            raise ValueError("No free blocks available")
        self.remove(first_block)
        return first_block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks. AssertionError when there are fewer."""
        assert n <= self.num_free_blocks, f"{n=} must be at most {self.num_free_blocks=}"
        return [self.popleft() for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        """Remove this block from the queue, at any position. RuntimeError when it is not in a queue."""
        if block.prev_free_block is None or block.next_free_block is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        _link(block.prev_free_block, block.next_free_block)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail, to be taken last."""
        self._insert_between(self.fake_free_list_tail.prev_free_block, block, self.fake_free_list_tail)

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the tail, blocks[0] the first of them to be taken."""
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the head, blocks[0] the first of all to be taken."""
        for block in reversed(blocks):
            self._insert_between(self.fake_free_list_head, block, self.fake_free_list_head.next_free_block)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all free blocks, from head to tail. AssertionError when they are not `num_free_blocks`."""
        blocks: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            blocks.append(block)
            assert len(blocks) <= self.num_free_blocks, f"{self.num_free_blocks=} but the queue goes on"
            block = block.next_free_block
        assert len(blocks) == self.num_free_blocks, f"{self.num_free_blocks=} must be {len(blocks)=}"
        return blocks


def trim_null_head(blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """Return the blocks without the null blocks in front; the list itself if there are none."""
    num_nulls = next((i for i, block in enumerate(blocks) if not block.is_null), len(blocks))
    return blocks[num_nulls:] if num_nulls else blocks


class Request:
    """A request, as far as the V1 managers read it.

    num_computed_tokens: tokens whose K and V are in the cache. The scheduler advances it.
    num_in_flight_tokens: those of them whose steps are not over, with asynchronous scheduling.
    shared_prefix_boundary: where other prompts leave this one, from `get_computed_blocks`; 0: unknown.
    block_hashes: the hashes of the request's full blocks so far; `block_hasher` adds to them as tokens come.
    cache_salt, lora_request: requests that differ in them share no blocks. Of the latter `lora_name` is read.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        cache_salt: str | None = None,
        lora_request: Any = None,
        block_hasher: "Callable[[Request], list[BlockHash]] | None" = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.all_token_ids = list(prompt_token_ids)
        self.cache_salt = cache_salt
        self.lora_request = lora_request
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.shared_prefix_boundary = 0
        self.block_hashes: list[BlockHash] = []
        self._block_hasher = block_hasher
        self._hash_new_full_blocks()

    def _hash_new_full_blocks(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        self.all_token_ids.extend([token_ids] if isinstance(token_ids, int) else token_ids)
        self._hash_new_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


def sha256(value: Any) -> bytes:
    """Return the SHA-256 digest of any object that can be pickled."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def generate_block_hash_extra_keys(request: Request, start_token_idx: int) -> tuple[Any, ...] | None:
    """Return the parts of a block's key besides its tokens: the LoRA's name, and in the first block the salt.

    The chain of hashes carries the salt on to all later blocks.
    """
    extra_keys: list[Any] = []
    if request.lora_request:
        extra_keys.append(request.lora_request.lora_name)
    if request.cache_salt and start_token_idx == 0:
        extra_keys.append(request.cache_salt)
    return tuple(extra_keys) or None


def hash_block_tokens(
    hash_function: Callable[[Any], bytes],
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Iterable[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """Hash a full block: its parent's hash (None for the first block), its tokens and extra keys."""
    return BlockHash(hash_function((parent_block_hash or NONE_HASH, tuple(curr_block_token_ids), extra_keys)))


def get_request_block_hasher(
    block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> Callable[[Request], list[BlockHash]]:
    """Return a function that hashes the full blocks that `request.block_hashes` does not cover yet."""

    def request_block_hasher(request: Request) -> list[BlockHash]:
        new_block_hashes: list[BlockHash] = []
        parent = request.block_hashes[-1] if request.block_hashes else None
        start = len(request.block_hashes) * block_size
        while start + block_size <= request.num_tokens:
            tokens = request.all_token_ids[start : start + block_size]
            extra_keys = generate_block_hash_extra_keys(request, start)
            parent = hash_block_tokens(caching_hash_fn, parent, tokens, extra_keys)
            new_block_hashes.append(parent)
            start += block_size
        return new_block_hashes

    return request_block_hasher


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """Hashes of small blocks read as hashes of larger ones, a rest being left out.

    The hash of a large block is that of the last small one in it, which covers all tokens before (vLLM 0.14
    joined the hashes of all small blocks). target_block_size must be a multiple of hash_block_size
    (AssertionError).
    """

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        assert target_block_size % hash_block_size == 0, (
            f"{target_block_size=} must be a multiple of {hash_block_size=}"
        )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.block_hashes[(range(len(self))[index] + 1) * self.scale_factor - 1]


def resolve_block_hashes(
    block_hashes: Sequence[BlockHash], hash_block_size: int, block_size: int
) -> Sequence[BlockHash]:
    """Return hashes of blocks of `hash_block_size` tokens as those of blocks of `block_size`."""
    if block_size == hash_block_size:
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)


def get_num_blocks(vllm_config: Any, num_layers: int, available_memory: int, page_size: int) -> int:
    """Return how many blocks fit into `available_memory` bytes; `page_size` is a block's bytes in one layer.

    `vllm_config` is in vLLM's signature and is not read.
    """
    return max(int(available_memory // page_size // num_layers), 0)
