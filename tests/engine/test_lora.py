"""Requests with adapters: each its own, in one batch, loaded and given up without compiling anything."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.engine.adapters import Adapters
from jaxpaged.engine.request import Delta
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading, lora
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import by_role
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.step import loop
from reference import model as reference_model
from tests import tiny, tiny_lora
from tests.tiny_lora import merged

SCORED = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def driver(folder):
    return tiny_lora.driver(folder)


def submit(driver, folder, asked, params=SCORED):
    """Queue prompts, each with the adapter of a seed or with None; their request ids."""
    ids = []
    for seed, prompt in asked:
        adapter = None if seed is None else tiny_lora.request(folder, seed)
        for request in tiny.numbered(driver.door.admit(prompt, params, lora_request=adapter)):
            driver.add(request)
            ids.append(request.request_id)
    return ids


def answers(driver, folder, asked, params=SCORED) -> list[Delta]:
    ids = submit(driver, folder, asked, params)
    found = tiny.drain(driver)
    return [dataclasses.replace(found[i], request_id=0, num_hit_tokens=0) for i in ids]


def test_each_is_answered_with_its_own_adapter_in_one_batch(driver, folder):
    """Requests without an adapter have the bits of an engine that has no adapter slots."""
    asked = list(zip([0, None, 1, 2, None, 0], tiny.prompts([9, 40, 33, 5, 17, 64]), strict=True))
    found = answers(driver, folder, asked)
    for (seed, prompt), answer in zip(asked, found, strict=True):
        assert answer.token_ids == tiny_lora.reference_answer(seed, prompt, 8)
    assert found[0].token_ids != tiny_lora.reference_answer(None, asked[0][1], 8)
    plain = [each for each in asked if each[0] is None]
    want = answers(tiny.driver(), folder, plain)
    assert [answer for (seed, _), answer in zip(asked, found, strict=True) if seed is None] == want


def test_an_answer_is_the_same_in_any_company(driver, folder):
    """Alone and among others, in other rows, with prefixes found or not, whichever room its adapter has."""
    asked = list(zip([2, 0, None, 1, 1], tiny.prompts([20, 41, 8, 33, 50], seed=5), strict=True))
    alone = [answer for each in asked for answer in answers(driver, folder, [each])]
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 1, 0]):
        together = answers(driver, folder, [asked[i] for i in order])
        assert together == [alone[i] for i in order]
    fresh = tiny_lora.driver(folder)  # in which their adapters have other rooms
    assert answers(fresh, folder, asked) == alone


def test_more_adapters_than_there_is_room_for_take_turns_and_compile_nothing(folder):
    driver = tiny_lora.driver(folder)
    compiled = loop.put_adapter.num_compiled()
    prompts = tiny.prompts([12] * 7, seed=2)
    seeds = [0, 1, 2, 3, 4, None, 3]
    ids = submit(driver, folder, zip(seeds, prompts, strict=True))
    driver.turn(max_steps=1)
    on_device = {place.request.request_id for _, place in driver.rows.taken()}
    assert on_device == {*ids[:3], ids[5]}  # only who has no adapter overtakes
    found = tiny.drain(driver)
    for request_id, seed, prompt in zip(ids, seeds, prompts, strict=True):
        assert found[request_id].token_ids == tiny_lora.reference_answer(seed, prompt, 8)
    assert loop.put_adapter.num_compiled() == compiled
    tiny.assert_nothing_is_held(driver)


def test_adapters_share_no_cached_blocks(driver, folder):
    """An adapter shares none with another, with the model, or with what had its id before."""
    [prompt] = tiny.prompts([50], seed=7)

    def hits(seed):
        [request_id] = submit(driver, folder, [(seed, prompt)], greedy(1))
        return tiny.drain(driver)[request_id].num_hit_tokens

    assert [hits(seed) for seed in (0, 1)] == [0, 0]
    exported = driver.exchange.locate(np.array(prompt, np.int32), None)
    assert not exported.present.any(), "what an adapter has made is for nobody else"
    assert hits(None) == 0
    assert [hits(seed) for seed in (None, 0, 1)] == [48, 48, 48]
    assert driver.door.adapters.remove(1)
    assert [hits(0), hits(1)] == [0, 48]


def test_one_that_is_removed_while_in_use_stays_with_its_requests(driver, folder):
    prompts = tiny.prompts([12, 9], seed=3)
    changed = tiny_lora.write(folder / "changed", seed=3)
    ids = submit(driver, folder, [(0, prompts[0]), (0, prompts[1])], greedy(20))
    driver.turn(max_steps=2)
    assert driver.door.adapters.remove(1)
    other = LoRARequest("adapter3", 1, changed)  # the same id for another
    [request] = tiny.numbered(driver.door.admit(prompts[0], greedy(20), lora_request=other))
    driver.add(request)
    found = tiny.drain(driver)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert found[request_id].token_ids == tiny_lora.reference_answer(0, prompt, 20)
    assert found[request.request_id].token_ids == tiny_lora.reference_answer(3, prompts[0], 20)
    with pytest.raises(
        InputError, match="lora_int_id=1 must be another for 'adapter0': it is that of 'adapter3'"
    ):
        driver.door.admit(prompts[0], SCORED, lora_request=tiny_lora.request(folder, 0))
    driver.door.adapters.remove(1)


def test_adapters_stay_over_an_update_of_the_weights(driver, folder):
    """Requests under way go on with theirs, on new weights; what old weights made is not found again."""
    prompts = tiny.prompts([30, 9, 20], seed=8)
    answers(driver, folder, [(0, prompts[0]), (1, prompts[0])])  # so that both adapters are on the device
    compiled = loop.put_adapter.num_compiled()
    try:
        ids = submit(driver, folder, zip((0, None, 1), prompts, strict=True), greedy(20))
        begun: list[Delta] = []
        while len({delta.request_id for delta in begun if delta.token_ids}) < 3:
            begun += driver.turn(max_steps=1)
        begun += driver.lifecycle.update_weights(driver.lifecycle.read_names(tiny.weights(seed=7).items()))
        rest = tiny.drain(driver)
        for request_id, seed, prompt in zip(ids, (0, None, 1), prompts, strict=True):
            old = [token for its in begun if its.request_id == request_id for token in its.token_ids]
            assert 0 < len(old) < 20
            weights = by_role(tiny.CONFIG, NAMES, tiny.weights(seed=7)) if seed is None else merged(seed, 7)
            new = reference_model.generate(tiny.CONFIG, weights, prompt + old, 20 - len(old))
            assert rest[request_id].token_ids == new
        driver.lifecycle.update_weights(driver.lifecycle.read_names(tiny.weights(seed=8).items()))
        for seed, hits in ((0, 0), (1, 0), (0, 24)):
            [request_id] = submit(driver, folder, [(seed, prompts[0])], greedy(4))
            found = tiny.drain(driver)[request_id]
            want = reference_model.generate(tiny.CONFIG, merged(seed, 8), prompts[0], 4)
            assert (found.token_ids, found.num_hit_tokens) == (want, hits)
        assert loop.put_adapter.num_compiled() == compiled
        tiny.assert_nothing_is_held(driver)
    finally:
        driver.lifecycle.update_weights(driver.lifecycle.read_names(tiny.weights().items()))


def test_forks_and_beams_have_the_adapter_of_whom_they_come_from(driver, folder):
    [prompt] = tiny.prompts([19], seed=4)
    several = SamplingParams(max_tokens=6, temperature=1, seed=1, n=3, logprobs=0, ignore_eos=True)
    each = [answers(driver, folder, [(1, prompt)], several.of_answer(i))[0] for i in range(3)]
    together = answers(driver, folder, [(1, prompt), (None, prompt)], several)[:3]
    assert [a.token_ids for a in together] == [a.token_ids for a in each]
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)

    def best(adapter):
        requests = tiny.numbered(driver.door.admit_search(prompt, params, lora_request=adapter))
        for request in requests:
            driver.add(request)
        found = tiny.drain(driver).values()
        return max((delta.beam.cum_logprob, delta.token_ids) for delta in found if delta.beam.rank == 0)

    score, tokens = best(tiny_lora.request(folder, 0))
    assert (score, tokens) != best(None)
    [greedy] = answers(driver, folder, [(0, prompt)], dataclasses.replace(SCORED, max_tokens=5))
    assert score >= sum(greedy.logprobs) - 1e-4
    logits = reference_model.logits(tiny.CONFIG, tiny_lora.merged(0), prompt + tokens)[len(prompt) - 1 : -1]
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert score == pytest.approx(chances[np.arange(5), tokens].sum(), abs=1e-3)


@pytest.mark.nightly
def test_who_gives_way_keeps_its_adapter(folder):
    """Rows with an adapter that give way are in `tests/learn/test_ratio.py` by day."""
    driver = tiny_lora.driver(folder, **tiny.SMALL)
    asked = list(zip([0, 1, None, 2, 1], tiny.prompts([10, 20, 30, 12, 25]), strict=True))
    ids = submit(driver, folder, asked, greedy(60))
    found = tiny.drain(driver)
    for request_id, (seed, prompt) in zip(ids, asked, strict=True):
        assert found[request_id].token_ids == tiny_lora.reference_answer(seed, prompt, 60)
    assert driver.stats.num_preemptions > 0
    tiny.assert_nothing_is_held(driver)


def test_without_room_for_adapters_one_is_refused(folder):
    driver = tiny.driver()
    with pytest.raises(InputError, match="lora_request=.* must be None without enable_lora"):
        driver.door.admit([1, 2], SCORED, lora_request=tiny_lora.request(folder, 0))
    for wrong in ("adapter0", 1):
        with pytest.raises(InputError, match=f"lora_request={wrong!r} must be None or a LoRARequest"):
            Adapters(lambda request: {}).get(wrong)


def test_a_given_one_takes_the_place_of_another_and_compiles_nothing(driver, folder):
    """Who is under way keeps the former one. Prefixes of that are not found, and no file is read."""
    adapters, request = (
        driver.door.adapters,
        LoRARequest("trained", 77, tiny_lora.write(folder / "t", seed=0)),
    )
    names = loading.open_checkpoint(folder / "tiny.gguf").module_names
    given = lora.read(tiny_lora.request(folder, 2), tiny.CONFIG, names, 8, np.dtype("float32"))
    [prompt] = tiny.prompts([20], seed=8)

    def ask():
        [made] = tiny.numbered(driver.door.admit(prompt, greedy(8), lora_request=request))
        driver.add(made)
        return made.request_id

    before = ask()
    driver.turn(max_steps=2)
    compiled = loop.put_adapter.num_compiled(), loop.run.num_compiled()
    adapters.renew(request, given)
    given["qkv"][1][:] = 0  # which were copied
    after = ask()
    found = tiny.drain(driver)
    assert found[before].token_ids == tiny_lora.reference_answer(0, prompt, 8)
    assert found[after].token_ids == tiny_lora.reference_answer(2, prompt, 8)
    assert found[after].num_hit_tokens == 0
    assert (loop.put_adapter.num_compiled(), loop.run.num_compiled()) == compiled
    wide = {role: (a.astype(np.float64), b) for role, (a, b) in given.items()}
    for wrong, message in (
        (
            {"qkv": given["qkv"]},
            "^adapter must be a mapping of qkv, o, gate_up, down to pairs of a and b, as L",
        ),
        (wide, "^adapter: a of qkv has shape and dtype .*float64.*, must have .*float32"),
    ):
        with pytest.raises(InputError, match=message):
            adapters.renew(request, wrong)
    assert tiny.drain(driver) == {}
    assert adapters.remove(77)


def test_a_given_one_is_never_read_again():
    read = []
    adapters = Adapters(lambda request: read.append(request.lora_int_id) or {}, max_kept=1)
    adapters.renew(LoRARequest("trained", 1, "x"), {})
    for number in (2, 3, 1, 2):
        adapters.get(LoRARequest(f"a{number}" if number > 1 else "trained", number, "x"))
    assert read == [2, 3, 2]
    adapters.renew(LoRARequest("trained", 1, "y"))
    first, second = (adapters.get(LoRARequest("trained", 1, path)) for path in "xy")
    assert first is second
    assert read == [2, 3, 2, 1]
    with pytest.raises(
        InputError, match="^lora_int_id=1 must be another for 'trained': it is that of 'trained'"
    ):
        adapters.get(LoRARequest("trained", 1, "z"))


def test_the_host_keeps_so_many_and_reads_what_it_forgot_again():
    read = []
    adapters = Adapters(lambda request: read.append(request.lora_int_id) or {}, max_kept=2)
    for number in (1, 2, 1, 3, 1, 2):
        adapters.get(LoRARequest(f"a{number}", number, "x"))
    assert read == [1, 2, 3, 2]
    assert adapters.ids() == {1, 2}
    first = adapters.get(LoRARequest("a1", 1, "x"))
    assert adapters.remove(1)
    assert not adapters.remove(1)
    assert adapters.get(LoRARequest("a1", 1, "x")).number > first.number
