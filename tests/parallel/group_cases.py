"""Groups of devices, each with rows and a pool of its own: `test_in_a_process.py` runs these, too."""

import asyncio
import dataclasses
import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, AsyncLLM
from jaxpaged.checks import InputError
from jaxpaged.engine import start
from jaxpaged.engine.driver import Driver
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.models.config import LayerKind
from jaxpaged.models.load_as import LoadAs
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.status import PagedMemoryError, Status
from jaxpaged.step import loop
from jaxpaged.step.state import Counter, FinishReason
from reference import model as reference_model
from tests import tiny, tiny_lora, tiny_recursive
from tests.engine import test_routed
from tests.engine.fuzz import Fuzz
from tests.models.test_decoder import GOLDENS
from tests.parallel.cases import differs
from tests.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(len(jax.devices()) < 6, reason="needs the process of test_in_a_process.py")
# The same in most tests, which so share a program; by two devices each, for the loop's tensor parallelism.
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 2}
TWO = {"data_parallel_size": 2, "tensor_parallel_size": 2, "structured_outputs_mib": 1, **tiny.SMALL}
NUM_ROWS = 2 * tiny.DEFAULTS["max_num_seqs"]


def groups_of(driver, ids):
    """Return the replicas of these requests."""
    rows = {entry.request.request_id: row for row, entry in driver.rows.taken()}
    return [rows[i] // NUM_ROWS for i in ids]


def assert_nothing_is_held(driver):
    assert not any(driver.rows.taken())
    for group in range(driver.config.data_parallel_size):
        state = jax.tree.map(lambda x, group=group: np.asarray(x)[group], driver.state.tables)
        check_invariants(state)
        assert not np.any(state.seq_lens)
    assert np.all(np.asarray(driver.state.status) == Status.OK)
    assert driver.stats.num_free_blocks == driver.stats.num_blocks


@pytest.fixture(scope="module")
def driver():
    return tiny.driver(**TWO)


def searched(driver, searches):
    """Return the tokens and the sums that each search finds."""
    its_ids = []
    for requests in searches:
        requests = tiny.numbered(requests)
        its_ids.append([request.request_id for request in requests])
        for request in requests:
            driver.add(request)
    driver.turn(max_steps=1)
    groups = [set(groups_of(driver, ids)) for ids in its_ids]
    found = tiny.drain(driver)
    return groups, [[(found[i].token_ids, found[i].beam, found[i].scores) for i in ids] for ids in its_ids]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TWO, id="2 x 2"),
        pytest.param(TWO | tiny.SWAP, id="2 x 2, swap", marks=pytest.mark.nightly),
        pytest.param(
            TWO | {"tensor_parallel_size": 1, "loop": "host", "speculative_config": SUFFIX},
            id="2, by the host, drafts by suffix",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_groups_answer_as_one_does_with_the_same_bits_in_any_company(options):
    prompts = tiny.prompts([5, 33, 50, 12, 60, 40, 52, 9])
    greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=1)
    drawn = dataclasses.replace(greedy, temperature=1.5, seed=3, top_p=0.8)
    params = [greedy, greedy, drawn, greedy, drawn, greedy, greedy, greedy]
    driver = tiny.driver(**options)

    def asked(driver, order):
        ids = tiny.submit(driver, [prompts[i] for i in order], [params[i] for i in order])
        found = tiny.drain(driver)
        return [dataclasses.replace(found[i], request_id=0, num_hit_tokens=0) for i in ids]

    together = asked(driver, range(8))
    assert driver.stats.num_preemptions > 0
    assert np.all(driver.counters[:, Counter.NUM_NEW_TOKENS] > 24)  # each group has answered
    assert driver.stats.num_new_tokens == 8 * 24
    assert [asked(driver, [i])[0] for i in (6, 2)] == [together[6], together[2]]
    if driver.config.num_host_blocks:  # compiling one more takes long
        one = tiny.driver(**options | {"data_parallel_size": 1})
        assert asked(one, range(8)) == together
    for prompt, its, answer in zip(prompts, params, together, strict=True):
        if its is greedy:
            assert answer.token_ids == list(tiny.reference_answer(tuple(prompt), 24))
    assert_nothing_is_held(driver)
    stops_by_the_last_group(driver)


