"""The V1 oracle: random walks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.v1.kv_cache_utils import (
    Request,
)
from tests.reference.v1_requests import PROFILES, check, ids, make_manager, make_request

# Random walks.


class V1Walk(RuleBasedStateMachine):
    """Every operation on simulated memory: each request must read back what it would have computed itself.

    memory[block_id] holds what block_size tokens leave in the cache; like real K and V it depends on the
    salt and on all tokens before. A new block is wiped, so a block evicted, shared or freed wrongly shows.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(2, 14),
        window=st.sampled_from([None, None, 1, 3, 6]),
        free_profile=st.sampled_from(PROFILES),
        enable_caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self, block_size: int, num_blocks: int, window: int | None, free_profile: str, enable_caching: bool
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.manager = make_manager(
            num_blocks, block_size, window, free_profile=free_profile, enable_caching=enable_caching
        )
        self.memory: dict[int, list[object]] = {}
        self.requests: list[Request] = []
        self.num_requests = 0

    def table(self, request: Request) -> list[int]:
        return self.manager.get_block_ids(request.request_id)[0]

    def content(self, request: Request, position: int) -> object:
        return (request.cache_salt, tuple(request.all_token_ids[: position + 1]))

    def compute(self, request: Request, new_ids: list[int], num_tokens: int) -> None:
        for block_id in new_ids:
            self.memory[block_id] = [None] * self.block_size
        first = request.num_computed_tokens
        for position in range(first, first + num_tokens):
            block_id = self.table(request)[position // self.block_size]
            assert block_id != 0
            self.memory[block_id][position % self.block_size] = self.content(request, position)
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
        hit_blocks, num_hit_tokens = self.manager.get_computed_blocks(request)
        assert num_hit_tokens < request.num_tokens
        num_new_tokens = request.num_tokens - num_hit_tokens if whole else 1
        blocks = self.manager.allocate_slots(request, num_new_tokens, num_hit_tokens, hit_blocks)
        if blocks is None:
            assert self.table(request) == []
            return
        request.num_computed_tokens = num_hit_tokens
        self.compute(request, ids(blocks.blocks[0]), num_new_tokens)
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
            self.compute(request, ids(blocks.blocks[0]), num_tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.free(request)

    @rule(block_id=st.integers(0, 13))
    def evict(self, block_id: int) -> None:
        if block_id < len(self.manager.block_pool.blocks):
            self.manager.evict_blocks({block_id})

    @rule()
    def reset(self) -> None:
        in_use = any(block_id for request in self.requests for block_id in self.table(request))
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
            # What the next token attends to.
            first = 0 if self.window is None else max(num_computed - (self.window - 1), 0)
            for position in range(first, num_computed):
                block_id = self.table(request)[position // self.block_size]
                content = self.memory[block_id][position % self.block_size]
                assert content == self.content(request, position)


TestV1Walk = V1Walk.TestCase
TestV1Walk.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
