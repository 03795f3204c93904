"""Histories of requests: families of random ones, their text, and smaller ones for shrinking."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpaged.research.verify.engines.contract import Adapter, Token, serves

ANSWER = "answer"  # name of a part: the greedy answer to all parts before
type Part = tuple[str, int]  # a stream of tokens, and how many of its first


@dataclass(frozen=True)
class Request:
    """Request of a history, with its prompt as parts, so that it can be replayed with other tokens."""

    parts: tuple[Part, ...]
    max_tokens: int = 4
    salt: str | None = None
    adapter: str | None = None
    n: int = 1
    abort_after: int | None = None
    prompt_logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        prompt = " + ".join(f"{name}[:{length}]" for name, length in self.parts)
        more = {"salt": self.salt, "adapter": self.adapter, "leaves after": self.abort_after}
        words = [f"{name} {value!r}" for name, value in more.items() if value is not None]
        words += [f"n {self.n}"] * (self.n > 1) + ["prompt_logprobs"] * self.prompt_logprobs
        words += [f"{name}={value!r}" for name, value in self.options.items()]
        return ", ".join([prompt, f"max_tokens {self.max_tokens}", *words])


UPDATE: tuple[Request, ...] = ()  # a round without requests: the next version of the weights is loaded
type Round = tuple[Request, ...]
type History = tuple[Round, ...]


def lines(history: History) -> list[str]:
    """Return a history as text, a round a line."""
    return [" | ".join(map(str, each)) if each else "the next weights are loaded" for each in history]


def stream(token_ids: Sequence[Token], world: str, name: str, length: int) -> list[Token]:
    """Return the first tokens of a stream; another world has other tokens."""
    chosen = random.Random(f"{world} {name}")
    return [chosen.choice(token_ids) for _ in range(length)]


@dataclass
class Family:
    """Kind of histories: its name, the properties that an adapter needs, and a function that makes one."""

    name: str
    needs: tuple[str, ...]
    make: Callable[[random.Random, "Sizes"], History]


@dataclass(frozen=True)
class Sizes:
    """Sizes that histories are made for. `block` is a guess where the engine does not tell."""

    block: int
    num_tokens: int  # of the cache; 0: unknown
    longest: int
    adapters: tuple[str, ...] = ()
    can: frozenset[str] = frozenset()

    def length(self, of: random.Random, blocks: int = 5) -> int:
        """Return a length at or near an edge of a block."""
        return max(2, min(self.longest, of.randint(0, blocks) * self.block + of.choice((-1, 0, 0, 1, 2))))


def sizes_of(adapter: Adapter, longest: int) -> Sizes:
    """Return the sizes for an adapter; `longest`: tokens of a prompt at most."""
    block, blocks = getattr(adapter, "block_size", 0) or 0, getattr(adapter, "num_blocks", 0) or 0
    can = frozenset(w for w in ("salt", "n", "abort", "adapter", "prompt_logprobs") if serves(adapter, w))
    adapters = tuple(getattr(adapter, "adapters", ()))
    return Sizes(block or 16, block * blocks, longest, adapters, can)


def _warm(of: random.Random, sizes: Sizes) -> History:
    one = Request((("P", sizes.length(of)),), of.randint(1, 2 * sizes.block))
    if "prompt_logprobs" in sizes.can and of.random() < 0.3:
        one = replace(one, prompt_logprobs=True)
    return ((one,),) * of.randint(2, 3)


def _partly(of: random.Random, sizes: Sizes) -> History:
    """Make prompts that begin alike, and part at, before or behind an edge."""
    head = sizes.length(of)
    rounds = []
    for name in of.sample("ABCD", of.randint(2, 4)):
        cut = max(1, head - of.choice((0, 0, 1, sizes.block)))
        rounds.append((Request((("P", cut), (name, of.randint(1, sizes.block + 2))), of.randint(1, 6)),))
    return tuple(of.choice(rounds) for _ in range(of.randint(3, 6)))


def _conversation(of: random.Random, sizes: Sizes) -> History:
    parts: tuple[Part, ...] = (("P", sizes.length(of, 2)),)
    rounds = []
    for turn in range(of.randint(2, 4)):
        max_tokens = of.randint(1, sizes.block + 2)
        rounds.append((Request(parts, max_tokens),))
        parts = (*parts, (ANSWER, max_tokens), (f"turn{turn}", of.randint(1, sizes.block)))
    return (*rounds, rounds[of.randrange(len(rounds))])


def _pressure(of: random.Random, sizes: Sizes) -> History:
    """Fill the cache, so that earlier prompts are evicted, wholly or in part, and ask them again."""
    room = sizes.num_tokens or 16 * sizes.longest
    first, rounds, filled = Request((("P", sizes.length(of)),), of.randint(1, 6)), [], 0
    again = Request((*first.parts, ("S", of.randint(1, sizes.block + 1))), 3)
    rounds.append((first,))
    while filled < room and len(rounds) < 24:
        fill = Request(((f"F{len(rounds)}", min(sizes.longest, max(2, sizes.length(of, 8)))),), 1)
        rounds.append((fill,))
        filled += fill.parts[0][1]
        if of.random() < 0.2:
            rounds.append((of.choice((first, again)),))
    others = [Request(((f"G{i}", sizes.length(of, 8)),), 2) for i in range(of.randint(1, 3))]
    together = [of.choice((first, again)), *others, again]
    if "abort" in sizes.can and of.random() < 0.5:
        together[0] = replace(first, abort_after=0)
    of.shuffle(together)
    last = [(first,), (again,), tuple(together)]
    of.shuffle(last)
    return (*rounds, *last, (first,))


def _company(of: random.Random, sizes: Sizes) -> History:
    """Make requests together: the same, some that begin alike, long beside short, more than fit."""
    pool = [
        Request((("P", sizes.length(of)), (x, of.randint(1, 2 * sizes.block))), of.randint(1, 8))
        for x in "ABC"
    ]
    pool.append(Request((("L", sizes.longest - 8),), of.randint(1, 8)))
    pool.append(Request((("S", 2),), of.randint(1, 12)))
    rounds = tuple(tuple(of.choice(pool) for _ in range(of.randint(2, 6))) for _ in range(of.randint(1, 3)))
    return (*rounds, (of.choice(pool),))


def _crowd(of: random.Random, sizes: Sizes) -> History:
    """Ask prompts that fit together with answers that do not, so that some are preempted and resumed."""
    number = of.randint(3, 6)
    room = int(sizes.num_tokens * of.uniform(0.6, 1.8)) // number if sizes.num_tokens else sizes.longest
    length = max(2, min(room, sizes.longest) - of.randint(0, sizes.block))
    longest = max(5 * sizes.block, room)
    asks = tuple(Request(((f"C{i}", length),), of.randint(1, longest)) for i in range(number))
    return (asks, (asks[0],))


def _aborts(of: random.Random, sizes: Sizes) -> History:
    """Make clients that leave, alone and in company; then the same prompts, wholly."""
    asks = [
        Request((("P", sizes.length(of)), (x, of.randint(1, sizes.block))), of.randint(3, 12)) for x in "AB"
    ]
    rounds = []
    for _ in range(of.randint(1, 3)):
        gone = replace(of.choice(asks), abort_after=of.randint(0, 2))
        rounds.append((gone,) if of.random() < 0.5 else (gone, of.choice(asks)))
    return (*rounds, (asks[0],), (asks[1],))


def _answers(of: random.Random, sizes: Sizes) -> History:
    """Ask for several answers to one prompt, which must all be the greedy one."""
    many = Request((("P", sizes.length(of)),), of.randint(1, sizes.block + 2), n=of.randint(2, 4))
    return ((many,), (replace(many, n=1),), (many, replace(many, n=1)))


def _salts(of: random.Random, sizes: Sizes) -> History:
    """Make salts that look alike, and parts of a salt in the place of an adapter's name."""
    alike = of.choice(
        (("a", "b"), ("a", "A"), ("a", "a "), ("1", "01"), ("x" * 64 + "1", "x" * 64 + "2"), ("é", "e"))
    )
    one = Request((("P", sizes.length(of) + sizes.block),), 2)
    asks = [one, *(replace(one, salt=salt) for salt in alike)]
    for name in sizes.adapters:
        if "adapter" in sizes.can:
            asks += [
                replace(one, salt=name),
                replace(one, adapter=name),
                replace(one, adapter=name, salt=alike[0]),
            ]
            asks.append(replace(one, salt=name + alike[0]))
    return tuple((of.choice(asks),) for _ in range(of.randint(3, 7)))