@pytest.mark.slow
def test_groups_of_devices_and_of_layers_answer_as_the_oracle():
    """Two replicas of two devices each; a layer that reads all, and one with a window."""
    config = tiny.mixed(LayerKind(), LayerKind(sliding_window=11))
    sizes = TWO | tiny.SWAP | {"num_blocks": 1 + 23}
    driver = tiny.driver(functools.partial(tiny.load, config=config), config, **sizes)
    for lengths, num_new in (([5, 33, 50, 12, 60, 40], 24), ([9, 12, 5, 10, 7, 8, 11, 6], 48)):
        prompts, params = tiny.prompts(lengths), tiny.greedy(num_new)
        answers = tiny.generate(driver, prompts, params)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == reference_model.generate(config, tiny.reference_weights(), prompt, num_new)
    assert driver.stats.num_preemptions > 0
    assert np.all(driver.counters[:, Counter.NUM_NEW_TOKENS] > 24)
    prompts = tiny.prompts([50, 60], seed=1)
    answers = tiny.generate(driver, prompts, tiny.greedy(24))
    assert tiny.generate(driver, prompts[::-1], tiny.greedy(24)) == answers[::-1]
    assert driver.stats.num_hit_tokens > 0
    ids = tiny.submit(driver, prompts[:2], tiny.greedy(24))
    driver.turn(max_steps=4)
    seen = driver.occupancy()
    assert seen.holders.sum() == sum(len(progress.block_ids) for progress in seen.requests)
    assert len(seen.requests) == len(ids)
    tiny.drain(driver)
    assert_nothing_is_held(driver)


def stops_by_the_last_group(driver):
    """Check that an error in one replica stops the engine."""
    if driver.config.tensor_parallel_size > 1:
        differs(driver)
        return
    status = np.array(driver.state.status)
    status[-1] = Status.OUT_OF_BLOCKS
    placed = jax.device_put(status, driver.state.status.sharding)
    tiny.set_state(driver, dataclasses.replace(driver.state, status=placed))
    tiny.submit(driver, tiny.prompts([5]), tiny.greedy(2))
    with pytest.raises(PagedMemoryError, match="out of blocks"):
        tiny.drain(driver)


def test_a_prompt_goes_to_the_group_that_has_its_beginning_and_others_to_the_one_with_less_to_do(driver):
    [first, second] = tiny.prompts([40, 40], seed=1)

    def asked(*prompts):
        ids = tiny.submit(driver, list(prompts), tiny.greedy(3))
        driver.turn(max_steps=1)
        groups, answers = groups_of(driver, ids), tiny.drain(driver)
        return groups, [answers[i].num_hit_tokens for i in ids]

    [[here], _] = asked(first)
    there = 1 - here
    assert asked(second) == ([there], [0])
    before = driver.stats.num_hit_tokens
    assert asked(first) == ([here], [32])  # 40 tokens are 5 blocks, and one token is left to compute
    assert asked([*second[:24], 1, 2, 3], first) == ([there, here], [24, 32])
    assert driver.stats.num_hit_tokens == before + 32 + 24 + 32
    assert asked(*[second] * 5)[0] == [there, there, there, here, here]  # nor does the other idle
    for prompts in ([first, second], [second, first]):
        assert driver.reset_prefix_cache()
        assert asked(*prompts) == ([0, 1], [0, 0])  # nobody has anything, nor is it thought so
    assert_nothing_is_held(driver)


@pytest.mark.parametrize("tells", [False, True])
def test_a_group_that_tells_what_it_has_is_not_taken_to_have_what_an_answer_took_the_place_of(tells):
    """A long answer takes all 16 blocks. By what was sent to it, its group still seems to have a prompt's."""
    told = {"enable_kv_cache_events": tells, "publisher": "null"}
    driver = tiny.driver(**TWO, kv_events_config=told)
    [first, second] = tiny.prompts([40, 40], seed=1)
    groups = []
    for prompt, num_new in ((first, 1), (second, 1), (first[::-1][:8], 119), (first, 1)):
        ids = tiny.submit(driver, [prompt], tiny.greedy(num_new))
        driver.turn(max_steps=1)
        groups += groups_of(driver, ids)
        [answer] = tiny.drain(driver).values()
        assert answer.num_hit_tokens == 0
    assert groups == [0, 1, 0, 1 if tells else 0]
    assert_nothing_is_held(driver)


def test_a_long_request_holds_up_no_other_group_for_longer_than_a_run(driver):
    prompts = tiny.prompts([20, 20, 21], seed=2)
    before = driver.counters
    [long, short] = tiny.submit(driver, prompts[:2], [tiny.greedy(80), tiny.greedy(3)])
    driver.turn(max_steps=8)
    its_group, other = groups_of(driver, [long, short])
    assert its_group != other
    deltas = driver.turn(max_steps=8)
    steps = (driver.counters - before)[:, Counter.NUM_STEPS]
    assert (steps[its_group], steps[other]) == (8, 3)  # each group's run is over by itself
    assert {delta.request_id: bool(delta.finish_reason) for delta in deltas} == {long: False, short: True}
    [next_one] = tiny.submit(driver, prompts[2:], tiny.greedy(3))
    later = [delta for _ in range(2) for delta in driver.turn(max_steps=8)]
    assert next(d for d in later if d.request_id == next_one).finish_reason == FinishReason.LENGTH
    assert not any(d.finish_reason for d in later if d.request_id == long)
    tokens = [d.token_ids for d in (*deltas, *later) if d.request_id == long]
    tokens.append(tiny.drain(driver)[long].token_ids)
    assert list(itertools.chain(*tokens)) == tiny.reference_answer(tuple(prompts[0]), 80)
    assert_nothing_is_held(driver)


