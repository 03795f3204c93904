"""A model on several devices of this process: `test_in_a_process.py` runs these in one that has them."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.handover.blocks import Blocks
from jaxpaged.lora import LoRARequest
from jaxpaged.memory import kv_cache
from jaxpaged.models import adapter_slots, loading, lora
from jaxpaged.models.config import LayerKind
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.shards import Shard, Shards
from jaxpaged.models.weights import by_role, random_weights
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH, assembled, mesh_of, on_each_shard
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.status import PagedMemoryError
from jaxpaged.step import loop
from jaxpaged.step.program import specs_of
from pallas_kernels.layouts import LAYOUTS, Fp8
from reference import model as reference_model
from tests import tiny, tiny_head, tiny_lora
from tests.engine import test_layouts as one_device
from tests.marks import slow_and_nightly
from tests.models.test_decoder import COVERING, GOLDENS, LLAMAS, assert_equal, logits_of
from tests.parallel.asks import differing
from tests.tiers.test_engines import SCORED, ask, tiered, whole

FLOAT32 = jnp.dtype("float32")
ITSELF = Draft(tiny.CONFIG, tiny.load, cost=tiny.CHEAP)
pytestmark = pytest.mark.skipif(len(jax.devices()) < 6, reason="needs the process of test_in_a_process.py")


def model_of(checkpoint, size, sums="fast"):
    """Make a model on so many devices."""
    shard = functools.partial(Shard, checkpoint.config, Shards(size, sums))
    return assembled(mesh_of(size), lambda i: checkpoint.model(LoadAs(FLOAT32, shard=shard(i))))


def compiled(model, size, token_ids, adapter=None):
    """Compile a pass over these tokens."""
    graphdef, params = nnx.split(model)

    def of_shard(params):
        return logits_of(nnx.merge(graphdef, params), token_ids, 4, 8, adapter)

    local = on_each_shard(of_shard, mesh_of(size), (BY_SHARD,), ON_EACH)
    return jax.jit(local).lower(params).compile(), params


# Weights in blocks; sinks, experts and biases; a norm over all heads. ALiBi and others are slow ones.
QUICK = {"quantised/fp8_block", "families/gpt_oss", "families/olmo2"}
# By four most have fewer kv heads than devices. "mha_biased" has 3 heads and 40 columns: nothing divides it.
SIZES = {
    "gqa_tied": 2,
    "quantised/awq": 2,
    "quantised/fp8_block": 2,
    "families/bloom": 3,
    "families/gpt_neox": 2,
    "families/laguna": 2,
    "families/qwen3_5_moe": 2,
    **dict.fromkeys([f"families/{name}" for name in ("bamba", "falcon_h1", "lfm2", "nemotron_h")], 2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow)
        for n in dict.fromkeys([*LLAMAS, *COVERING, *QUICK, *SIZES])
        if n != "mha_biased"
    ],
)
def test_a_model_in_shares_equals_transformers(name):
    size = SIZES.get(name, 4)
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    checkpoint = loading.open_checkpoint(GOLDENS / name)
    model = model_of(checkpoint, size)
    run, params = compiled(model, size, golden["token_ids"])
    assert_equal(np.asarray(run(params)), golden)
    # XLA makes one of two that do not depend on each other, but not of one in a branch and one before it.
    c = checkpoint.config
    has_both = c.experts is not None and len(c.experts.dense_layers) > 0
    sums = 2 - (c.parallel and not has_both) + (c.qk_norm == "all") + has_both
    sums += 2 * any(kind.sparsity for kind in c.layers)  # the mean and the variance of its numbers
    if c.has_uniform_parts:
        assert collectives(run) == {"all-reduce": sums, "all-gather": 1}


@pytest.mark.parametrize(
    "name",
    ["phi3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gpt2", "gpt_neox", "bloom"))],
)
def test_an_adapter_in_shares_is_what_peft_merges(name):
    """Queries, keys and values, or gate and up, may be one module."""
    checkpoint = loading.open_checkpoint(GOLDENS / "families" / name)
    names = checkpoint.module_names
    golden = json.loads((GOLDENS / "lora" / name / "golden.json").read_text())
    request = LoRARequest(name, 1, GOLDENS / "lora" / name)

    def load(number):
        shard = Shard(checkpoint.config, Shards(2), number)
        model = checkpoint.model(LoadAs(FLOAT32, shard=shard))
        lora.make_room(model, names, num_adapters=2, rank=9)
        adapter_slots.put(model, lora.read(request, checkpoint.config, names, 9, FLOAT32, shard), 1)
        return model

    run, params = compiled(assembled(mesh_of(2), load), 2, golden["token_ids"], adapter=2)
    assert_equal(np.asarray(run(params)), golden)


def collectives(run):
    """Count collectives by name in a program whose layers are a loop."""
    found = re.findall(r" = .*? (all-[a-z-]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", run.as_text())
    return {name: found.count(name) for name in set(found)}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "tensor_parallel_size=4 must be a divisor of the model's num_q_heads=6"),
        (3, "=3 must be a divisor or a multiple of the model's num_kv_heads=2"),
        (12, "=12 must be at most 8, the cpu devices that JAX has"),
        (2.5, "=2.5 must be a positive int, at most 256"),
    ],
)
def test_what_cannot_be_split_is_refused(size, message):
    with pytest.raises(InputError, match=message):
        tiny.driver(tensor_parallel_size=size)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"tensor_parallel_size": 2, "speculative_config": {"model": "tiny"}, "draft": ITSELF} | tiny.SWAP,
            id="2, swap, drafts by itself",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"tensor_parallel_size": 6, "tensor_parallel_sums": "ordered", "kv_layout": "all_layers"}
            | tiny.SMALL,
            id="6, ordered, all_layers",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_loop_answers_as_one_device_does_with_the_same_bits_in_any_company(options):
    driver = tiny.driver(**options)
    prompts = tiny.prompts([5, 33, 50, 12, 60, 40])
    greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=2, prompt_logprobs=1)
    drawn = dataclasses.replace(greedy, temperature=1.5, seed=3, top_p=0.8)
    params = [greedy, greedy, drawn, greedy, drawn, greedy]

    def asked(order):
        ids = tiny.submit(driver, [prompts[i] for i in order], [params[i] for i in order])
        found = tiny.drain(driver)
        return [dataclasses.replace(found[i], request_id=0, num_hit_tokens=0) for i in ids]

    together = asked(range(6))
    assert driver.stats.num_preemptions > 0
    for i in range(6):
        assert asked([i]) == [together[i]]
    for prompt, its, answer in zip(prompts, params, together, strict=True):
        if its is greedy:
            assert answer.token_ids == list(tiny.reference_answer(tuple(prompt), 24))
            told = tiny.reference_logits((*prompt, *answer.token_ids[:-1]))[len(prompt) - 1 :]
            want = jax.nn.log_softmax(told)[np.arange(24), answer.token_ids]
            np.testing.assert_allclose([score.logprob for score in answer.scores], want, atol=1e-4)
    stats = driver.stats
    assert (stats.num_accepted_tokens > 20) == ("draft" in options)
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens
    tiny.assert_nothing_is_held(driver)
    assert_same_on_each(driver.state)
    differs(driver)


@pytest.mark.nightly
def test_a_head_drafts_on_several_devices():
    """A head is whole on each of them, and reads the same hidden states there."""
    load, head = tiny_head.bigrams()
    driver = tiny_head.driver(head, load_model=load, tensor_parallel_size=2, **tiny.SWAP)
    [answer] = tiny.generate(driver, [[7, 3]], tiny.greedy(40))
    assert answer[:2] == [(3 * 5 + 3) % tiny_head.WIDTH, (3 * 25 + 18) % tiny_head.WIDTH]
    assert driver.stats.num_draft_tokens == driver.stats.num_accepted_tokens > 20
    tiny.assert_nothing_is_held(driver)
    assert_same_on_each(driver.state)


class Passes:
    """Runner of `by_passes` with a model and its caches on two devices."""

    def __init__(self, config):
        shard = functools.partial(Shard, config, Shards(2))
        model = assembled(mesh_of(2), lambda i: tiny.load(LoadAs(FLOAT32, shard=shard(i)), config))
        graphdef, self.params = nnx.split(model)

        def run(params, cache, given, batch):
            return one_device.run(nnx.merge(graphdef, params), cache, *given, batch)

        places = BY_SHARD, BY_SHARD, ON_EACH, ON_EACH
        self.model, self.program = model, of_shards(run, places, (ON_EACH, BY_SHARD))
        self.copy_blocks = of_shards(kv_cache.copy_blocks, places, BY_SHARD)
        self.copy_within = of_shards(kv_cache.copy_within, (BY_SHARD, ON_EACH, ON_EACH), BY_SHARD)

    def create_cache(self, *sizes):
        return of_shards(lambda: self.model.create_cache(*sizes), (), BY_SHARD)()

    def run(self, cache, token_ids, positions, batch):
        return self.program(self.params, cache, (token_ids, positions), batch)


def of_shards(function, places, results):
    return jax.jit(on_each_shard(function, mesh_of(2), places, results))


@pytest.mark.parametrize("name", slow_and_nightly([*one_device.in_engines(), "fp8_e4m3"], ["int4_grouped"]))
def test_a_layout_in_shares_gives_the_tokens_of_one_device(name):
    """Each device has blocks of its own heads; some go to the host and back, and are copied."""
    layout = LAYOUTS[name]
    assert one_device.by_passes(layout, passes=Passes) == one_device.answers(name, layout)


# So small a scale that most numbers are beyond the largest: a head with another's has other numbers.
GIVEN = Fp8("fp8_e4m3", k_scale=(2.0**-11, 0.3), v_scale=(0.7, 2.0**-11))


@pytest.mark.parametrize(
    ("size", "groups", "heads"), [(2, 1, [[0], [1]]), (6, 1, [[0]] * 3 + [[1]] * 3), (2, 2, [[0], [1]] * 2)]
)
def test_scales_given_by_head_are_where_the_heads_are(size, groups, heads, monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    driver = tiny.driver(kv_layout=GIVEN, tensor_parallel_size=size, data_parallel_size=groups)
    for name, scales in (("k_scale", GIVEN.k_scale), ("v_scale", GIVEN.v_scale)):
        shards = driver.state.kv_cache.shared[name].addressable_shards
        for its_heads, shard in zip(heads, shards, strict=True):
            want = np.float32([[scales[head] for head in its_heads]] * 2)  # in both layers
            np.testing.assert_array_equal(np.squeeze(shard.data, 0) if groups > 1 else shard.data, want)


@pytest.mark.nightly
def test_two_devices_with_scales_given_by_head_answer_as_one():
    driver = tiny.driver(kv_layout=GIVEN, tensor_parallel_size=2)
    answers = tiny.generate(driver, one_device.PROMPTS, tiny.greedy(one_device.NUM_NEW))
    assert answers == one_device.by_passes(GIVEN)


@pytest.mark.slow
def test_adapters_are_shared_out_as_the_weights_are(tmp_path):
    """One batch has rows with none and with several; the host launches each step."""
    driver = tiny_lora.driver(tmp_path, tensor_parallel_size=2, loop="host")
    tiny_lora.assert_answers_are_the_oracles(driver, tmp_path, [5, 33, 12, 20], [0, None, 1, 2])


KINDS = LayerKind(), LayerKind(sliding_window=11)


def sizes_of(kinds):
    """Return the tiny model with layers of these kinds, and an engine's options on two devices."""
    its = {"tensor_parallel_size": 2, **tiny.SWAP, "num_blocks": 1 + 16 + 8 * (len(kinds) > 1)}
    return tiny.mixed(*kinds), its


