"""Faults of public cache managers, planted in the small engine: lines of it, and what replaces them."""

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOUND = Path(__file__).parent / "sound" / "engine.py"


@dataclass(frozen=True)
class Fault:
    """Fault: its number in the list of public faults, what it is, by which property it must be found."""

    number: int
    name: str
    found_by: str  # properties, one of which tells it at first
    changes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def planted(fault: Fault | None) -> Any:
    """Return the small engine with a fault in it."""
    text = SOUND.read_text()
    for right, wrong in () if fault is None else fault.changes:
        assert text.count(right) == 1, f"{fault}: {right!r} is there {text.count(right)} times"
        text = text.replace(right, wrong)
    module = types.ModuleType("planted_engine")
    sys.modules[module.__name__] = module
    exec(compile(text, str(SOUND), "exec"), module.__dict__)
    return module.Engine()


def _fault(number: int, name: str, found_by: str, *changes: str) -> Fault:
    return Fault(number, name, found_by, tuple(zip(changes[::2], changes[1::2], strict=True)))


LOADED = "            row.loads.append((block, key, contents[key]))\n"
RELEASE_SLID = """            if block is not None:
                self.pool.release([block])
"""
FORGET_ALL = """        for block in range(self.size):
            self.pool.keys[block] = None
        self.pool.found.clear()
"""
WITH_BLOCK = "                if block is None or self.pool.keys[block] is not None"
SPARSE = f"{WITH_BLOCK}:\n", f"{WITH_BLOCK} or group == STATE and index % 2:\n"
FAULTS = (
    _fault(
        1,
        "drafts at an edge go to a stale block",
        "lifetime reuse",
        "row.computed + num + LOOKAHEAD)",
        "row.computed + num)",
        "range(row.computed // SIZE)",
        "range(min(row.computed // SIZE, len(row.tables[FULL])))",
        "index, offset = divmod(at, SIZE)",
        "index, offset = min(at // SIZE, len(row.tables[0]) - 1), at % SIZE",
    ),
    _fault(
        2,
        "a window keeps only the blocks that its end needs",
        "hits",
        RELEASE_SLID,
        RELEASE_SLID.replace("self.pool.release", "self.pool.forget(block) or self.pool.release"),
        "host_blocks: int = 60",
        "host_blocks: int = 0",
    ),
    _fault(
        3,
        "removed is told though a copy lives",
        "events",
        '            self.engine.removed(key, "GPU")',
        '        self.engine.removed(key, "GPU")',
    ),
    _fault(
        4,
        "parts are advertised that are fetched whole",
        "hits",
        "                return blocks\n",
        "                return blocks // 3 * 3\n",
    ),
    _fault(
        5,
        "a slot's state is of other tokens than its key says",
        "reuse",
        "        if offset == SIZE - 1:\n",
        "        if offset == SIZE - 1 and self.states[row.tables[STATE][index]] is None:\n",
    ),
    _fault(
        6,
        "the state before is kept where drafts end on an edge",
        "reuse",
        "            row.computed += 1\n",
        "            row.computed += 1\n            if row.computed % SIZE == 0:\n"
        "                self.states[row.tables[STATE][row.computed // SIZE - 1]] = before\n",
    ),
    _fault(
        7,
        "one block is dropped, and another's state is kept",
        "hits",
        "range(most, 0, -1)",
        "range(most - 1, 0, -1)",
        "                key = self.key(group, row.ask, row.tokens, index)\n",
        "                if group == STATE and index != (len(row.ask.prompt) - 1) // SIZE - 1:\n"
        "                    continue\n                key = self.key(group, row.ask, row.tokens, index)\n",
    ),
    _fault(
        8,
        "full layers hit, the state misses, and it recurs from nothing",
        "reuse",
        "if has_window and self.has(keys[STATE][blocks - 1]):",
        "if has_window:",
        "{key: self.host[key] for",
        "{key: self.host.get(key, 1) for",
        "self.states[block] = content\n",
        "self.states[block] = content or 1\n",
        *SPARSE,
    ),
    _fault(
        9,
        "a state that is missing at the end makes all groups miss",
        "hits",
        "range(most, 0, -1)",
        "range(most, most and most - 1, -1)",
        *SPARSE,
    ),
    _fault(
        10,
        "a state's slot by another group's block size",
        "determinism reuse",
        "row.state = self.states[row.tables[STATE][row.computed // SIZE - 1]]",
        "row.state = self.states[row.tables[STATE][row.computed // (2 * SIZE)] or 0] or 0",
    ),
    _fault(
        11,
        "a block is cached whose state covers only a part",
        "reuse",
        "        if offset == SIZE - 1:\n",
        "        if offset == SIZE - 2:\n",
    ),
    _fault(
        12,
        "a hit of a token less, with the state of all",
        "reuse",
        "row.computed = blocks * SIZE\n",
        "row.computed = max(0, blocks * SIZE - 1)\n",
        "row.tables[STATE][row.computed // SIZE - 1]",
        "row.tables[STATE][-(-row.computed // SIZE) - 1]",
    ),
    _fault(
        13,
        "a salt is taken for an adapter's name",
        "events partition reuse",
        '(("salt", ask.salt),)',
        '(("adapter", ask.salt),)',
        "names = tuple(value for _, value in extra) or None",
        "names = None",
    ),
    _fault(
        16,
        "keys of half a block stand for whole blocks",
        "events reuse",
        "part, parent = tuple(tokens[i * SIZE : (i + 1) * SIZE]), number",
        "part, parent = tuple(tokens[i * SIZE : (i + 1) * SIZE][: SIZE // 2]) * 2, number",
    ),
    _fault(
        18,
        "blocks are free while a step still writes",
        "reuse",
        "        if row in self.running:\n",
        "        self.late = [row.tables[FULL][-2:]]\n        if row in self.running:\n",
        "        for row in list(self.running):\n",
        "        for blocks in getattr(self, 'late', []):\n"
        "            for block in filter(None, blocks):\n"
        "                self.slots[FULL][block][-1] = (1, 0, None, 0)\n"
        "        self.late = []\n        for row in list(self.running):\n",
    ),
    _fault(
        19,
        "a window's blocks are freed by scheduled tokens",
        "determinism reuse hits",
        "max(0, row.computed - SEEN + 1) // SIZE",
        "max(0, row.computed + CHUNK - SEEN + 1) // SIZE",
        "            block, row.tables[WINDOW][index] = row.tables[WINDOW][index], None\n",
        "            if index >= len(row.tables[WINDOW]):\n                break\n"
        "            block, row.tables[WINDOW][index] = row.tables[WINDOW][index], None\n"
        "            row.kept = getattr(row, 'kept', {}) | ({} if block is None else {index: block})\n",
        "seen += [self.slots[WINDOW][row.tables[WINDOW][p // SIZE]][p % SIZE] for p in last]",
        "kept = getattr(row, 'kept', {})\n"
        "        window = row.tables[WINDOW]\n"
        "        at_index = lambda i: kept.get(i) if window[i] is None else window[i]\n"
        "        seen += [self.slots[WINDOW][at_index(p // SIZE)][p % SIZE] for p in last]",
        "self.slots[group][row.tables[group][index]][offset] =",
        "self.slots[group][row.tables[group][index] or getattr(row, 'kept', {}).get(index, 0)][offset] =",
    ),
    _fault(
        20,
        "preemption frees nothing",
        "lifetime",
        "        self.finish(row)\n        row.computed = 0\n",
        "        self.running.remove(row)\n        row.running, row.computed = False, 0\n",
    ),
    _fault(
        21,
        "two requests reserve a part each, and wait for the rest",
        "lifetime",
        "            self.preempt(last)\n            if last is row:\n                return False\n",
        "            return last is None\n",
    ),
    _fault(
        22,
        "a prompt longer than the pool waits for ever",
        "lifetime",
        "        if not self.fits(ask):\n",
        "        if False:\n",
        " for row in each if self.fits(row.ask)]",
        " for row in each]",
    ),
    _fault(
        23,
        "a block is listed twice in one free",
        "lifetime",
        "        self.pool.release(row.held())\n        row.tables, row.running",
        "        self.pool.release(row.held() + row.held()[-1:])\n        row.tables, row.running",
    ),
    _fault(
        24,
        "a block is stored before it is computed",
        "reuse",
        "            row.tables[group][i] = taken.pop()\n        row.computed",
        "            row.tables[group][i] = taken.pop()\n"
        "            if (i + 1) * SIZE <= len(row.tokens):\n"
        "                key = self.key(group, row.ask, row.tokens, i)\n"
        "                self.host.setdefault(key, self.content(group, row.tables[group][i]))\n"
        "        row.computed",
        "        self.host[key] = self.content(key[0], block)\n",
        "        self.host.setdefault(key, self.content(key[0], block))\n",
    ),
    _fault(
        25,
        "the block that fills at the end is never stored",
        "hits",
        "range(row.computed // SIZE)",
        "range(min(row.computed, len(row.ask.prompt)) // SIZE)",
    ),
    _fault(
        26,
        "a live transfer's block is given away",
        "reuse",
        "else list(self.slots[group][block])",
        "else self.slots[group][block]",
    ),
    _fault(
        27,
        "what is not loaded yet is published",
        "events reuse",
        LOADED,
        LOADED + "            self.pool.publish(key, block)\n",
        "            if row.loads:\n                self.fill(row)\n                continue\n",
        "            if row.loads and not getattr(row, 'late', False):\n                row.late = True\n"
        "                continue\n            if row.loads:\n"
        "                self.fill(row)\n                continue\n",
    ),
    _fault(
        28,
        "a refused load is taken for one that came",
        "reuse",
        "                self.slots[key[0]][block][:] = content\n",
        "                self.slots[key[0]][block][:] = (\n"
        "                    content if key[1] % 3 else self.slots[key[0]][block]\n                )\n",
    ),
    _fault(
        29,
        "an aborted load is never freed",
        "lifetime",
        "        if row.loads:\n            self.fill(row)\n        if row in",
        "        if row in",
    ),
    _fault(
        30,
        "a state by the request's place in its part of the batch",
        "reuse lifetime",
        "row.state = self.states[row.tables[STATE]",
        "row.state = self.states[self.running[0].tables[STATE]",
    ),
    _fault(
        32,
        "blocks leak where admission fails",
        "lifetime",
        "            self.pool.release(row.held())\n            row.tables",
        "            self.pool.release([b for b in row.tables[FULL] if b is not None])\n"
        "            row.tables",
    ),
    _fault(
        33,
        "a stale map frees a live slot",
        "lifetime",
        "row.tables[WINDOW][index] = row.tables[WINDOW][index], None",
        "_ = row.tables[WINDOW][index], None",
    ),
    _fault(
        36,
        "an anchor on the host is evicted while it is loaded",
        "reuse",
        "if not self.pins.get(each)",
        "if True",
        "        for block, key, content in row.loads:\n",
        "        for block, key, content in row.loads:\n"
        "            content = self.host.get(key, [None] * SIZE)\n",
    ),
    _fault(
        37,
        "blocks are read before their copy arrived",
        "reuse",
        "            if row.loads:\n                self.fill(row)\n                continue\n",
        "",
        "            self.publish(row)\n",
        "            self.publish(row)\n            self.fill(row)\n",
    ),
    _fault(
        38,
        "a failed store stays visible",
        "reuse",
        "        self.host[key] = self.content(key[0], block)\n",
        "        failed = 0 if key[0] else [None] * SIZE\n"
        "        self.host[key] = self.content(key[0], block) if key[1] % 3 else failed\n",
        "self.slots[key[0]][block][:] = content",
        "self.slots[key[0]][block][:] = content or [None] * SIZE",
    ),
    _fault(
        39,
        "evicted between look-up and fetch",
        "lifetime",
        "        contents = {key: self.host[key] for _, _, key in from_host}\n",
        "",
        "contents[key]",
        "self.host[key]",
    ),
    _fault(
        40,
        "a salt's hash is cut to 16 bits",
        "partition",
        '(("salt", ask.salt),)',
        '(("salt", str(mix(ask.salt) % 65536)),)',
        "    def events(self)",
        "    def unheard(self)",
        "num_blocks: int = 160",
        "num_blocks: int = 4000",
    ),
    _fault(
        41,
        "a block is read in another layout",
        "reuse",
        "self.slots[key[0]][block][:] = content",
        "self.slots[key[0]][block][:] = content[::-1]",
    ),
    _fault(42, "prefixes outlive an update of the weights", "reuse partition", FORGET_ALL, ""),
    _fault(
        43,
        "a copy lands in another layer's slots",
        "reuse",
        "self.slots[key[0]][block][:] = content",
        "self.slots[FULL][block][:] = content",
    ),
    _fault(
        44,
        "log-probabilities of cached positions from an empty buffer",
        "reuse",
        "        if row.ask.prompt_logprobs:\n            return 0\n",
        "",
        "        row.computed = blocks * SIZE\n",
        "        row.computed = blocks * SIZE\n        row.prompt_logprobs = [0.0] * row.computed\n",
    ),
    _fault(
        46,
        "hits only at a common multiple of many blocks",
        "hits",
        "                return blocks\n",
        "                return blocks // 8 * 8\n",
    ),
)
