"""The V1 oracle: random walks."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.v1.kv_cache_manager import KVCacheBlocks
from reference.v1.kv_cache_utils import Request
from reference.v1.specs import AttentionSpec, ChunkedLocalAttentionSpec, RSWASpec, SlidingWindowSpec
from tests.reference.v1_requests import (
    PROFILES,
    check,
    chunked,
    full,
    ids,
    make_hybrid_manager,
    make_request,
    window,
)


def middle_leaves(tokens: int, block_size: int) -> AttentionSpec:
    return RSWASpec(block_size, 1, 1, "half", tokens)


# Groups of layers for blocks of b tokens. Half of them are one group.
GROUPS = [
    lambda b: [full(b)],
    lambda b: [full(b)],
    lambda b: [window(1, b)],
    lambda b: [window(3, b)],
    lambda b: [window(6, b)],
    lambda b: [full(b), window(3, b), window(3, b)],
    lambda b: [window(6, b), full(2 * b), window(3, b)],
    lambda b: [full(b), window(5, 2 * b)],
    lambda b: [chunked(6, b), full(b), window(3, b)],
    lambda b: [middle_leaves(3, b), window(2, b)],
]


def reads(spec: AttentionSpec, position: int, token: int, num_prompt_tokens: int) -> bool:
    """Return whether a token attends to an earlier position."""
    if isinstance(spec, SlidingWindowSpec):
        return position > token - spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size == token // spec.attention_chunk_size
    if isinstance(spec, RSWASpec):
        return position < num_prompt_tokens or position >= token - spec.rswa_window
    return True


class V1Walk(RuleBasedStateMachine):
    """Every operation on simulated memory: each request must read back what it would have computed itself.

    memory[block_id] holds what block_size tokens leave in the cache; like real K and V it depends on the
    salt and on all tokens before. A new block is wiped, so a block evicted, shared or freed wrongly shows.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 14),
        groups=st.sampled_from(GROUPS),
        free_profile=st.sampled_from(PROFILES),
        enable_caching=st.sampled_from([True, True, True, False]),
        use_eagle=st.sampled_from([False, False, True]),
        retention_interval=st.sampled_from([None, None, 0]),
    )
    def build(self, block_size: int, num_blocks: int, groups: Any, use_eagle: bool, **options: Any) -> None:
        self.block_size = block_size
        self.specs = groups(block_size)
        use_eagle = use_eagle and not any(isinstance(s, ChunkedLocalAttentionSpec) for s in self.specs)
        self.manager = make_hybrid_manager(
            num_blocks * len(self.specs), self.specs, use_eagle=use_eagle, **options
        )
        self.memory: dict[int, list[object]] = {}
        self.requests: list[Request] = []
        self.num_requests = 0

    def tables(self, request: Request) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)

    def content(self, request: Request, position: int) -> object:
        return (request.cache_salt, tuple(request.all_token_ids[: position + 1]))

    def compute(self, request: Request, new_blocks: KVCacheBlocks, num_tokens: int) -> None:
        first = request.num_computed_tokens
        for spec, new, table in zip(self.specs, new_blocks.blocks, self.tables(request), strict=True):
            for block_id in ids(new):
                self.memory[block_id] = [None] * spec.block_size
            for position in range(first, first + num_tokens):
                block_id = table[position // spec.block_size]
                assert block_id != 0
                self.memory[block_id][position % spec.block_size] = self.content(request, position)
        request.num_computed_tokens += num_tokens

    @rule(
        length=st.integers(1, 20),
        own=st.lists(st.integers(0, 1), max_size=2),
        salt=st.sampled_from([None, None, "a"]),
        whole=st.booleans(),
    )
    def admit(self, length: int, own: list[int], salt: str | None, whole: bool) -> None:
        tokens = [*([0, 1, 1, 0, 2] * 4)[:length], *own]
        request = make_request(str(self.num_requests), tokens, self.block_size, cache_salt=salt)
        self.num_requests += 1
        hit_blocks, num_hit_tokens, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        assert num_hit_tokens < request.num_tokens
        num_new_tokens = request.num_tokens - num_hit_tokens if whole else 1
        blocks = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit_blocks)
        if blocks is None:
            assert not any(self.tables(request))
            return
        request.num_computed_tokens = num_hit_tokens
        self.compute(request, blocks, num_new_tokens)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(token)
        num_tokens = data.draw(st.integers(1, request.num_tokens - request.num_computed_tokens))
        blocks = self.manager.allocate_slots(request, num_tokens, num_lookahead_tokens=token)
        if blocks is not None:
            self.compute(request, blocks, num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.free(request)

    @rule(block_id=st.integers(0, 41))
    def evict(self, block_id: int) -> None:
        if block_id < len(self.manager.block_pool.blocks):
            self.manager.evict_blocks({block_id})

    @rule()
    def reset(self) -> None:
        in_use = any(
            block_id for request in self.requests for table in self.tables(request) for block_id in table
        )
        assert self.manager.reset_prefix_cache() == (not in_use)

    @invariant()
    def conserves_blocks(self) -> None:
        if hasattr(self, "manager"):
            check(self.manager)

    @invariant()
    def reads_back_what_it_would_compute(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.requests:
            num_computed = request.num_computed_tokens
            for spec, table in zip(self.specs, self.tables(request), strict=True):
                for position in range(num_computed):
                    if reads(spec, position, num_computed, request.num_prompt_tokens):
                        block_id = table[position // spec.block_size]
                        content = self.memory[block_id][position % spec.block_size]
                        assert content == self.content(request, position)


TestV1Walk = V1Walk.TestCase
TestV1Walk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