@pytest.mark.slow
def test_blocks_come_back_from_host_memory():
    """A prompt whose blocks the devices have forgotten has the answer of one that was never seen.

    Layers are of two kinds, in the program of `test_blocks_go_to_as_many_devices`.
    """
    config, its = sizes_of(KINDS)
    driver = tiered(load_model=functools.partial(tiny.load, config=config), model_config=config, **its)
    [prompt] = tiny.prompts([60])
    first, num_hits, fetched = ask(driver, prompt, SCORED)
    assert (num_hits, fetched) == (0, {})
    for other in tiny.prompts([90, 90, 90], seed=1):  # more than the devices hold
        ask(driver, other)
    again, num_hits, fetched = ask(driver, prompt, SCORED)
    assert num_hits == 56
    assert fetched["host"] > 0
    assert whole(again) == whole(first)
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize("kinds", [pytest.param((LayerKind(),), marks=pytest.mark.nightly), KINDS])
def test_blocks_go_to_as_many_devices(kinds):
    """Blocks go as bytes, and from device to device; nothing is compiled anew. Layers are of these kinds."""
    config, its = sizes_of(kinds)
    load = functools.partial(tiny.load, config=config)
    here, there = (tiny.driver(load, config, **its) for _ in range(2))
    [prompt] = tiny.prompts([40])
    line = np.array(prompt, np.int32)
    want = tiny.generate(here, [prompt], tiny.greedy(12))
    assert want == [reference_model.generate(config, tiny.reference_weights(), prompt, 12)]
    assert tiny.generate(there, [prompt[::-1]], tiny.greedy(12)) != want
    before = [each.num_compiled() for each in (loop.run, loop.submit, loop.write_tokens, loop.abort)]
    blocks, chain = here.exchange.export_blocks(line, None), here.exchange.locate(line, None)
    assert blocks.present.sum(axis=1).tolist() == [5, 3][: len(kinds)]
    assert there.exchange.adopt_blocks(Blocks.from_bytes(blocks.to_bytes())) == 5
    assert tiny.generate(there, [prompt], tiny.greedy(12)) == want
    assert there.exchange.export_blocks(line, None).to_bytes() == blocks.to_bytes()
    assert there.reset_prefix_cache()
    assert there.exchange.adopt(blocks, iter(here.exchange.chunks(chain))) == 5
    assert tiny.generate(there, [prompt], tiny.greedy(12)) == want
    assert there.stats.num_hit_tokens == 2 * 32  # one token is left to compute
    new = random_weights(config, NAMES, seed=7)
    here.lifecycle.update_weights(here.lifecycle.read_names(new.items()))
    want = reference_model.generate(config, by_role(config, NAMES, new), prompt, 12)
    assert tiny.generate(here, [prompt], tiny.greedy(12)) == [want]
    for level in (1, 2):  # asleep, with all weights new while they are away
        here.lifecycle.sleep(level)
        if level == 2:
            here.lifecycle.update_weights(here.lifecycle.read_names(new.items()))
        here.lifecycle.wake_up(["weights", "kv_cache"])
        assert tiny.generate(here, [prompt], tiny.greedy(12)) == [want]
    assert [each.num_compiled() for each in (loop.run, loop.submit, loop.write_tokens, loop.abort)] == before
    tiny.assert_nothing_is_held(there)
    assert_same_on_each(there.state)
    one = dataclasses.replace(
        blocks, block_format=dataclasses.replace(blocks.block_format, tensor_parallel_size=1)
    )
    with pytest.raises(InputError, match="tensor_parallel_size=1 must be 2, as this engine's"):
        there.exchange.adopt_blocks(one)


def assert_same_on_each(state):
    """Check that all devices have the same of everything but K and V."""

    def check(spec, leaf):
        if spec == ON_EACH:
            first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len(others) > 0
            assert all(np.array_equal(first, other) for other in others)

    jax.tree.map(check, specs_of(state), state)


def differs(driver):
    """Check that a device with another state is found out in the next run."""
    tiny.set_state(driver, differing(driver.state))
    tiny.submit(driver, tiny.prompts([5]), SamplingParams(max_tokens=2))
    with pytest.raises(PagedMemoryError, match="the devices of a model have come to different states"):
        tiny.drain(driver)
