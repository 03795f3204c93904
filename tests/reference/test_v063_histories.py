"""Random histories of the 0.6.3 oracle, over a memory simulated beside it."""

import copy
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.v063.block import AllocStatus, NoFreeBlocksError
from reference.v063.block_manager import SelfAttnBlockSpaceManager
from reference.v063.sequence import Sequence, SequenceGroup, SequenceStatus


def has_any(histories):
    return bool(histories.groups)


def has_running(histories):
    return any(g.get_seqs(SequenceStatus.RUNNING) for g in histories.groups)


def has_swapped(histories):
    return any(g.get_seqs(SequenceStatus.SWAPPED) for g in histories.groups)


class Histories(RuleBasedStateMachine):
    """A manager driven as by a scheduler, over a memory that remembers what was written to it.

    A slot's content is the history of its token: the tokens up to and including it. A sequence that shares,
    copies, swaps and frees as it should reads its own history in every slot, always.
    """

    enable_caching: bool

    @initialize(
        block_size=st.sampled_from([1, 2, 3]),
        num_gpu_blocks=st.sampled_from([40, 20, 10, 4]),
        num_cpu_blocks=st.sampled_from([20, 8, 3, 0]),
        sliding_window=st.sampled_from([None, None, 1, 4]),
    )
    def make(self, block_size, num_gpu_blocks, num_cpu_blocks, sliding_window):
        self.block_size = block_size
        self.num_gpu_blocks = num_gpu_blocks
        self.manager = SelfAttnBlockSpaceManager(
            block_size, num_gpu_blocks, num_cpu_blocks, 0.0, sliding_window, self.enable_caching
        )
        self.memory = {}  # (block id, offset) -> history
        self.groups = []
        self.next_id = 0
        self.now = 0.0

    def new_group(self, prompt, num_seqs):
        seqs = [Sequence(self.next_id + i, prompt) for i in range(num_seqs)]
        self.next_id += num_seqs
        return SequenceGroup(str(self.next_id), seqs)

    def write(self, seq):
        """Write the keys and values of all tokens not yet computed, as a step does."""
        token_ids = seq.get_token_ids()
        block_ids = self.manager.get_block_table(seq)
        for position in range(seq.data.get_num_computed_tokens(), len(token_ids)):
            slot = block_ids[position // self.block_size], position % self.block_size
            self.memory[slot] = token_ids[: position + 1]
        seq.data.update_num_computed_tokens(len(token_ids) - seq.data.get_num_computed_tokens())

    def copy_blocks(self, pairs):
        for source, target in pairs:
            for offset in range(self.block_size):
                self.memory[target, offset] = self.memory.get((source, offset))

    def blocks_of(self, seq):
        return self.manager.block_tables[seq.seq_id].blocks

    def is_whole(self, seq_group):
        """Return whether the sequences can be forked and swapped: no block is dropped or held ready."""
        return all(
            block is not self.manager.allocator.null_block and block.token_ids
            for seq in seq_group.seqs
            for block in self.blocks_of(seq)
        )

    def pick(self, data, status):
        return data.draw(st.sampled_from([g for g in self.groups if g.get_seqs(status)]))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7), num_seqs=st.sampled_from([1, 1, 2]))
    def admit(self, prompt, num_seqs):
        seq_group = self.new_group(prompt, num_seqs)
        if self.manager.can_allocate(seq_group) != AllocStatus.OK:
            return
        # With a window can_allocate counts the window only, but the prompt takes all its blocks.
        before = copy.deepcopy(self.manager)
        try:
            self.manager.allocate(seq_group)
        except NoFreeBlocksError:
            assert self.manager.max_blocks_in_window is not None
            self.manager = before
            return
        for seq in seq_group.seqs:
            seq.status = SequenceStatus.RUNNING
            self.write(seq)
        self.groups.append(seq_group)

    @rule(num_blocks_over=st.integers(1, 3), now=st.sampled_from([False] * 7 + [True]))
    def admit_too_much(self, num_blocks_over, now):
        """Ask for more blocks than are free, of tokens never seen before; then go back to the copy."""
        if not now:
            return
        num_blocks = self.manager.get_num_free_gpu_blocks() + num_blocks_over
        before = copy.deepcopy(self.manager)
        with pytest.raises(NoFreeBlocksError):
            self.manager.allocate(self.new_group([7] * (num_blocks * self.block_size), 1))
        self.manager = before

    @precondition(has_running)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 5]), lookahead=st.sampled_from([0, 0, 0, 2]))
    def append(self, data, num_tokens, lookahead):
        self.append_to(self.pick(data, SequenceStatus.RUNNING), num_tokens, lookahead)

    @precondition(has_running)
    @rule()
    def decode(self):
        for seq_group in self.groups:
            self.append_to(seq_group, 1, 0)

    def append_to(self, seq_group, num_tokens, lookahead):
        """Append tokens: different ones to forks, often the same to other sequences."""
        running = seq_group.get_seqs(SequenceStatus.RUNNING)
        before = copy.deepcopy([seq.data for seq in running])
        for i, seq in enumerate(running):
            for _ in range(num_tokens):
                seq.append_token_id(i)
        null_block = self.manager.max_blocks_in_window is not None
        is_free = self.manager.get_num_free_gpu_blocks() > 0 or not null_block  # the null block is one more
        if not (
            self.manager.can_append_slots(seq_group, lookahead + self.block_size * null_block) and is_free
        ):
            for seq, seq_data in zip(running, before, strict=True):
                seq.data = seq_data
            return
        for seq in running:
            self.copy_blocks(self.manager.append_slots(seq, lookahead))
            self.write(seq)

    @precondition(has_running)
    @rule(data=st.data())
    def fork(self, data):
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if len(seq_group.seqs) < 4 and self.is_whole(seq_group):
            parent = data.draw(st.sampled_from(seq_group.get_seqs(SequenceStatus.RUNNING)))
            child = parent.fork(self.next_id)
            self.next_id += 1
            self.manager.fork(parent, child)
            seq_group.seqs.append(child)

    @precondition(has_any)
    @rule(data=st.data())
    def free(self, data):
        seq_group = self.pick(data, None)
        seq = data.draw(st.sampled_from(seq_group.seqs))
        if self.enable_caching and seq.status == SequenceStatus.RUNNING:
            self.now += 1
            self.manager.access_all_blocks_in_seq(seq, self.now)
        self.manager.free(seq)
        seq_group.seqs.remove(seq)
        if not seq_group.seqs:
            self.groups.remove(seq_group)

    @precondition(has_running)
    @rule(data=st.data())
    def swap_out(self, data):
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if not self.is_whole(seq_group) or not self.manager.can_swap_out(seq_group):
            return
        mapping = self.manager.swap_out(seq_group)
        self.copy_blocks((gpu, self.num_gpu_blocks + cpu) for gpu, cpu in mapping)
        for seq in seq_group.get_seqs(SequenceStatus.RUNNING):
            seq.status = SequenceStatus.SWAPPED

    @precondition(has_swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        seq_group = self.pick(data, SequenceStatus.SWAPPED)
        if self.manager.can_swap_in(seq_group, 0) != AllocStatus.OK:
            return
        mapping = self.manager.swap_in(seq_group)
        self.copy_blocks((self.num_gpu_blocks + cpu, gpu) for cpu, gpu in mapping)
        for seq in seq_group.get_seqs(SequenceStatus.SWAPPED):
            seq.status = SequenceStatus.RUNNING

    @precondition(lambda self: self.enable_caching and has_running(self))
    @rule(data=st.data())
    def look_up(self, data):
        """Look for computed blocks; one is always left to compute."""
        self.manager.mark_blocks_as_computed()
        seq_group = self.pick(data, SequenceStatus.RUNNING)
        if not seq_group.get_seqs(SequenceStatus.SWAPPED):
            computed = self.manager.get_common_computed_block_ids(seq_group.seqs)
            assert len(computed) < max(len(self.blocks_of(seq)) for seq in seq_group.seqs)

    @invariant()
    def every_sequence_reads_its_own_history(self):
        for seq_group in self.groups:
            for seq in seq_group.seqs:
                token_ids = seq.get_token_ids()
                blocks = self.blocks_of(seq)
                block_ids = self.manager.get_block_table(seq)
                assert block_ids == [block.block_id for block in blocks]
                for position in range(len(token_ids)):
                    i, offset = divmod(position, self.block_size)
                    if blocks[i] is not self.manager.allocator.null_block:
                        assert blocks[i].token_ids[offset] == token_ids[position]
                        assert self.memory[block_ids[i], offset] == token_ids[: position + 1]

    @invariant()
    def free_and_used_are_all(self):
        null_block = self.manager.allocator.null_block
        blocks = [block for table in self.manager.block_tables.values() for block in table.blocks]
        blocks = [block for block in blocks if block is not null_block]
        assert len({id(block) for block in blocks}) == len(blocks)
        if null_block is not None:
            assert null_block.block_id not in {block.block_id for block in blocks}
            blocks.append(null_block)
        for allocator in self.manager.allocator.allocators.values():
            used = Counter(block.block_id for block in blocks if block.block_id in allocator.block_ids)
            assert {i: n for i, n in allocator.ref_counts.items() if n} == used
            free = list(allocator.free_ids)
            if self.enable_caching:
                free += allocator.evictor.table
                self.check_cache(allocator, used, blocks)
            assert sorted([*free, *used]) == list(allocator.block_ids)
            assert allocator.num_free_blocks == len(free)

    def check_cache(self, allocator, used, blocks):
        """Check that findable ids are held or in the evictor, each once."""
        cached = allocator.cached_ids
        assert len(set(cached.values())) == len(cached)
        assert all(block_id in used or block_id in allocator.evictor.table for block_id in cached.values())
        for block_id, block in allocator.evictor.table.items():
            assert cached[block.content_hash] == block_id
        for block in blocks:
            if block.block_id in used and block.content_hash is not None:
                assert cached[block.content_hash] == block.block_id


class NaiveHistories(Histories):
    enable_caching = False


class PrefixCachingHistories(Histories):
    enable_caching = True


quick = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNaiveHistories = NaiveHistories.TestCase
TestNaiveHistories.settings = quick
TestPrefixCachingHistories = pytest.mark.slow(PrefixCachingHistories.TestCase)
TestPrefixCachingHistories.settings = quick
