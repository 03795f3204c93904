"""Engine small enough to read, with groups of layers, a tier, drafts and events: faults are planted in it.

Its model reads what the block tables lead it to, and nothing else: a wrong slot gives a wrong token.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from jaxpaged.research.verify.engines.contract import Answer, Ask

FULL, WINDOW, STATE = range(3)  # groups of layers: all tokens, the last few, and a recurrent state
SIZE, SEEN, VOCAB = 4, 6, 89  # tokens of a block, tokens that a window sees, ids
CHUNK, MAX_RUNNING, LOOKAHEAD = 8, 4, 2


def mix(*values: Any) -> int:
    """Return a number that depends on all values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big")


class Pool:
    """Blocks of all groups. A free block keeps its content until it is taken."""

    def __init__(self, num_blocks: int, engine: "Engine") -> None:
        self.free = OrderedDict.fromkeys(range(num_blocks))
        self.refs, self.keys = [0] * num_blocks, [None] * num_blocks
        self.found: dict[Any, list[int]] = {}
        self.engine = engine

    def take(self, number: int) -> list[int] | None:
        if number > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(number)]
        for block in taken:
            self.forget(block)
            self.refs[block] = 1
        return taken

    def forget(self, block: int) -> None:
        key, self.keys[block] = self.keys[block], None
        if key is None:
            return
        self.engine.offload(key, block)
        self.found[key].remove(block)
        if not self.found[key]:
            del self.found[key]
            self.engine.removed(key, "GPU")

    def hold(self, block: int) -> None:
        self.free.pop(block, None)
        self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None

    def publish(self, key: Any, block: int) -> bool:
        if self.keys[block] is not None:
            return False
        self.keys[block] = key
        self.found.setdefault(key, []).append(block)
        return len(self.found[key]) == 1


