"""The v0 oracle: random walks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reference.invariants import check_block_space_manager
from reference.v0.block import Device
from reference.v0.block_manager import AllocStatus, BlockSpaceManager
from reference.v0.sequence import Prefix, Sequence, SequenceGroup, SequenceStatus
from tests.reference.v0_requests import start

# Random walks.


class V0Walk(RuleBasedStateMachine):
    """Every operation on simulated memory: each sequence must read back the tokens that it wrote.

    memory[device, block_number] holds block_size tokens. Writing, copying and swapping go where the manager
    says, and freed blocks are wiped, so a block lost, shared wrongly or freed too early shows.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_gpu_blocks=st.integers(2, 12),
        num_cpu_blocks=st.integers(0, 8),
        watermark=st.sampled_from([0.0, 0.1, 0.3]),
        window_blocks=st.sampled_from([None, None, 1, 2, 3]),
    )
    def build(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float,
        window_blocks: int | None,
    ) -> None:
        self.window = None if window_blocks is None else window_blocks * block_size
        self.manager = BlockSpaceManager(block_size, num_gpu_blocks, num_cpu_blocks, watermark, self.window)
        self.block_size = block_size
        self.memory: dict[tuple[Device, int], list[int]] = {}
        self.groups: list[SequenceGroup] = []
        self.prefixes = [] if self.window else [Prefix([100 + i for i in range(block_size)], block_size)]
        self.num_seqs = 0
        self.num_tokens = 0

    def next_id(self) -> int:
        self.num_seqs += 1
        return self.num_seqs

    def write(self, seq: Sequence, position: int) -> None:
        block = self.manager.block_tables[seq.seq_id][position // self.block_size]
        slots = self.memory.setdefault((block.device, block.block_number), [-1] * self.block_size)
        slots[position % self.block_size] = seq.get_token_ids()[position]

    def with_status(self, status: SequenceStatus) -> list[SequenceGroup]:
        return [group for group in self.groups if group.num_seqs(status)]

    @rule(data=st.data(), num_seqs=st.integers(1, 2), with_prefix=st.booleans())
    def admit(self, data: st.DataObject, num_seqs: int, with_prefix: bool) -> None:
        prefix = self.prefixes[0] if with_prefix and self.prefixes else None
        num_tokens = data.draw(st.integers(1, 4 * self.block_size))
        prompt = list(range(1000 * self.num_seqs, 1000 * self.num_seqs + num_tokens))
        tokens = [*(prefix.token_ids if prefix else ()), *prompt]
        seqs = [Sequence(self.next_id(), "", list(tokens), self.block_size) for _ in range(num_seqs)]
        group = SequenceGroup("", seqs, prefix=prefix)
        num_held = 0 if prefix is None or not prefix.allocated else prefix.get_num_blocks()
        if self.manager.can_allocate(group) is not AllocStatus.OK:
            return
        start(self.manager, group)
        for position in range(num_held * self.block_size, len(tokens)):
            self.write(seqs[0], position)
        self.groups.append(group)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        if not self.manager.can_append_slot(group):
            return
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            self.num_tokens += 1
            token = -1000 - self.num_tokens
            seq.append_token_id(token, {token: 0.0})
            copy_pair = self.manager.append_slot(seq)
            if copy_pair is not None:
                source, destination = copy_pair
                self.memory[Device.GPU, destination] = self.memory[Device.GPU, source].copy()
            self.write(seq, seq.get_len() - 1)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        parent = data.draw(st.sampled_from(group.get_seqs(SequenceStatus.RUNNING)))
        child = parent.fork(self.next_id())
        group.add(child)
        self.manager.fork(parent, child)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.groups))
        seq = data.draw(st.sampled_from(group.get_unfinished_seqs()))
        self.manager.free(seq)
        seq.status = SequenceStatus.FINISHED_STOPPED
        if group.is_finished():
            self.groups.remove(group)

    @precondition(lambda self: self.with_status(SequenceStatus.RUNNING))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.RUNNING)))
        if self.manager.can_swap_out(group):
            mapping = self.manager.swap_out(group)
            self.swap(group, mapping, Device.GPU, Device.CPU, SequenceStatus.SWAPPED)

    @precondition(lambda self: self.with_status(SequenceStatus.SWAPPED))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.with_status(SequenceStatus.SWAPPED)))
        if self.manager.can_swap_in(group):
            mapping = self.manager.swap_in(group)
            self.swap(group, mapping, Device.CPU, Device.GPU, SequenceStatus.RUNNING)

    def swap(
        self,
        group: SequenceGroup,
        mapping: dict[int, int],
        source: Device,
        target: Device,
        status: SequenceStatus,
    ) -> None:
        for source_number, target_number in mapping.items():
            self.memory[target, target_number] = self.memory[source, source_number].copy()
        for seq in group.get_unfinished_seqs():
            seq.status = status

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.groups = []

    @invariant()
    def conserves_blocks(self) -> None:
        if hasattr(self, "manager"):
            check_block_space_manager(self.manager, self.prefixes)

    @invariant()
    def reads_back_what_was_written(self) -> None:
        if not hasattr(self, "manager"):
            return
        for allocator in (self.manager.gpu_allocator, self.manager.cpu_allocator):
            for block in allocator.free_blocks:
                self.memory.pop((block.device, block.block_number), None)
        for group in self.groups:
            for seq in group.get_unfinished_seqs():
                table = self.manager.block_tables[seq.seq_id]
                tokens = seq.get_token_ids()
                # A swapped sequence has left its prefix behind.
                on_cpu = seq.status is SequenceStatus.SWAPPED and group.prefix is not None
                skipped = len(group.prefix.token_ids) if on_cpu and group.prefix else 0
                first = max(skipped, 0 if self.window is None else len(tokens) - self.window)
                for position in range(first, len(tokens)):
                    block = table[(position - skipped) // self.block_size]
                    slots = self.memory[block.device, block.block_number]
                    assert slots[position % self.block_size] == tokens[position]


TestV0Walk = V0Walk.TestCase
TestV0Walk.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