def _many_salts(of: random.Random, sizes: Sizes) -> History:
    """Make so many salts that two agree in 16 bits, if a key keeps no more of them."""
    one = Request((("P", sizes.block + 1),), 1)
    number = of.randrange(1 << 30)
    return tuple((replace(one, salt=f"{number}-{i}"),) for i in range(700))


def _adapters(of: random.Random, sizes: Sizes) -> History:
    one = Request((("P", sizes.length(of) + sizes.block),), of.randint(1, 6))
    asks = [one, *(replace(one, adapter=name) for name in sizes.adapters)]
    return tuple((of.choice(asks),) for _ in range(of.randint(2, 5)))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"min_tokens": 1}, {"seed": 7}, {"stop": ["\u0000never"]},     {"user": "another"}, {"top_k": 1},
)  # fmt: skip


def _options(of: random.Random, sizes: Sizes) -> History:
    """Make options that must not split the cache: the second request finds what the first left."""
    one = Request((("P", sizes.length(of) + 2 * sizes.block),), 2)
    return ((one,), (replace(one, options=of.choice(OPTIONS)),), (one,))


def _updates(of: random.Random, sizes: Sizes) -> History:
    one = Request((("P", sizes.length(of) + sizes.block),), 3)
    return ((one,), UPDATE, (one,), *((UPDATE, (one,)) if of.random() < 0.5 else ()))


