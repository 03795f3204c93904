"""New weights in a driver: the bits of a fresh engine, all or nothing, nothing compiled or copied twice."""

import contextlib
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import updates
from jaxpaged.engine.setup import Setup
from jaxpaged.models.change import Change, StackChange
from jaxpaged.models.changes import ChangedWeights, Given, named
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families import from_hf, names_of
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.on_load import OnLoad
from jaxpaged.models.shards import Shard, Shards
from jaxpaged.models.weights import StoredWeights, by_role, random_weights
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from tests import tiny
from tests.models.test_decoder import GOLDENS

NEW = random_weights(tiny.CONFIG, NAMES, seed=7)
PARAMS = SamplingParams(max_tokens=10, temperature=1, seed=3, logprobs=0, ignore_eos=True)


def load_new(load_as):
    quantisation = OnLoad(load_as.quantization) if load_as.quantization else None
    return Decoder(StoredWeights(tiny.CONFIG, NAMES, NEW, load_as, quantisation))


def update(driver, weights, **options):
    """Update as an engine does; return the deltas that come of it."""
    given = weights if isinstance(weights, nnx.State) else driver.lifecycle.read_names(named(weights))
    return driver.lifecycle.update_weights(given, **options)


def answers(driver, prompts=None, params=PARAMS):
    """Return tokens and scores of answers."""
    ids = tiny.submit(driver, prompts or tiny.prompts([40, 9]), params)
    found = tiny.drain(driver)
    return [(found[i].token_ids, found[i].scores) for i in ids]


