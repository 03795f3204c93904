"""Kinds of layers from outside: sound or refused, masked as the oracle says, and true to what they keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.code_digest import digest_of
from jaxpaged.config import EngineConfig
from jaxpaged.contracts import layer_kinds
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import block_pool, block_table, cache_specs, policies
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.models.attention import LayerKind
from jaxpaged.status import Status
from pallas_kernels import ops
from reference import model as reference_model
from tests import tiny
from tests.outsiders import layer_kind
from tests.outsiders.layer_kind import SINKS, Dilated, WindowWithSinks

PATH = "tests.outsiders.layer_kind"


def setup_of(**options):
    return Setup(EngineConfig(**tiny.DEFAULTS | options), tiny.CONFIG)


# Statements


@pytest.mark.parametrize("kind", [FULL, SlidingWindow(7), ChunkedLocal(8), SINKS, layer_kind.DILATED])
def test_sound_kinds_agree_with_themselves(kind):
    assert layer_kinds.why_wrong(kind, 300) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SEES_TOO_MUCH", r"must be sound: .* sees a token that it does not keep: query 17, key 4"),
        ("KEEPS_TOO_LITTLE", r"has most_kept\(32\) = 13, but keeps 32 from position 0 on"),
        ("OF_THE_FUTURE", "declares contract = 2, and this release serves 1"),
        ("BACKWARDS", r"has first_read\(2\) = 3, a position behind the token's own"),
        ("WindowWithSinks", "must be a frozen dataclass under CacheSpec, or a function"),
        ("seven", "must give frozen dataclasses under CacheSpec, not 7"),
        ("nobody", "must be .*: module .* has no attribute 'nobody'"),
    ],
)
def test_a_kind_that_cannot_be_served_is_refused_at_the_start(name, message):
    with pytest.raises(InputError, match=message):
        setup_of(layer_kind=f"{PATH}:{name}")


def test_kernels_that_do_not_serve_a_kind_are_not_used_or_refused():
    setup = setup_of(layer_kind=f"{PATH}:SINKS")
    assert setup.attention == "xla"
    assert setup.has_outsiders
    for name in ("native", "mosaic_gpu"):
        rule = f"attention='{name}' must serve the model: the {name} kernel serves no layer_kind"
        with pytest.raises(InputError, match=rule):
            setup_of(layer_kind=f"{PATH}:SINKS", attention=name).check()
    with pytest.raises(InputError, match="does not serve option=layer_kind"):
        setup_of(layer_kind=f"{PATH}:SINKS", attention="tests.outsiders.attention:BOTH").check()
    arrays = attention_arrays(16)
    for name, why in (("native", "it has no layer_kind"), ("mosaic_gpu", "a kind of layer from outside")):
        with pytest.raises(NotImplementedError, match=why):
            ops.tiled_paged_attention(*arrays, scale=1.0, layer_kind=SINKS, implementation=name)


def test_a_function_chooses_layers_and_the_code_is_in_the_digest():
    setup = setup_of(layer_kind=f"{PATH}:every_second")
    assert setup.grouping.specs == (FULL, SINKS)
    assert setup.grouping.first_blocks(8) == (0, 1)
    digests = [setup_of(layer_kind=f"{PATH}:{name}").code_digest for name in ("SINKS", "DILATED")]
    assert None not in digests
    assert digests[0] != digests[1] != digest_of()


def test_one_table_for_several_kinds_keeps_what_any_reads():
    both = cache_specs.together([SlidingWindow(5), ChunkedLocal(8), SINKS])
    position = np.arange(200)
    kept = np.asarray(both.first_read(position))
    for spec in (SlidingWindow(5), ChunkedLocal(8), SINKS):
        assert np.all(kept <= np.asarray(spec.first_read(position)))
    assert (both.first_tokens, both.most_kept(3)) == (4, 15)
    assert layer_kinds.why_wrong(both, 300) is None
    assert cache_specs.together([FULL, SINKS]) == FULL
    assert cache_specs.together([SlidingWindow(5), SlidingWindow(9)]) == SlidingWindow(9)
    mixed = cache_specs.together([SlidingWindow(5), ChunkedLocal(8)])
    assert cache_specs.of_words(cache_specs.words(mixed)) == mixed


# Attention


def attention_arrays(num_blocks_of_row, num_rows=2, tile_len=4, seed=0):
    """Return queries, K and V in blocks of 16 in disorder, tables, starts and lengths of tiles."""
    rng = np.random.default_rng(seed)
    num_blocks = 1 + num_rows * num_blocks_of_row
    k, v = rng.standard_normal((2, num_blocks, 16, 1, 8), np.float32)
    tables = 1 + rng.permutation(num_blocks - 1).reshape(num_rows, -1).astype(np.int32)
    lens = num_blocks_of_row * 16 - np.arange(num_rows, dtype=np.int32) * 37 - 3
    q = rng.standard_normal((num_rows, tile_len, 2, 8), np.float32)
    return q, k, v, tables, lens - tile_len, lens


@pytest.mark.parametrize("kind", [WindowWithSinks(200, 150), Dilated(40, 3)])
def test_attention_sees_what_the_kind_says_and_reads_nothing_else(kind):
    q, k, v, tables, starts, lens = attention_arrays(48)
    want = np.zeros_like(q)
    for row, start in enumerate(starts):
        keys, values = (x[tables[row]].reshape(-1, 8)[: lens[row]] for x in (k, v))
        for i in range(q.shape[1]):
            position = np.arange(len(keys))
            seen = (position <= start + i) & np.asarray(kind.sees(np.int32(start + i), position))
            scores = np.where(seen, q[row, i] @ keys.T, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            want[row, i] = weights / weights.sum(axis=-1, keepdims=True) @ values
        # What memory has given back: its places hold what others wrote, and the table names the null block.
        gone = slice(-(-kind.first_tokens // 16), int(kind.first_read(start)) // 16)
        k[tables[row, gone]] = v[tables[row, gone]] = np.nan
        tables[row, gone] = 0
    k[0] = v[0] = np.nan
    attend = functools.partial(ops.tiled_paged_attention, scale=1.0, layer_kind=kind, implementation="xla")
    got = jax.jit(attend)(q, k, v, tables, starts, lens)
    np.testing.assert_allclose(got, want, atol=2e-5)
    decode = functools.partial(ops.paged_attention, scale=1.0, layer_kind=kind, implementation="xla")
    last = jax.jit(decode)(q[:, -1], k, v, tables, lens)
    np.testing.assert_allclose(last, want[:, -1], atol=2e-5)


# Memory


def slid_tables():
    """Return tables of two rows, 28 and 5 tokens, of which one group reads a head of five and a window.

    With them the free blocks after each of the four appends.
    """
    pool = block_pool.create(40, policies.named("lru"))
    tables = block_table.create(pool, 2, 8, 4, num_groups=2, first_blocks=(0, 2))
    specs = (FULL, WindowWithSinks(6, 5))
    append = jax.jit(block_table.append, static_argnames="max_new_blocks")
    slide = jax.jit(functools.partial(block_table.slide_windows, specs=specs))
    rows, free = jnp.array([True, True]), []
    for lens in ([7, 0], [9, 3], [9, 2], [3, 0]):
        tables, info = append(tables, jnp.array(lens, jnp.int32), max_new_blocks=16)
        assert int(info.status) == Status.OK
        tables, _ = slide(tables, rows)
        check_invariants(tables)
        free.append(int(tables.pool.num_free))
    return tables, free


def test_tables_give_back_the_middle_and_keep_the_head():
    tables, free = slid_tables()
    held = np.asarray(tables.block_tables) != 0
    assert held[0].tolist() == [True] * 7 + [False]
    # The next token, at 28, reads from 23 on: block 5 is the first behind the head of two.
    assert held[1].tolist() == [True, True, False, False, False, True, True, False]
    assert held[2].sum() == held[3].sum() == 2
    assert free[-1] == 39 - 7 - 4 - 4
    assert tables.num_held.tolist() == [11, 4]


@pytest.mark.slow
def test_tables_with_a_gap_are_truncated_forked_and_reset():
    tables, _ = slid_tables()
    truncate, fork = jax.jit(block_table.truncate), jax.jit(block_table.fork)
    refused, info = truncate(tables, jnp.array([9, 0], jnp.int32))  # to 19, in the gap
    assert int(info.status) == Status.TOO_FEW_TOKENS
    assert jnp.array_equal(refused.block_tables, tables.block_tables)
    tables, info = truncate(tables, jnp.array([4, 1], jnp.int32))
    assert (int(info.status), int(info.num_freed)) == (Status.OK, 4)
    check_invariants(tables)
    forked = block_table.free_rows(tables, jnp.array([False, True]))[0]
    forked, info = fork(forked, jnp.array([0]), jnp.array([1]), jnp.array([True]))
    assert int(info.status) == Status.OK
    check_invariants(forked)
    emptied, info = truncate(forked, jnp.array([24, 0], jnp.int32))
    assert int(info.status) == Status.OK
    check_invariants(emptied)
    tables, info = block_table.reset(emptied)
    assert int(tables.pool.num_free) == 39
    check_invariants(tables)


# Engines


@functools.cache
def oracles_answer(kinds, prompt, max_tokens):
    config = tiny.CONFIG.with_kinds(kinds)
    return reference_model.generate(config, tiny.reference_weights(), list(prompt), max_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "options"),
    [
        pytest.param("SINKS", (SINKS, SINKS), tiny.SMALL, marks=pytest.mark.nightly),
        (
            "every_second",
            (SINKS, None),
            tiny.SWAP | {"num_blocks": 27, "num_host_blocks": 24, "max_num_batched_tokens": 36},
        ),
        pytest.param("DILATED", (layer_kind.DILATED,) * 2, tiny.DEFAULTS, marks=pytest.mark.nightly),
    ],
    ids=["all", "two groups, swap", "own mask"],
)
def test_an_engine_gives_the_oracles_tokens_in_any_company(name, kinds, options):
    driver = tiny.driver(layer_kind=f"{PATH}:{name}", **options)
    prompts = tiny.prompts([24, 50, 30, 12, 45, 40])
    prompts[5][:32] = prompts[1][:32]
    for _ in range(2):
        answers = tiny.generate(driver, prompts, tiny.greedy(40))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == oracles_answer(kinds, tuple(prompt), 40)
    assert answers[1] != tiny.reference_answer(tuple(prompts[1]), 40), "the kind must matter"
    assert driver.stats.num_preemptions > 0 or driver.stats.num_hit_tokens > 0
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_a_running_answer_holds_head_and_window_alone():
    driver = tiny.driver(layer_kind=f"{PATH}:SINKS", **tiny.SMALL)
    tiny.submit(driver, tiny.prompts([40]), tiny.greedy(60))
    held = []
    while driver.has_work:
        driver.turn(max_steps=1)
        tables = driver.state.tables
        held.append((int(tables.seq_lens.max()), int(tables.num_held.max())))
        check_invariants(tables)
    for seq_len, num_held in held:
        if seq_len >= 40:  # tokens 0 to 3, and twelve before the next: of one block, and of two or three
            assert num_held <= 1 + 3, (seq_len, num_held)
    assert max(seq_len for seq_len, _ in held) > 95


def test_layers_with_a_kind_of_their_own_know_it():
    model = tiny.CONFIG.with_kinds((SINKS, None))
    assert model.layers[0].own is SINKS
    assert model.layers[1] == tiny.CONFIG.layers[1]
    assert model.attention_kinds == (LayerKind(own=SINKS), LayerKind())
