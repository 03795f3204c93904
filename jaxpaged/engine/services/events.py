"""Events of an engine: after each run it looks what the prefix cache has changed, and tells who follows.

An engine without `kv_events_config` has none, and its compiled loop is the same with and without.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged.config import EngineConfig
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_queue import Queued
from jaxpaged.engine.services.service import Service
from jaxpaged.handover import programs
from jaxpaged.kv_events.messages import Event
from jaxpaged.kv_events.publisher import Publisher
from jaxpaged.kv_events.tier_mirror import TierMirror
from jaxpaged.kv_events.tree import GroupKind, Label, Tree
from jaxpaged.memory.cache_specs import ChunkedLocal, FullAttention, SlidingWindow
from jaxpaged.step.state import EngineState

MOST_CHANGES = 1024  # in one report

type Listener = Callable[[int, Sequence[Event]], None]  # is told a replica's number, and its events


class Events(Service):
    """Events of all replicas of an engine, for its thread. Raises `InputError` where they cannot be sent.

    look: lets the devices of all processes look once more. Of several processes only the first one tells.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[Any],
        state: EngineState,
        listen: Listener,
        look: Callable[[], None],
        mesh: Mesh | None,
    ) -> None:
        assert config.kv_events_config is not None
        kinds, self._num_replicas = [_kind_of(spec) for spec in specs], config.data_parallel_size
        self.trees = [Tree(config.block_size, kinds) for _ in range(self._num_replicas)]
        self._mesh, self._listen, self._look_again = mesh, listen, look
        self._tells = config.process_id == 0
        self._publishers, options = [], config.kv_events_config
        try:
            for rank in range(self._num_replicas if self._tells and options.publisher == "zmq" else 0):
                self._publishers.append(Publisher(options, rank))
        except ValueError:
            self.close()
            raise
        self.tiers: TierMirror | None = None  # of what lies below the device
        self._told = programs.nothing_told(state.tables.pool.prefix_cache, mesh=mesh)
        self._unread: collections.deque[Any] = collections.deque()
        self.look(state)  # compiles
        if self._tells:  # nothing is there yet
            self._take(jax.device_get(self._unread.popleft()))

    def takes_for_row(self, together: Sequence[Queued]) -> bool:
        """Note what the number for a request's salt stands for, before it runs. Take none."""
        request = together[0].request
        self.name_salt(request.salt, label_of(request))
        return False

    def name_salt(self, number: int, label: Label) -> None:
        """Note what a number for a salt stands for."""
        for rank, tree in enumerate(self.trees):
            self._tell(rank, tree.name_salt(number, label))

    def look(self, state: EngineState) -> None:
        """Let the device report what has changed up to this state. Waits for nothing."""
        cache = state.tables.pool.prefix_cache
        self._told, changes = programs.tell_changes(cache, self._told, most=MOST_CHANGES, mesh=self._mesh)
        if self._tells:
            self._unread.append(changes)

    def after_report(self) -> None:
        """Read the report of changes that is unread for longest, and tell what it says.

        What did not fit is reported from the newest state if no other report is under way.
        """
        is_whole = not self._tells
        while not is_whole:
            is_whole = self._take(jax.device_get(self._unread.popleft())) or bool(self._unread)
            if not is_whole:
                self._look_again()

    def tell(self, state: EngineState) -> None:
        """Tell now what has changed up to this state."""
        self.look(state)
        while self._unread:
            self.after_report()

    def forget_all(self, state: EngineState) -> None:
        """Tell that nothing is cached any more: of this state, that is so."""
        for rank, tree in enumerate(self.trees):
            self._tell(rank, tree.forget())
        if self.tiers is not None:  # who follows has forgotten them, too
            self._tell(0, self.tiers.retold())
        self.tell(state)

    def tell_tiers(self) -> None:
        """Tell what has changed in the tiers."""
        if self.tiers is not None:
            self._tell(0, self.tiers.events())

    def close(self) -> None:
        """Close all sockets."""
        for publisher in self._publishers:
            publisher.close()
        self._publishers = []

    def _take(self, changes: Any) -> bool:
        """Take over a report, and tell whether all changes were in it."""
        if self._num_replicas == 1:
            changes = jax.tree.map(lambda x: x[None], changes)
        is_whole = True
        for rank, tree in enumerate(self.trees):
            of_rank = jax.tree.map(lambda x, rank=rank: np.asarray(x)[rank], changes)
            count = min(int(of_rank.num_changed), len(of_rank.slot))
            is_whole &= count == of_rank.num_changed
            events = tree.apply(
                of_rank.slot[:count],
                of_rank.generation[:count],
                of_rank.is_there[:count],
                of_rank.parent[:count],
                of_rank.token_ids[:count],
            )
            self._tell(rank, events)
        return is_whole

    def _tell(self, rank: int, events: Sequence[Event]) -> None:
        if not events:
            return
        self._listen(rank, events)
        if self._publishers:
            self._publishers[rank].publish(events)


def label_of(request: Request) -> Label:
    """Return the label of a request's blocks: its adapter's id and name, and its cache salt."""
    adapter = None if request.adapter is None else request.adapter.request
    name = (None, None) if adapter is None else (adapter.lora_int_id, adapter.lora_name)
    return Label(request.cache_salt, *name)


def _kind_of(spec: Any) -> GroupKind:
    """Return what messages tell of a group of layers, in vLLM's words; nothing of other kinds."""
    match spec:
        case FullAttention():
            return GroupKind("full_attention")
        case SlidingWindow():
            return GroupKind("sliding_window", spec.window)
        case ChunkedLocal():
            return GroupKind("chunked_local_attention")
    return GroupKind()