def equal(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.fixture(scope="module")
def driver():
    return tiny.driver()


@pytest.fixture
def old(driver):
    """Give the driver its first weights, and return their answers."""
    update(driver, tiny.weights())
    return answers(driver)


@pytest.fixture(scope="module")
def want():
    """Return the answers of an engine that was loaded with the new weights."""
    return answers(tiny.driver(load_new))


def roles(weights):
    return by_role(tiny.CONFIG, NAMES, weights)


def nested(weights):
    tree = {}
    for name, array in weights.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = jnp.asarray(array)
    return tree


_COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


@contextlib.contextmanager
def compiling_nothing():
    """Fail if anything is compiled inside."""
    before = len(_COMPILED)
    yield
    assert len(_COMPILED) == before


class DLPack:
    """An array of a library that hands it over by DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda its: iter(its.items()), id="pairs, once"),
        pytest.param(nested, id="pytree of JAX's arrays"),
        pytest.param(roles, id="roles"),
        pytest.param(lambda its: {name: DLPack(its[name]) for name in its}, id="DLPack"),
        pytest.param(lambda its: {name: its[name].astype(np.float64) for name in its}, id="wider floats"),
    ],
)
def test_an_updated_engine_has_the_bits_of_one_loaded_so(driver, old, want, form):
    """The prefix cache has the old weights' blocks of the same prompts: none is found."""
    assert old != want
    given = form(NEW)
    with compiling_nothing():
        update(driver, given)
        assert answers(driver) == want


def test_a_part_changes_alone_and_the_rest_is_neither_copied_nor_touched(driver, old):
    """One of three pieces of one layer's product changes; arrays without a change are the same objects."""
    name = "model.layers.1.self_attn.k_proj.weight"
    before = jax.tree.leaves(driver.device.params)
    gc.collect()
    num_bytes = sum(array.nbytes for array in jax.live_arrays())
    update(driver, {name: NEW[name]})
    after = jax.tree.leaves(driver.device.params)
    new = [b for a, b in zip(before, after, strict=True) if a is not b]
    assert len(new) == 1
    del before
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= num_bytes
    mixed = tiny.weights() | {name: NEW[name]}
    want = Decoder(StoredWeights(tiny.CONFIG, NAMES, mixed, LoadAs(jnp.dtype("float32"))))
    assert equal(driver.device.params, nnx.state(want))
    update(driver, {name: tiny.weights()[name]})
    assert answers(driver) == old


@pytest.fixture
def most_bytes(monkeypatch):
    """Return a list that gets the bytes of all arrays after each weight that an update has made."""
    found, make = [], updates._on_device

    def made(*args):
        new = make(*args)
        found.append(sum(array.nbytes for array in jax.live_arrays()))
        return new

    monkeypatch.setattr(updates, "_on_device", made)
    return found


def test_an_update_of_all_takes_no_more_than_what_there_was(driver, old, want, most_bytes):
    """Each old array is gone before the new one is made; but those that someone else holds stay as they
    are.
    """
    gc.collect()
    there = sum(array.nbytes for array in jax.live_arrays())
    update(driver, NEW)
    assert len(most_bytes) > 5
    assert max(most_bytes) <= there
    held = updates.own_weights(driver.device.params)
    copies = jax.tree.map(np.array, held)
    update(driver, tiny.weights())
    assert equal(held, copies)
    assert answers(driver) == old


def test_a_failure_in_the_midst_leaves_no_half_of_the_weights(driver, old, want, monkeypatch):
    """Memory may not suffice. Then all are away, until all are given or read again."""
    make, calls = updates._on_device, iter(range(3))

    def made(*args):
        if next(calls, None) is None:
            raise MemoryError
        return make(*args)

    monkeypatch.setattr(updates, "_on_device", made)
    with pytest.raises(MemoryError):
        update(driver, NEW)
    monkeypatch.undo()
    with pytest.raises(InputError, match="the weights are away. must be over"):
        update(driver, {FIRST: NEW[FIRST]})
    update(driver, NEW)
    assert answers(driver) == want


def test_a_state_like_the_engines_own_is_shared(driver, want):
    weights = updates.without_adapters(tiny.driver(load_new).device.params)
    update(driver, weights)
    leaves = zip(jax.tree.leaves(driver.device.params), jax.tree.leaves(weights), strict=True)
    assert all(ours.unsafe_buffer_pointer() == its.unsafe_buffer_pointer() for ours, its in leaves)
    assert answers(driver) == want
    other = jax.tree.map(lambda x: x[..., :1], weights)
    with pytest.raises(InputError, match=r"weights.*embedding.* has shape and dtype"):
        update(driver, other)
    with pytest.raises(InputError, match=r"weights must have the tree of LLM\.weights"):
        update(driver, nnx.State({"embedding": nnx.Param(jnp.zeros(1))}))


def test_a_table_in_the_engines_form_is_shared(driver, old):
    table = jnp.asarray(NEW["model.embed_tokens.weight"])
    update(driver, {"model.embed_tokens.weight": table})
    own = driver.device.params["embedding"].get_value()
    assert own.unsafe_buffer_pointer() == table.unsafe_buffer_pointer()


FIRST = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model.layers.2.mlp.down_proj.weight": 0}, r"'model\.layers\.2.*' is none that the model has"),
        ({"model.norm.weight": np.zeros(33)}, r"'model.norm.weight' has shape \(33,\), must be \(32,\)"),
        ({"model.norm.weight": np.zeros(32, np.int8)}, "has type int8, must be float32"),
        ({"model.norm.weight": [0.0] * 32}, "is of type list, must be an array"),
        ({"norm.weight": np.zeros(32), "model": {"norm": {"weight": np.ones(32)}}}, "must come once"),
        ({"layers.0.down.weight": NEW[FIRST]}, "must come once: it is a part of 'layers.0.down.weight'"),
        (
            {
                "lm_head.weight": NEW["model.embed_tokens.weight"] + 1,
                "embedding.weight": NEW["model.embed_tokens.weight"],
            },
            "must equal",
        ),
    ],
)
def test_half_a_mistake_changes_nothing(driver, old, wrong, message):
    before, version = jax.tree.leaves(driver.device.params), driver.device.weight_version
    with pytest.raises(InputError, match=message):
        update(driver, {FIRST: NEW[FIRST]} | wrong)
    with pytest.raises(InputError, match="must be a mapping of names to arrays, pairs, or a pytree"):
        update(driver, 3)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(driver.device.params), strict=True))
    assert driver.device.weight_version == version
    assert answers(driver) == old


def test_a_donated_array_is_refused(driver, old):
    gone = jnp.zeros(32)
    gone.delete()
    with pytest.raises(
        InputError, match="'model.norm.weight' is an array that was deleted or donated, must be"
    ):
        update(driver, {FIRST: NEW[FIRST], "model.norm.weight": gone})
    assert answers(driver) == old


