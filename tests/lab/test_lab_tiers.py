"""Tiers in the laboratory: what they give is what plain Python gives."""

import json
import re

import pytest

from jaxpaged import cli
from jaxpaged.research.lab import traces
from jaxpaged.research.lab.combination import Combination
from reference import tiers as oracle
from tests.lab.test_lab import by_hand
from tests.lab.tracing import conversations, write

KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token of Llama 3.1 8B


def plain(trace, stores, first):
    """Return hit blocks by tier and blocks that were stored, of the requests from `first` on."""
    cut = traces.blocks(trace, 64, partial=False)
    on_device = by_hand(trace, Combination("lru", 64, 1600)) // 64
    hits, stored = [0] * (1 + len(stores)), 0
    for r, start in enumerate(cut.starts.tolist()):
        symbols = cut.symbols[start : start + int(cut.num_findable[r])].tolist()
        all_keys = [(None, None, None, (symbol,)) for symbol in symbols]
        wanted, here = all_keys[: int(cut.num_lookup[r])], int(on_device[r])
        num_found = oracle.num_cached(stores, wanted)
        promoted = oracle.promote(stores, wanted[:num_found], here) if len(stores) > 1 else set()
        values = [stores[0].get(key) for key in reversed(wanted)][::-1]
        end = next((i for i in range(here, len(wanted)) if values[i] is None), len(wanted))
        if r >= first:
            brought = len(promoted & {*wanted[here:end]})
            for i, more in enumerate((here, end - here - brought, brought)[: len(hits)]):
                hits[i] += more
        new = [key for key in reversed(all_keys) if sum(s.contains(key) for s in stores) < len(stores)]
        for key in new:
            for store in stores:
                store.put(key, 1, key)
        stored += len(new) * (r >= first)
    return hits, stored


@pytest.mark.parametrize("disk", [pytest.param(None, marks=pytest.mark.slow), 6400, "unbounded"])
def test_hits_by_tier_are_those_of_plain_python(tmp_path, capsys, disk):
    file = write(tmp_path / "trace.jsonl", conversations())
    tiers = "device=1600,host=2048" + (f",disk={disk}" if disk else "")
    assert cli.main(f"lab {file} --tiers {tiers} --warmup 0.25 --json".split()) == 0
    line = json.loads(capsys.readouterr().out)
    below = {None: [], 6400: [oracle.Store(100)], "unbounded": [oracle.Store(10**9)]}[disk]
    hits, stored = plain(traces.read(file), [oracle.Store(32), *below], 50)
    assert [*line["hit_tokens"].values()] == [64 * blocks for blocks in hits]
    assert min(hits) > 5
    assert [*line["read_bytes"].values()] == [64 * KV_BYTES * blocks for blocks in hits[1:]]
    assert line["stored_bytes"] == 64 * KV_BYTES * stored
    assert 0 < line["modelled_ttft_s"]["mean"] < line["modelled_ttft_uncached_s"]["mean"]
    if disk == "unbounded":  # all that is there to be hit
        whole = by_hand(traces.read(file), Combination("lru", 64, None))[50:].sum()
        assert sum(line["hit_tokens"].values()) == whole
        assert cli.main(f"lab {file} --tiers {tiers} --warmup 0.25".split()) == 0
        assert re.search(r"\ndisk +unbounded ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tiers host=5", "tiers='host=5' must be device=TOKENS,host=TOKENS and perhaps disk"),
        ("--tiers device=5,host=x", "tiers='device=5,host=x' must be device=TOKENS"),
        ("--tiers device=64,host=0", "tiers=0 must be device=TOKENS"),
        ("--tiers device=64,host=64 --policies lru,lfu", "policies='lru,lfu' must be one policy, of the dev"),
        ("--tiers device=64,host=64 --decoder gemma-3-27b", "must be one whose layers all read the same tok"),
    ],
)
def test_a_mistake_with_tiers_is_one_line(tmp_path, capsys, options, message):
    file = write(tmp_path / "trace.jsonl", conversations(4))
    assert cli.main(["lab", file, *options.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)
