"""The laboratory: what it finds is what plain Python finds, request by request."""

import functools
import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import cli
from jaxpaged.memory import prefix_cache
from jaxpaged.research import lab
from jaxpaged.research.lab import belady, loop, sweep, traces
from jaxpaged.research.lab.combination import Combination
from reference import eviction
from reference.prompts import Prompts
from tests.lab.tracing import conversations, write
from tests.marks import slow_and_nightly


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return traces.read(write(tmp_path_factory.mktemp("lab") / "trace.jsonl", conversations()))


@functools.cache
def words(symbol):
    """Return the first word of the hash of a block of this symbol, at each index of a prompt, after the
    root's.
    """
    place = jnp.arange(-1, 64, dtype=jnp.int32)
    tokens = jnp.where(place < 0, loop.NO_SALT, symbol)[:, None]
    return np.asarray(prefix_cache.hash_block(tokens, place))[:, 0]


def name_of(symbols):
    """Return the number by which a policy remembers a prompt's beginning."""
    total = int(words(0)[0]) + sum(int(words(symbol)[1 + i]) for i, symbol in enumerate(symbols))
    return int(np.uint32(total % 2**32).astype(np.int32))


class Aged:
    """A policy that also notes how long content was there, in ms, when its block is taken."""

    def __init__(self, policy):
        self.policy, self.since, self.lives, self.now = policy, {}, [], 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def take(self):
        block = self.policy.take()
        if block in self.since:
            self.lives.append(self.now - self.since.pop(block))
        return block

    def publish(self, block, depth, content):
        self.since[block] = self.now
        self.policy.publish(block, depth, content)


def by_hand(trace, combination, partial=False, resident=1, lives=None, held=None, num_arrays=64):
    """Return the hit tokens of each request by the oracle; append to `held` what `watched` sees.

    `num_arrays` is the size of the compiled cache's arrays, in blocks.
    """
    cut = traces.blocks(trace, combination.block_size, partial=partial)
    usable = combination.cache_tokens and combination.cache_tokens // combination.block_size
    usable = usable or cut.num_distinct + resident * int(cut.num_held.max())
    more = {"greedy_dual": (combination.block_size,), "tinylfu": (2 * num_arrays,)}.get(
        combination.policy, ()
    )
    policy = eviction.POLICIES[combination.policy](usable + 1, *more)  # type: ignore[call-arg]
    names = name_of if combination.policy in ("s3fifo", "tinylfu") else lambda symbols: 0
    prompts = Prompts(policy, usable + 1, resident, names)
    hits, uses = [], belady.next_use(cut)
    if lives is not None:
        prompts.policy = Aged(policy)
    for r in range(trace.num_requests):
        if lives is not None:
            prompts.policy.now = round(1000 * trace.arrival_s[r])
        own = slice(cut.starts[r], cut.starts[r] + cut.num_findable[r])
        symbols = cut.symbols[own].tolist()
        most = min(int(cut.num_held[r]), usable)
        lookup = min(int(cut.num_lookup[r]), most)
        waiting = [
            cut.symbols[cut.starts[i] :][: min(int(cut.num_lookup[i]), usable)].tolist()
            for i in range(r + 1, min(r + 1 + sweep.NUM_WAITING, trace.num_requests))
        ]
        waiting += [[]] * (sweep.NUM_WAITING - len(waiting))
        hits.append(prompts.send(symbols[:most], lookup, most, uses[own].tolist()[:most], waiting))
        if held is not None:
            held.append(([[*row] for row in prompts.rows], sorted(prompts.node_of)))
    if lives is not None:
        lives += prompts.policy.lives
    return cut.hit_tokens(np.array(hits), trace.input_lens)


@pytest.mark.parametrize("partial", [False, True])
def test_hits_are_those_of_plain_python(trace, partial):
    """The sizes are such that prompts do not fit, that few do, and that nothing is ever evicted."""
    asked = [Combination("lru", 64, tokens) for tokens in (320, 1600, 6400, None)]
    results = [*sweep.sweep(trace, asked, warmup=0.25, partial=partial)]
    assert [each.combination for each in results] == asked
    sizes = [each.cache_tokens for each in asked]
    rows = lab.hit_rates(trace, cache_tokens=sizes, warmup=0.25, partial=partial)
    assert rows == [result.line() for result in results]
    for each, result in zip(asked, results, strict=True):
        lives: list[int] = []
        np.testing.assert_array_equal(result.hit_tokens, by_hand(trace, each, partial, lives=lives))
        for i, edge in enumerate(sweep.LIFETIME_EDGES_S):
            assert result.lifetimes[: i + 1].sum() == sum(life < 1000 * edge for life in lives)
    assert results[0].num_oversized > 0
    assert results[-1].num_oversized == 0
    rates = [result.hit_rate for result in results]
    assert rates == sorted(set(rates))