def _too_long(of: random.Random, sizes: Sizes) -> History:
    """Make a prompt that the cache cannot hold: it is refused, and holds nobody up behind it."""
    short = Request((("P", sizes.length(of)),), 2)
    return ((short,), (Request((("L", sizes.num_tokens + sizes.block),), 2), short), (short,))


def _mixed(of: random.Random, sizes: Sizes) -> History:
    """Mix rounds of all families, one behind another."""
    makes = [_warm, _partly, _conversation, _company]
    makes += [_aborts] * ("abort" in sizes.can) + [_answers] * ("n" in sizes.can)
    made = [of.choice(makes)(of, sizes) for _ in range(3)]
    rounds = [each for history in made for each in history]
    of.shuffle(rounds)
    return tuple(rounds[:10])


def _same(of: random.Random, sizes: Sizes) -> History:
    """Repeat one request twenty times."""
    return ((Request((("P", sizes.length(of)),), 8),),) * 20


FAMILIES = (
    Family("warm", (), _warm),
    Family("partly warm", (), _partly),
    Family("conversation", (), _conversation),
    Family("same", (), _same),
    Family("company", (), _company),
    Family("crowd", (), _crowd),
    Family("pressure", (), _pressure),
    Family("aborts", ("abort",), _aborts),
    Family("answers", ("n",), _answers),
    Family("salts", ("salt",), _salts),
    Family("adapters", ("adapter",), _adapters),
    Family("options", (), _options),
    Family("updates", ("update",), _updates),
    Family("too long", ("num_blocks",), _too_long),
    Family("mixed", (), _mixed),
    Family("many salts", ("salt",), _many_salts),
)


def smaller(history: History) -> Iterator[History]:
    """Yield histories that are a little smaller: fewer rounds, fewer requests, then simpler ones."""
    size = len(history) // 2
    while size:
        for at in range(0, len(history) - size + 1, size):
            yield history[:at] + history[at + size :]
        size //= 2
    for at, each in enumerate(history):
        for i in range(len(each) if len(each) > 1 else 0):
            yield (*history[:at], each[:i] + each[i + 1 :], *history[at + 1 :])
    names = dict.fromkeys(name for each in history for request in each for name, _ in request.parts)
    for name in names:
        longest = max(n for each in history for r in each for of, n in r.parts if of == name)
        for max_length in sorted({1, longest // 2, longest - 1} - {0, longest}):
            yield tuple(tuple(_cut(request, name, max_length) for request in each) for each in history)
    for at, each in enumerate(history):
        for i, request in enumerate(each):
            for simpler in _simpler(request):
                yield (*history[:at], (*each[:i], simpler, *each[i + 1 :]), *history[at + 1 :])


def _cut(request: Request, name: str, max_length: int) -> Request:
    parts = tuple((of, min(length, max_length) if of == name else length) for of, length in request.parts)
    return replace(request, parts=parts)


def _simpler(request: Request) -> Iterator[Request]:
    if request.options:
        yield replace(request, options={})
    plain_values: dict[str, Any] = {"n": 1, "salt": None, "abort_after": None, "prompt_logprobs": False}
    for name, plain in plain_values.items():
        if getattr(request, name) != plain:
            yield replace(request, **{name: plain})
    for fewer in sorted({1, request.max_tokens // 2, request.max_tokens - 1}):
        if 0 < fewer < request.max_tokens:
            yield replace(request, max_tokens=fewer)
    for i, (name, length) in enumerate(request.parts):
        rest = request.parts[:i] + request.parts[i + 1 :]
        if rest and rest[0][0] != ANSWER:
            yield replace(request, parts=rest)
        for shorter in sorted({length // 2, length - 1}):
            if 0 < shorter < length:
                yield replace(request, parts=(*request.parts[:i], (name, shorter), *request.parts[i + 1 :]))
