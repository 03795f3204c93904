"""Pins: prompts' beginnings that tiers keep for a time, with a bound for each client and for all.

The tiers keep blocks; a pin counts them. A client has at most half of what all have together. A block that is
pinned already costs nothing more, and its time is lengthened. Of a chain that does not fit the first blocks
are pinned.
"""

import collections
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged.api.async_llm import Admitted
from jaxpaged.engine.engine import Engine
from jaxpaged.routing import keys_of_tokens, salt_of
from jaxpaged.serve.metric_families import LABELS, single
from jaxpaged.tiers.host import KEPT_SHARE

ENDS = 64  # pins of one number of seconds end at no more than twice as many times
CLIENT_SHARE = 2  # one part in so many of all pins may be one client's


@dataclasses.dataclass(frozen=True)
class Span:
    """The first tokens of a prompt, and the seconds for which the tiers keep them."""

    num_tokens: int
    seconds: float


class Pins:
    """All pins of a server. For its event loop.

    max_tokens: of all pins together; 0 pins nothing.
    clock: tells seconds.
    """

    def __init__(self, max_tokens: int, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.block_size, self._clock = block_size, clock
        self._max_blocks = max_tokens // block_size
        # By client: the second at whose end a block is let go. By that second: the blocks.
        self._until: dict[Hashable, dict[bytes, int]] = {}
        self._ending: collections.defaultdict[int, set[tuple[Hashable, bytes]]] = collections.defaultdict(set)
        self._num_blocks = 0
        self.num_granted: Counter[float] = Counter()  # tokens pinned anew, by seconds
        self.num_refused = 0  # tokens beyond a bound

    @property
    def max_tokens(self) -> int:
        """Tokens that all pins together may have."""
        return self._max_blocks * self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that are pinned now."""
        self._let_go()
        return self._num_blocks * self.block_size

    def num_tokens_of(self, client: Hashable) -> int:
        """Return how many tokens one client has pinned now."""
        self._let_go()
        return len(self._until.get(client, ())) * self.block_size

    def keys_of(self, admitted: Admitted, spans: Sequence[Span]) -> list[bytes]:
        """Return a key for each full block of a prompt that the spans cover. Any thread may ask."""
        request = admitted.requests[0]
        adapter = None if request.adapter is None else str(request.adapter.number)
        longest = max((span.num_tokens for span in spans), default=0)
        salt = salt_of(request.cache_salt, adapter)
        return keys_of_tokens(request.prompt_token_ids[:longest], self.block_size, salt)

    def pin(
        self, client: Hashable, admitted: Admitted, spans: Sequence[Span], keys: Sequence[bytes]
    ) -> tuple[Admitted, list[Span]]:
        """Return a prompt whose spans are pinned as far as there is room, and these spans.

        keys: of `keys_of`. 0 seconds end a pin.
        """
        granted = []
        for span in sorted(spans, key=lambda span: span.num_tokens):
            num = self._take(client, keys[: span.num_tokens // self.block_size], span.seconds)
            granted.append(Span(num * self.block_size, span.seconds))
        kept = tuple((span.num_tokens, span.seconds) for span in granted)
        requests = [dataclasses.replace(each, kv_cache_ttl=kept) for each in admitted.requests]
        return Admitted(admitted.prompt, requests), granted

    def clear(self) -> None:
        """Forget all pins, as when the tiers forget all blocks."""
        self._until.clear()
        self._ending.clear()
        self._num_blocks = 0

    def _take(self, client: Hashable, keys: Sequence[bytes], seconds: float) -> int:
        """Take the blocks of a chain in. Return how many, from the first on."""
        self._let_go()
        if not seconds:
            for key in keys:
                if key in self._until.get(client, ()):
                    self._move(client, key, None)
            return len(keys)
        end = _end(self._clock() + seconds, seconds)
        for num, key in enumerate(keys):
            until = self._until.get(client, {})
            if key not in until:
                if self._num_blocks >= self._max_blocks or len(until) >= self._max_blocks // CLIENT_SHARE:
                    self.num_refused += (len(keys) - num) * self.block_size
                    return num
                self.num_granted[seconds] += self.block_size
                self._move(client, key, end)
            elif until[key] < end:
                self._move(client, key, end)
        return len(keys)

    def _move(self, client: Hashable, key: bytes, end: int | None) -> None:
        """Let a block's pin end at another second; None: now."""
        until = self._until.setdefault(client, {})
        before = until.pop(key, None)
        if before is not None:
            self._num_blocks -= 1
            self._ending[before].remove((client, key))
            if not self._ending[before]:
                del self._ending[before]
        if end is not None:
            self._num_blocks += 1
            until[key] = end
            self._ending[end].add((client, key))
        if not until:
            del self._until[client]

    def _let_go(self) -> None:
        """Forget the pins whose time is over."""
        now = self._clock()
        for end in [end for end in self._ending if end <= now]:
            for client, key in [*self._ending[end]]:
                self._move(client, key, None)


def _end(time_s: float, seconds: float) -> int:
    """Return the second at which a pin of so many seconds is let go: few pins have seconds of their own."""
    width = 2 ** max(0, math.frexp(seconds / ENDS)[1] - 1)
    return math.ceil(time_s / width) * width


def num_keepable(engine: Engine) -> int:
    """Return how many tokens the host memory of an engine's tiers keeps at most; 0 without tiers.

    A block of tokens has one block in each group of layers; states, of which few are stored, are not counted.
    """
    size_gib, size = engine.config.kv_offloading_size, engine.cache_size
    if size_gib is None or not engine.config.enable_prefix_caching:
        return 0
    num_bytes = int(size_gib * 2**30) // KEPT_SHARE
    num_groups = len(engine.door.step_config.grouping.groups_of_class(0))
    return num_bytes // max(size.bytes_by_class[0] * num_groups, 1) * size.block_size


class PinCollector(Collector):
    """Metrics of the pins."""

    def __init__(self, pins: Pins, labels: tuple[str, str]) -> None:
        self._pins, self._labels = pins, labels

    def collect(self) -> Iterator[Metric]:
        pins, labels = self._pins, self._labels
        for name, help_, value in (
            ("pinned_tokens", "Tokens of prompts that requests have the tiers keep now.", pins.num_tokens),
            ("pinned_tokens_limit", "Tokens that all requests together may have kept.", pins.max_tokens),
        ):
            yield single(GaugeMetricFamily, f"jaxpaged:{name}", help_, value, labels)
        granted = CounterMetricFamily(
            "jaxpaged:tokens_pinned", "Tokens pinned anew, by seconds.", labels=(*LABELS, "seconds")
        )
        for seconds, value in sorted(pins.num_granted.items()):
            granted.add_metric((*labels, f"{seconds:g}"), value)
        yield granted
        help_ = "Tokens not pinned because of a bound."
        yield single(CounterMetricFamily, "jaxpaged:tokens_not_pinned", help_, pins.num_refused, labels)