@pytest.fixture
def watched(monkeypatch):
    """Record, for each cache after each request, the blocks that each resident prompt holds, the oldest
    prompt first, and those with content. Blocks are numbered as if the cache had no others.
    """
    seen: dict[Combination, list[tuple[list[list[int]], list[int]]]] = {}
    current, send, replay = threading.local(), sweep.BlockTrace.send, loop.replay

    def noting_send(self, combination, **rest):
        current.seen, current.first = (
            seen.setdefault(combination, []),
            self.num_blocks - self.usable(combination),
        )
        return send(self, combination, **rest)

    def noting_replay(*args):
        cache, hits = replay(*args)
        tables, num_rows = jax.device_get(cache.tables), cache.tables.max_seqs
        rows = np.roll(np.arange(num_rows), -int(cache.next_row))
        ids = [tables.block_tables[row, : tables.seq_lens[row]] - current.first + 1 for row in rows]
        with_content = np.flatnonzero(tables.pool.prefix_cache.slot >= 0) - current.first + 1
        current.seen.append(([each.tolist() for each in ids], with_content.tolist()))
        return cache, hits

    monkeypatch.setattr(sweep.BlockTrace, "send", noting_send)
    monkeypatch.setattr(loop, "replay", noting_replay)
    monkeypatch.setattr(sweep, "REQUESTS_A_CALL", 1)
    return seen


# A program each: one with the ranked queue and the sketch, one with queues.
@pytest.mark.parametrize("policy", slow_and_nightly(eviction.POLICIES, ["tinylfu", "queue_lru"]))
def test_each_policy_takes_the_blocks_that_plain_python_does_with_three_prompts_at_a_time(
    trace, policy, watched
):
    """After each request: so each block that lost its content for another's is known by its number."""
    asked = [Combination(policy, 64, 64 * num_blocks) for num_blocks in (20, 30, 60)]
    for each, result in zip(asked, sweep.sweep(trace, asked, resident=3), strict=True):
        held: list[tuple[list[list[int]], list[int]]] = []
        np.testing.assert_array_equal(result.hit_tokens, by_hand(trace, each, resident=3, held=held))
        assert watched[each] == held


@pytest.mark.slow
def test_no_request_copies_what_is_of_the_pools_size():
    """Else a request costs what the pool is, and not what its prompt is."""
    num_blocks = 5003  # unlike every other size
    cache = jax.eval_shape(
        functools.partial(
            loop.create, policy=belady.named("sieve"), num_blocks=num_blocks, max_blocks=64, num_rows=1
        ),
        jnp.int32(9),
    )
    some = jax.ShapeDtypeStruct((16,), jnp.int32)
    compiled = loop.replay.lower(cache, some, None, loop.Requests(*[some] * 5)).compile()
    sizes = {each.shape[0] for each in jax.tree.leaves(cache) if each.ndim}
    copied = {int(size) for size in re.findall(r"= \w+\[(\d+)[\],]\S* copy\(", compiled.as_text())}
    assert not {size for size in sizes & copied if size >= num_blocks}


def test_the_command_prints_a_json_line_for_each_combination(tmp_path, capsys):
    file = write(tmp_path / "trace.jsonl", conversations())
    table = tmp_path / "table.csv"
    command = f"lab {file} --cache-tokens 1600,unbounded --warmup 0.25 --json --table {table}"
    assert cli.main(command.split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["policy"], line["block_size"], line["cache_tokens"]) for line in lines] == [
        ("lru", 64, 1600),
        ("lru", 64, None),
    ]
    for line in lines:
        expected = by_hand(traces.read(file), Combination("lru", line["block_size"], line["cache_tokens"]))
        assert line["num_requests"] == 150
        assert line["hit_tokens"] == expected[50:].sum()
        assert line["hit_rate"] == line["hit_tokens"] / line["input_tokens"]
    assert table.read_text() == lab.to_csv(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policies none", "policy='none' must be one of"),
        ("--policies lifo", "policy='lifo' must be one of"),
        ("--resident 0", "resident=0 must be an int from 1 to 1024"),
        ("--block-size x", "block_size='x' must be an int >= 1"),
        ("--cache-tokens 63", "cache_tokens=63 must be an int >= 64"),
        ("--table rates.xls", r"table='rates.xls' must be a file that ends in .csv or .md"),
        ("--warmup 1", r"warmup=1.0 must be in \[0, 1\)"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, options, message):
    file = write(tmp_path / "trace.jsonl", conversations(4))
    assert cli.main(["lab", file, *options.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)