def test_what_runs_on_tells_the_version_of_each_token(driver, old):
    """The rest of the answer is computed anew: it is what new weights give behind the tokens so far."""
    prompt, update_to = tiny.prompts([40])[0], driver.device.weight_version + 5
    [request] = tiny.numbered(driver.door.admit(prompt, PARAMS))
    driver.add(request)
    deltas = []
    while sum(len(delta.token_ids) for delta in deltas) < 4:
        deltas += driver.turn(max_steps=1)
    deltas += update(driver, NEW, version=update_to)
    began = [token for delta in deltas for token in delta.token_ids]
    assert began == old[0][0][: len(began)]
    while driver.has_work:
        deltas += driver.turn(max_steps=1)
    tokens = [token for delta in deltas for token in delta.token_ids]
    versions = [version for delta in deltas for version in delta.weight_versions]
    assert versions == [update_to - 5] * len(began) + [update_to] * (10 - len(began))
    [rest] = tiny.numbered(tiny.driver(load_new).door.admit(prompt, PARAMS, continue_from=began))
    fresh = tiny.driver(load_new)
    fresh.add(rest)
    assert began + tiny.drain(fresh)[rest.request_id].token_ids == tokens
    with pytest.raises(InputError, match="version=3 must be above the version of the present weights"):
        update(driver, NEW, version=3)
    tiny.assert_nothing_is_held(driver)


def test_a_beam_search_is_not_cut_through(driver, old):
    params = BeamSearchParams(beam_width=2, max_tokens=8)
    for request in tiny.numbered(driver.door.admit_search(tiny.prompts([5])[0], params)):
        driver.add(request)
    driver.turn(max_steps=1)
    version = driver.device.weight_version
    with pytest.raises(InputError, match="beam searches=4 must be 0"):
        update(driver, NEW)
    assert driver.device.weight_version == version
    tiny.drain(driver)
    assert answers(driver) == old


def decoder(config, names, weights, load_as):
    quantisation = OnLoad(load_as.quantization) if load_as.quantization else None
    return Decoder(StoredWeights(config, names, weights, load_as, quantisation))


FAMILIES = sorted(path.name for path in (GOLDENS / "families").iterdir() if path.is_dir())
QUICK = ("gpt2", "gpt_oss", "gemma4_text", "mixtral")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_every_family_is_packed_as_when_it_is_loaded(name, quantization):
    """All at once, and then a half of the tensors, so that roles have old pieces beside new ones."""
    said = json.loads((GOLDENS / "families" / name / "config.json").read_text())
    config = from_hf(said)
    names = names_of(said, config)
    old, new = (random_weights(config, names, seed) for seed in (0, 1))
    setup = Setup(EngineConfig(dtype="float32", quantization=quantization), config)
    params = nnx.state(decoder(config, names, old, setup.load_as()))

    def updated(weights):
        update = updates.Update(setup, names, Given(config, names, weights.items()))
        return update.into(jax.tree.map(lambda array: array, params))

    want = nnx.state(decoder(config, names, new, setup.load_as()))
    assert not equal(params, want)
    assert equal(updated(new), want)
    if quantization is None:
        half = {name: its for i, (name, its) in enumerate(new.items()) if i % 2}
        want = nnx.state(decoder(config, names, old | half, setup.load_as()))
        assert equal(updated(half), want)


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2"])
def test_jax_arrays_whose_numbers_lie_otherwise_are_not_shared(name):
    """An array may be a layer's weight as it is, but not where a family's files have another order."""
    said = json.loads((GOLDENS / "families" / name / "config.json").read_text())
    config = from_hf(said)
    names = names_of(said, config)
    old, new = (random_weights(config, names, seed) for seed in (0, 1))
    setup = Setup(EngineConfig(dtype="float32", loop_over_layers=False), config)
    params = nnx.state(decoder(config, names, old, setup.load_as()))
    given = {name: jnp.asarray(array) for name, array in new.items()}
    update = updates.Update(setup, names, Given(config, names, given.items()))
    made = update.into(params)
    assert equal(made, nnx.state(decoder(config, names, new, setup.load_as())))
    pointers = {array.unsafe_buffer_pointer() for array in given.values()}
    assert any(array.unsafe_buffer_pointer() in pointers for array in jax.tree.leaves(made))


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_gets_its_slices(number):
    shard = Shard(tiny.CONFIG, Shards(2), number)
    load_as = LoadAs(jnp.dtype("float32"), None, shard)
    old, want = (nnx.state(decoder(tiny.CONFIG, NAMES, its, load_as)) for its in (tiny.weights(), NEW))
    given = Given(tiny.CONFIG, NAMES, NEW.items())
    changes = nnx.to_flat_state(nnx.state(Decoder(ChangedWeights(tiny.CONFIG, NAMES, given, load_as))))
    for (path, variable), (_, change) in zip(nnx.to_flat_state(old), changes, strict=True):
        assert isinstance(change.get_value(), Change | StackChange)
        new = change.get_value().into(variable.get_value())
        its = dict(nnx.to_flat_state(want))[path].get_value()
        assert equal(new, its)