@dataclass(eq=False)
class Row:
    """A request under way."""

    ask: Ask
    tokens: list[int]
    computed: int = 0
    tables: list[list[int | None]] = field(default_factory=lambda: [[], [], []])
    state: int = 0
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    cached: int | None = None
    loads: list[tuple[int, Any, Any]] = field(default_factory=list)  # device blocks that the tier fills
    running: bool = False

    @property
    def num_out(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    def held(self) -> list[int]:
        return [block for table in self.tables for block in table if block is not None]


class Engine:
    """Engine and adapter of the judge in one."""

    token_ids = range(1, VOCAB + 1)
    serves = frozenset({"salt", "n", "abort", "adapter", "prompt_logprobs"})
    adapters = ("lora",)
    block_size, num_groups = SIZE, 3

    def __init__(self, num_blocks: int = 160, host_blocks: int = 60) -> None:
        self.size, self.num_blocks, self.host_blocks = num_blocks, num_blocks // 3, host_blocks
        self.reset()

    def reset(self) -> None:
        self.pool = Pool(self.size, self)
        self.slots: list[Any] = [[[None] * SIZE for _ in range(self.size)] for _ in range(2)]
        self.states: list[Any] = [None] * self.size
        self.host: OrderedDict[Any, Any] = OrderedDict()
        self.pins: dict[Any, int] = {}
        self.told: list[Any] = [AllBlocksCleared()]
        self.version, self.waiting, self.running = 0, [], []

    def update(self) -> None:
        self.version += 1
        for block in range(self.size):
            self.pool.keys[block] = None
        self.pool.found.clear()
        self.host.clear()
        self.told.append(AllBlocksCleared())

    def gauges(self) -> dict[str, float]:
        used = self.size - len(self.pool.free)
        waiting = len(self.waiting)
        return {
            "used": used,
            "running": len(self.running),
            "waiting": waiting,
            "pins": sum(self.pins.values()),
        }

    def events(self) -> list[Any]:
        told, self.told = self.told, []
        return told

    # The tier.

    def content(self, group: int, block: int) -> Any:
        return self.states[block] if group == STATE else list(self.slots[group][block])

    def offload(self, key: Any, block: int) -> None:
        if not self.host_blocks:
            return
        while len(self.host) >= self.host_blocks:
            oldest = next((each for each in self.host if not self.pins.get(each)), None)
            if oldest is None:
                return
            del self.host[oldest]
            self.removed(oldest, "CPU")
        is_new = key not in self.host
        self.host[key] = self.content(key[0], block)
        if is_new:
            self.stored(key, "CPU")

    def fill(self, row: Row) -> None:
        """Copy what comes from the tier into the row's blocks."""
        for block, key, content in row.loads:
            if key[0] == STATE:
                self.states[block] = content
            else:
                self.slots[key[0]][block][:] = content
            self.pins[key] -= 1
            if self.pool.publish(key, block):
                self.stored(key, "GPU")
        row.loads = []

    # Keys and events.

    def extra(self, ask: Ask, first: bool) -> tuple[str, ...]:
        salt = (("salt", ask.salt),) if first and ask.salt is not None else ()
        return (*((("adapter", ask.adapter),) if ask.adapter else ()), *salt)

    def key(self, group: int, ask: Ask, tokens: list[int], index: int) -> Any:
        """Return the key of a full block: group, number, parent's number, tokens, and what it has beside."""
        number, parent = None, None
        for i in range(index + 1):
            part, parent = tuple(tokens[i * SIZE : (i + 1) * SIZE]), number
            extra = self.extra(ask, i == 0)
            number = mix(parent, part, extra)
        return group, number, parent, part, extra

    def stored(self, key: Any, medium: str) -> None:
        group, number, parent, tokens, extra = key
        if group == FULL:
            names = tuple(value for _, value in extra) or None
            name = dict(extra).get("adapter")
            event = BlockStored(
                [number], parent, list(tokens), SIZE, medium=medium, lora_name=name, extra_keys=[names]
            )
            self.told.append(event)

    def removed(self, key: Any, medium: str) -> None:
        if key[0] == FULL:
            self.told.append(BlockRemoved([key[1]], medium=medium))

    # Look-up and admission.

    def has(self, key: Any) -> bool:
        return key in self.pool.found or key in self.host

    def hit(self, row: Row) -> int:
        """Return how many blocks all groups have."""
        if row.ask.prompt_logprobs:
            return 0
        keys = [
            [self.key(g, row.ask, row.tokens, i) for i in range((len(row.tokens) - 1) // SIZE)]
            for g in range(3)
        ]
        most = next((i for i, key in enumerate(keys[FULL]) if not self.has(key)), len(keys[FULL]))
        for blocks in range(most, 0, -1):
            first = max(0, blocks * SIZE - SEEN + 1) // SIZE
            has_window = all(self.has(key) for key in keys[WINDOW][first:blocks])
            if has_window and self.has(keys[STATE][blocks - 1]):
                return blocks
        return 0

    def admit(self, row: Row) -> bool:
        blocks = self.hit(row)
        need = -(-len(row.tokens) // SIZE)
        wanted: list[tuple[int, int, Any]] = []
        for group in range(3):
            first = {FULL: 0, WINDOW: max(0, blocks * SIZE - SEEN + 1) // SIZE, STATE: blocks - 1}[group]
            wanted += [
                (group, i, self.key(group, row.ask, row.tokens, i)) for i in range(max(first, 0), blocks)
            ]
        on_device = [(g, i, k) for g, i, k in wanted if k in self.pool.found]
        from_host = [(g, i, k) for g, i, k in wanted if k not in self.pool.found]
        for group in range(3):
            row.tables[group] = [None] * need
        for group, i, key in on_device:
            row.tables[group][i] = self.pool.found[key][0]
            self.pool.hold(row.tables[group][i])
        contents = {key: self.host[key] for _, _, key in from_host}
        new = [(g, i) for g in range(3) for i in range(blocks, need)]
        taken = self.pool.take(len(new) + len(from_host))
        if taken is None:
            self.pool.release(row.held())
            row.tables = [[], [], []]
            return False
        for group, i, key in from_host:
            row.tables[group][i] = block = taken.pop()
            row.loads.append((block, key, contents[key]))
            self.pins[key] = self.pins.get(key, 0) + 1
        for group, i in new:
            row.tables[group][i] = taken.pop()
        row.computed = blocks * SIZE
        if row.cached is None:
            row.cached = row.computed
        row.state = 0
        row.running = True
        return True

    # Steps.

    def room(self, row: Row, upto: int) -> bool:
        """Give a row blocks for its first `upto` tokens, and let the last row go where there are none."""
        while (need := -(-upto // SIZE) - len(row.tables[FULL])) > 0:
            taken = self.pool.take(3 * need)
            if taken is not None:
                for group in range(3):
                    row.tables[group] += [taken.pop() for _ in range(need)]
                return True
            last = self.running[-1]
            self.preempt(last)
            if last is row:
                return False
        return True

    def preempt(self, row: Row) -> None:
        self.finish(row)
        row.computed = 0
        self.waiting.insert(0, row)

    def finish(self, row: Row) -> None:
        if row.loads:
            self.fill(row)
        if row in self.running:
            self.running.remove(row)
        self.pool.release(row.held())
        row.tables, row.running = [[], [], []], False

    def step(self) -> None:
        while self.waiting and len(self.running) < MAX_RUNNING:
            if not self.admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
        for row in list(self.running):
            if not row.running:
                continue
            if row.loads and row.ask.abort_after == 0:
                self.finish(row)
                continue
            if row.loads:
                self.fill(row)
                continue
            num = min(CHUNK, len(row.tokens) - row.computed)
            if not self.room(row, row.computed + num + LOOKAHEAD):
                continue
            self.compute(row, num)
            self.publish(row)
            self.slide(row)
            if row.num_out >= row.ask.max_tokens or row.ask.abort_after in range(row.num_out + 1):
                self.finish(row)

    def compute(self, row: Row, num: int) -> None:
        value = 0
        if row.computed and row.state == 0:
            row.state = self.states[row.tables[STATE][row.computed // SIZE - 1]]
        for at in range(row.computed, row.computed + num):
            value = self.write(row, at, row.tokens[at])
            if row.ask.prompt_logprobs and at + 1 < len(row.ask.prompt) and len(row.prompt_logprobs) == at:
                row.prompt_logprobs.append(self.logprob(value, row.tokens[at + 1]))
        row.computed += num
        if row.computed < len(row.tokens):
            return
        self.append(row, value)
        for _ in range(LOOKAHEAD):
            if row.num_out >= row.ask.max_tokens or row.num_out == row.ask.abort_after:
                return
            token, at = row.tokens[-1], row.computed
            guess = token if mix(token, at) % 3 else token % VOCAB + 1
            before = row.state
            value = self.write(row, at, guess)
            if guess != token:
                row.state = before
                return
            row.computed += 1
            self.append(row, value)

    def append(self, row: Row, value: int) -> None:
        token = value % VOCAB + 1
        row.tokens.append(token)
        row.logprobs.append(self.logprob(value, token))

    def logprob(self, value: int, token: int) -> float:
        return -(mix(value, token) % 1000 + 1) / 100

    def write(self, row: Row, at: int, token: int) -> int:
        """Write a token's slots and return what the model reads behind it."""
        index, offset = divmod(at, SIZE)
        for group in (FULL, WINDOW):
            self.slots[group][row.tables[group][index]][offset] = token, at, row.ask.adapter, self.version
        row.state = mix(row.state, token, row.ask.adapter, self.version)
        if offset == SIZE - 1:
            self.states[row.tables[STATE][index]] = row.state
        seen = [self.slots[FULL][row.tables[FULL][p // SIZE]][p % SIZE] for p in range(at + 1)]
        last = range(max(0, at + 1 - SEEN), at + 1)
        seen += [self.slots[WINDOW][row.tables[WINDOW][p // SIZE]][p % SIZE] for p in last]
        return mix(seen, row.state)

    def publish(self, row: Row) -> None:
        for index in range(row.computed // SIZE):
            for group in range(3):
                block = row.tables[group][index]
                if block is None or self.pool.keys[block] is not None:
                    continue
                key = self.key(group, row.ask, row.tokens, index)
                if self.pool.publish(key, block):
                    self.stored(key, "GPU")

    def slide(self, row: Row) -> None:
        """Give back blocks of a window that no later token sees."""
        for index in range(max(0, row.computed - SEEN + 1) // SIZE):
            block, row.tables[WINDOW][index] = row.tables[WINDOW][index], None
            if block is not None:
                self.pool.release([block])

    # The adapter.

    def ask(self, asks: list[Ask]) -> list[Answer]:
        rows = [[Row(ask, list(ask.prompt)) for _ in range(ask.n)] for ask in asks]
        every = [row for each in rows for row in each if self.fits(row.ask)]
        self.waiting += every
        still = 0
        while self.waiting or self.running:
            before = [(len(row.tokens), row.computed, row.running, len(row.loads)) for row in every]
            self.step()
            now = [(len(row.tokens), row.computed, row.running, len(row.loads)) for row in every]
            still = still + 1 if now == before else 0
            if still > 20:
                raise RuntimeError("20 steps change nothing")
        return [self.answer(ask, each) for ask, each in zip(asks, rows, strict=True)]

    def fits(self, ask: Ask) -> bool:
        return 3 * -(-(len(ask.prompt) + ask.max_tokens + LOOKAHEAD) // SIZE) <= self.size

    def answer(self, ask: Ask, rows: list[Row]) -> Answer:
        start = len(ask.prompt)
        if not self.fits(ask):
            return Answer((), error=f"{start} tokens have no room")
        return Answer(
            tuple(tuple(row.tokens[start:]) for row in rows),
            tuple(tuple(row.logprobs) for row in rows),
            prompt_logprobs=tuple(rows[0].prompt_logprobs) if ask.prompt_logprobs else None,
            cached=rows[0].cached,
            num_prompt=start,
        )