@pytest.mark.parametrize("group", [0, 1])
def test_an_abort_in_a_group_leaves_others_as_they_are_and_blocks_are_counted_through(driver, group):
    assert driver.reset_prefix_cache()
    prompts = tiny.prompts([20, 33], seed=3)
    ids = tiny.submit(driver, prompts, tiny.greedy(40))
    told = [delta for _ in range(3) for delta in driver.turn(max_steps=4)]
    groups = groups_of(driver, ids)
    assert sorted(groups) == [0, 1]
    seen = driver.occupancy()
    num_blocks = len(seen.holders) // 2
    for its_group, progress in zip(groups, seen.requests, strict=True):
        assert set(progress.block_ids // num_blocks) == {its_group}
        assert np.all(seen.holders[progress.block_ids] == 1)
    assert seen.holders.sum() == sum(len(progress.block_ids) for progress in seen.requests)
    assert [progress.prompt_len for progress in seen.requests] == [20, 33]
    entries = [entry for _, entry in driver.rows.taken()]
    # Tokens in the cache when the last report was made: the newest token is not.
    lens = np.array([len(entry.request.prompt_token_ids) + len(entry.answer) - 1 for entry in entries])
    assert driver.stats.num_free_blocks == driver.stats.num_blocks - sum(-(-lens // 8))
    assert len({*(-(-lens // 8))}) == 2
    gone = ids[groups.index(group)]
    [stays] = {*ids} - {gone}
    assert driver.abort([gone]) == []
    last = tiny.drain(driver)
    assert last[gone].finish_reason == FinishReason.ABORT
    tokens = [token for delta in told if delta.request_id == stays for token in delta.token_ids]
    prompt = prompts[ids.index(stays)]
    assert tokens + last[stays].token_ids == tiny.reference_answer(tuple(prompt), 40)
    assert_nothing_is_held(driver)
    its_content = driver.occupancy().has_content.reshape(2, -1).sum(1)
    assert driver.stats.num_cached_blocks == its_content.sum()
    assert len({*its_content}) == 2


def test_who_belongs_together_is_in_one_group_and_finds_the_same_in_each(driver):
    """Beams go from row to row: in the second group their rows have other numbers."""
    [prompt] = tiny.prompts([12], seed=4)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    groups, found = searched(driver, [driver.door.admit_search(prompt, params=params) for _ in range(2)])
    assert groups in ([{0}, {1}], [{1}, {0}])
    assert found[0] == found[1]
    drawn = SamplingParams(n=3, max_tokens=6, seed=5, logprobs=0)
    groups, found = searched(driver, [driver.door.admit(prompt, drawn) for _ in range(2)])
    assert all(len(its) == 1 for its in groups)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, *_ in found[0]}) > 1
    assert_nothing_is_held(driver)


def test_each_group_follows_recursive_grammars(driver, monkeypatch):
    """Rows of one number in both groups have different masks, each written at its place."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(driver, "door", driver.door)
    tiny_recursive.with_languages(driver)
    names, prompts = ["sum", "tree", "lists", "sum", "lists"], tiny.prompts([5, 33, 20, 12, 9])
    params = [
        SamplingParams(temperature=0, max_tokens=20, min_tokens=15, **tiny_recursive.asking(name))
        for name in names
    ]
    ids = tiny.submit(driver, prompts, params)
    driver.turn(max_steps=1)
    assert {*groups_of(driver, ids)} == {0, 1}
    answers = tiny.drain(driver)
    for i, name, prompt, its in zip(ids, names, prompts, params, strict=True):
        assert answers[i].token_ids == tiny.reference_greedy(prompt, its, tiny_recursive.oracle(name))
    asked = BeamSearchParams(beam_width=2, max_tokens=8, **tiny_recursive.asking("sum"))
    groups, found = searched(driver, [driver.door.admit_search(prompts[0], asked) for _ in range(2)])
    assert groups in ([{0}, {1}], [{1}, {0}])
    assert found[0] == found[1]
    for tokens, *_ in found[0]:
        assert all(
            token in tiny_recursive.oracle("sum").allowed(tokens[:i]) for i, token in enumerate(tokens)
        )
    assert_nothing_is_held(driver)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_size": 7},
            "^data_parallel_size=7 must be at most 6: a replica has tensor_parallel_",
        ),
        ({"data_parallel_size": 4, "tensor_parallel_size": 2}, "^data_parallel_size=4 must be at most 3: a"),
        ({"data_parallel_size": 2.5}, "^data_parallel_size=2.5 must be a positive int, at most 256"),
    ],
)
def test_more_groups_than_there_are_devices_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        tiny.driver(**options)


def test_what_is_of_one_group_alone_is_refused(driver):
    with pytest.raises(InputError, match=r"^data_parallel_size=2 must be 1 for a snapshot$"):
        driver.snapshot()
    with pytest.raises(
        InputError, match=r"^data_parallel_size=2 must be 1 to export or adopt blocks: make an"
    ):
        driver.exchange.export_blocks(np.arange(20), None)


@pytest.mark.nightly
def test_experts_and_candidates_are_told_by_each_group():
    """Two groups of two devices tell what one device does, of a model with experts."""
    folder = GOLDENS / "families" / "qwen3_moe"
    prompts = [[3 + token % 58 for token in its] for its in tiny.prompts([20, 41, 9, 33])]
    ids = [np.random.default_rng(0).integers(0, 61, (len(prompt) - 1, 3)) for prompt in prompts]
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    params = [dataclasses.replace(plain, prompt_logprob_token_ids=each) for each in ids]
    options = tiny.DEFAULTS | test_routed.ASKED | {"max_model_len": 128, "max_prompt_logprob_token_ids": 3}
    both = []
    for more in ({}, TWO):
        llm = LLM(folder, skip_tokenizer_init=True, **options | more)
        both.append(llm.generate(prompts, params))
    for one, other in zip(*both, strict=True):
        answer = other.outputs[0]
        assert answer.token_ids == one.outputs[0].token_ids
        want = test_routed.oracles([*other.prompt_token_ids, *answer.token_ids], folder)
        np.testing.assert_array_equal(answer.routed_experts, want)
        told = other.prompt_token_id_logprobs
        np.testing.assert_allclose(told, one.prompt_token_id_logprobs, atol=1e-5)


@pytest.mark.slow
def test_one_group_runs_the_loop_as_it_is_written(monkeypatch):
    """Nothing of groups is in the program without them."""
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    driver = tiny.driver(**tiny.SMALL)
    size = driver.cache_size.num_blocks
    state = start.create_state(driver.setup, tiny.load(LoadAs(jnp.dtype("float32"))), size)
    source = start.Source(driver.setup, driver.device.graphdef, driver.device.params, state, by_host=False)
    written = jax.jit(
        inspect.unwrap(loop.run), static_argnames=("graphdef", "config"), donate_argnames="state"
    )
    plain = written.lower(driver.device.graphdef, *source.arrays, config=source.step_config)
    assert driver.setup.mesh is None
    assert source.lower().as_text() == plain.as_text()


@pytest.mark.nightly
def test_answers_in_random_company_are_those_of_the_request_alone(tmp_path):
    """`tests/engine/test_fuzz.py` in two replicas."""
    fuzz = Fuzz("groups", tmp_path)
    counts = [fuzz.run(seed) for seed in range(4)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"
    assert np.all(fuzz.driver.counters[:, Counter.NUM_NEW_TOKENS] > 0)


@pytest.mark.nightly
def test_adapters_are_there_for_all_groups(tmp_path):
    driver = tiny_lora.driver(tmp_path, data_parallel_size=2)
    seeds = [0, None, 1, 2, 0, 1]
    tiny_lora.assert_answers_are_the_oracles(driver, tmp_path, [5, 33, 12, 20, 7, 9], seeds)
    assert np.all(driver.counters[:, Counter.NUM_NEW_TOKENS] > 0)


@pytest.mark.slow
def test_llm_and_async_llm_answer_by_groups(tmp_path):
    """Answers are the oracle's, of more prompts than one group has rows for."""
    prompts = tiny.prompts([5, 33, 12, 20, 9, 24])
    asked = [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i, prompt in enumerate(prompts)]
    want = [tiny.reference_answer(tuple(prompt), 9) for prompt in prompts]
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    llm = LLM(str(write_gguf(tmp_path / "tiny.gguf")), **tiny.DEFAULTS | TWO)

    def tokens_of(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    async def one(asynchronous, prompt, number):
        return [output async for output in asynchronous.generate(prompt, params, str(number))][-1]

    async def all_of():
        asynchronous = AsyncLLM.of(llm)
        return await asyncio.gather(*(one(asynchronous, prompt, i) for i, prompt in enumerate(asked)))

    try:
        assert tokens_of(llm.generate(asked, params, use_tqdm=False)) == want
        assert llm.engine.stats.num_blocks == 2 * 16
        assert tokens_of(asyncio.run(all_of())) == want
    finally:
        llm.engine.close()
