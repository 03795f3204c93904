"""Pins and turns by themselves: bounds, times, and what is forgotten."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from jaxpaged.api.async_llm import Admitted
from jaxpaged.serve.messages import _shared, _written_by_seconds, with_pings
from jaxpaged.serve.pins import PinCollector, Pins, Span
from jaxpaged.serve.turns import Fingerprint, Turn, TurnCollector, Turns, rejoined, text_digest
from tests.tiers.test_engines import Clock

BLOCK = 8


@dataclasses.dataclass(frozen=True)
class Asked:
    """Request with the fields that pins read."""

    prompt_token_ids: np.ndarray
    cache_salt: str | None = None
    adapter: None = None
    kv_cache_ttl: tuple[tuple[int, float], ...] | None = None


def samples(collector):
    return {
        (sample.name, sample.labels.get("seconds")): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_pins_are_bounded_for_a_client_and_for_all():
    clock = Clock()
    clock.now = 0.0
    pins = Pins(20 * BLOCK, BLOCK, clock)

    def pin(client, begin, size, *spans, salt=None):
        tokens = np.arange(begin, begin + size, dtype=np.int32)
        admitted = Admitted(None, [Asked(tokens, salt), Asked(tokens, salt)])
        asked = [Span(*span) for span in spans]
        kept, granted = pins.pin(client, admitted, asked, pins.keys_of(admitted, asked))
        told = [tuple(dataclasses.astuple(span)) for span in granted]
        assert [each.kv_cache_ttl for each in kept.requests] == [tuple(told)] * 2
        return told

    assert pin("a", 0, 60, (60, 300), (20, 3600)) == [(16, 3600), (56, 300)]
    assert pin("a", 0, 60, (60, 100)) == [(56, 100)], "costs nothing more"
    assert (pins.num_tokens, pins.num_tokens_of("a")) == (56, 56)
    assert pin("a", 1000, 80, (80, 300)) == [(24, 300)], "half of all is one client's"
    assert pin("b", 1000, 800, (800, 300)) == [(80, 300)]
    assert pin("c", 1000, 80, (80, 300)) == [(0, 300)]
    assert samples(PinCollector(pins, ("tiny", "0"))) == {
        ("jaxpaged:pinned_tokens", None): 160,
        ("jaxpaged:pinned_tokens_limit", None): 160,
        ("jaxpaged:tokens_pinned_total", "300"): 40 + 24 + 80,
        ("jaxpaged:tokens_pinned_total", "3600"): 16,
        ("jaxpaged:tokens_not_pinned_total", None): 56 + 720 + 80,
    }
    assert pin("b", 1000, 80, (80, 0)) == [(80, 0)], "0 seconds end a pin"
    assert pin("c", 1000, 40, (40, 301), salt="x") == [(40, 301)]
    clock.now = 300
    assert (pins.num_tokens_of("a"), pins.num_tokens_of("c")) == (16, 40)
    clock.now = 3616  # seconds are rounded up, by a part in 64 at most
    assert pins.num_tokens == 0
    assert pin("a", 0, 16, (16, 5)) == [(16, 5)]
    pins.clear()
    assert pins.num_tokens == 0
    assert Pins(0, BLOCK, clock).max_tokens == 0


def print_of(contents, scope="s"):
    return Fingerprint.of(scope, "m", None, [{"role": "user", "content": content} for content in contents])


def turn_of(name, contents, tokens, scope="s", **more):
    return Turn(name, print_of(contents, scope).brief, np.asarray(tokens, np.int32), len(tokens) - 1, **more)


def test_a_turn_is_known_by_its_messages_or_its_name_within_a_scope():
    turns = Turns(max_turns=4, max_tokens=100)
    first, second = turn_of("1", "a", range(20)), turn_of("2", "abc", range(40))
    turns.add(first)
    turns.add(second, first)
    assert turns.before(print_of("abcd")) is second
    assert turns.before(print_of("abc")) is first, "not the request itself"
    assert turns.before(print_of("ax")) is first
    assert turns.before(print_of("xa")) is None
    assert turns.before(print_of("xa"), "2") is second
    other = print_of("ax", "t")
    assert turns.before(other) is turns.before(other, "1") is None
    turns.add(turn_of("3", "q", range(30), scope="t"))
    turns.add(turn_of("2", "abcde", range(41)), second)
    assert (len(turns), turns.num_tokens) == (3, 91), "a name is one turn's"
    turns.add(turn_of("4", "z", range(10)))
    assert turns.before(print_of("ax")) is None, "the oldest of who has most"
    assert (len(turns), turns.num_tokens) == (3, 81)
    for i in range(5, 9):
        turns.add(turn_of(str(i), "z", range(1)))
    assert len(turns) == 4
    turns.add(turn_of("9", "z", range(101)))
    assert turns.num_tokens <= 100


@pytest.mark.parametrize(
    ("contents", "tokens", "want"),
    [
        ("abcd", [*range(40)], None),
        ("abcd", [*range(39)], None),
        ("abcd", [*range(20), 99], ("template", 20, 16)),
        ("xbcd", [*range(20), 99], ("messages", 20, 16)),
        ("ab", [*range(8)], ("messages", 8, 24)),
    ],
)
def test_a_prompt_leaves_the_turn_before_it_at_a_token(contents, tokens, want):
    turns, turn, now = Turns(), turn_of("1", "abc", range(40)), print_of(contents)
    said = turns.compare(turn, now, np.asarray(tokens, np.int32), BLOCK)
    assert (said and (said.changed, said.token, said.num_missed_tokens)) == want
    missed = 0 if want is None else want[2]
    name = "jaxpaged:session_"
    assert samples(TurnCollector(turns, ("tiny", "0"))) == {
        (f"{name}turns_total", None): 1,
        (f"{name}turns_rewritten_total", None): int(want is not None),
        (f"{name}missed_tokens_total", None): missed,
    }
    tools = Fingerprint.of("s", "m", [{"name": "f"}], [])
    assert turns.compare(turn, tools, np.zeros(1, np.int32), BLOCK).changed == "tools"


def test_a_prompt_gets_tokens_as_they_were_written():
    """A letter is a token, and "ab" is one, too: 99."""

    async def cut(text):
        return [99 if part == "ab" else ord(part) for part in re.findall("ab|.", text)]

    def ask(written, text, later):
        ids = [*map(ord, written)]
        turn = turn_of("1", "x", [*ids, 0], text_size=len(text), text_digest=text_digest(text))
        turn = dataclasses.replace(turn, num_text_tokens=len(ids))
        return asyncio.run(rejoined(turn, later, asyncio.run(cut(later)), cut))

    letters = [ord("a"), ord("b")]
    assert ask("ab", "ab", "abc") == [*letters, ord("c")]
    assert ask("ab", "ab", "ab") == letters
    assert ask("c", "c", "cab") is None, "has them already"
    assert ask("ab", "ab", "xab") is None
    assert ask("ab", "ab", "a") is None
    assert ask("cca", "cca", "ccab") is None, "no token ends there"
    assert asyncio.run(rejoined(turn_of("1", "x", [0]), "", [], cut)) is None


def test_pings_fill_silence():
    async def events():
        yield b"1"
        await asyncio.sleep(0.05)
        yield b"2"

    async def run(**more):
        return [each async for each in with_pings(events(), **more)]

    assert asyncio.run(run()) == [b"1", b"2"]
    filled = asyncio.run(run(silence_s=0.01))
    assert (filled[0], filled[-1]) == (b"1", b"2")
    assert set(filled[1:-1]) == {b'event: ping\ndata: {"type":"ping"}\n\n'}


def test_tokens_written_are_kept_for_the_longest_time_asked_for():
    spans = [Span(64, 300), Span(24, 3600), Span(16, 7)]
    assert _written_by_seconds(spans, 0, 80) == {3600: 24, 300: 40}
    assert _written_by_seconds(spans, 32, 48) == {300: 16}
    assert _written_by_seconds([], 0, 8) == {}
    assert _shared("abcd", "abxd") == "ab"
    assert _shared("ab", "abc") == "ab"
    assert _shared("", "abc") == ""
