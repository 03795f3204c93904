"""Heads that draft, in an engine: what they compute, what is accepted, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.api.draft import draft_of
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import features, kv_cache
from jaxpaged.models import loading
from jaxpaged.models.drafting import eagle3
from jaxpaged.sampling_params import SamplingParams
from reference import draft_head
from tests import tiny, tiny_head, tiny_mtp
from tests.tiny_gguf import write_gguf

WIDTH = tiny.CONFIG.hidden_size


class Kept:
    """K and V as the oracle computes them."""

    num_tokens = 0

    def add(self, layer, k, v):
        self.k, self.v = k, v
        return k, v


def its_entries(driver, row):
    """Return K, V and features of the entries that a row's head has computed, and the row's tokens."""
    state = driver.state
    count = int(state.rows.drafting.followed[row])
    tokens = np.asarray(state.rows.token_ids[row])[: int(state.rows.num_tokens[row])].tolist()
    places, size = np.arange(count), state.tables.block_size
    slots = np.asarray(state.tables.block_tables)[row, places // size] * size + places % size
    _, its = kv_cache.parted(state.kv_cache, 1, 2, 8)
    its, known = features.taken(its)
    k, v = (np.asarray(its.blocks[name]).reshape(-1, 2, 8)[slots] for name in "kv")
    return k, v, np.asarray(known).reshape(-1, WIDTH)[slots], tokens


@pytest.mark.slow
def test_a_head_computes_the_oracles_entries_of_prompts_and_answers():
    """Entries come in tiles and one by one, behind waits, parts of a prompt, and what others have made."""
    driver = tiny_head.driver(**tiny.SWAP)
    its_config, weights = tiny_head.config(), tiny_head.reference_weights()
    table = tiny.reference_weights()["embedding.weight"]
    [shared] = tiny.prompts([40], seed=4)
    seen = []
    for own in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1], [60], []):
        prompt, num_turns = [*shared, *own], 0
        tiny.submit(driver, [prompt], tiny.greedy(45))
        while driver.has_work:
            driver.turn(max_steps=1)
            num_turns += 1
            if num_turns % 4:  # what was computed before is there, still
                continue
            [rows] = np.nonzero(np.asarray(driver.state.rows.running))
            if len(rows) == 0 or driver.state.rows.drafting.followed[rows[0]] == 0:
                continue
            k, v, known, tokens = its_entries(driver, int(rows[0]))
            states = draft_head.taps(tiny.CONFIG, tiny.reference_weights(), tokens, (0, 1, 2))
            given = draft_head.features(its_config, weights, states)[: len(tokens) - 1]
            kept = Kept()
            draft_head.entries(its_config, weights, table[tokens[1:]], given, kept)
            # What a block that was found has at its end is made of the token that came behind it there.
            whose = [place for place in range(len(k)) if own != [60] or place != 39]
            np.testing.assert_allclose(known, given[: len(k)], atol=2e-4)
            np.testing.assert_allclose(k[whose], kept.k[whose], atol=2e-4)
            np.testing.assert_allclose(v[whose], kept.v[whose], atol=2e-4)
            seen.append(len(k))
    assert max(seen) > 70
    assert len(set(seen)) > 10
    assert driver.stats.num_hit_tokens >= 112


@pytest.mark.slow
def test_a_head_that_knows_the_model_has_all_its_drafts_accepted():
    load, head = tiny_head.bigrams()
    sizes = {"load_model": load, **tiny.SWAP}
    plain, drafting = tiny.driver(**sizes), tiny_head.driver(head, **sizes)
    for prompt in ([5], [7, 3], [1, 2, 3, 4, 5, 6, 7, 8] * 5):
        answers = [tiny.generate(driver, [prompt], tiny.greedy(40)) for driver in (plain, drafting)]
        assert answers[0] == answers[1]
        assert answers[0][0][:2] == [(prompt[-1] * 5 + 3) % WIDTH, (prompt[-1] * 25 + 18) % WIDTH]
    stats = drafting.stats
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 80
    assert stats.num_steps < 40


def test_a_block_has_a_heads_keys_values_and_features():
    options = EngineConfig(**tiny.DEFAULTS | tiny_head.BY_HEAD)
    alone, both = (Setup(options, tiny.CONFIG, draft) for draft in (None, tiny_head.config()))
    both.check()
    more = 2 * 2 * 8 + WIDTH  # of K and V, and of features
    assert capacity.bytes_per_block(both) == capacity.bytes_per_block(alone) + 8 * more * 4
    assert both.step_config(9).most_drafting == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 2, "num_processes": 2, "distributed_init": "127.0.0.1:1"},
            "'ngram' or 'suffix' here: a head that drafts has one process",
        ),
        (
            {"draft": None},
            "method='eagle3' must be 'ngram' or 'suffix' here: a head that drafts must be given",
        ),
    ],
)
def test_an_engine_that_no_head_drafts_for_is_refused(options, message):
    draft = tiny_head.config() if "draft" not in options else options.pop("draft")
    with pytest.raises(InputError, match=message):
        Setup(EngineConfig(**tiny.DEFAULTS | tiny_head.BY_HEAD | options), tiny.CONFIG, draft).check()


def test_a_head_is_read_from_a_directory(tmp_path):
    """Authors of EAGLE and the library `speculators` write it in two forms."""
    served = loading.open_checkpoint(write_gguf(tmp_path / "tiny.gguf"))
    tensors = {name: np.ascontiguousarray(x) for name, x in tiny_head.tensors().items()}
    told = {**tensors, "t2d": np.isin(np.arange(tiny.CONFIG.vocab_size), tiny_head.CHOSEN)}
    forms = {
        "authors": ({name.replace("layers.0", "midlayer"): x for name, x in told.items()}, tiny_head.SAID),
        "speculators": (
            told,
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": tiny_head.SAID,
                "norm_before_residual": False,
            },
        ),
    }
    found = []
    for name, (weights, said) in forms.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(said))
        found.append(draft_of(EngineConfig(speculative_config=drafts(folder)), served))
    assert found[0].config == found[1].config == tiny_head.config()
    head = found[0].load(tiny.LoadAs(np.dtype("float32")))
    assert np.asarray(head.targets[...]).tolist() == tiny_head.CHOSEN.tolist()


def drafts(folder):
    return {"method": "eagle3", "model": str(folder)}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 must be 1 for a head that drafts"),
        ({"model_type": "qwen3"}, "model_type='qwen3' must be 'llama' for a head that drafts"),
        ({"hidden_size": 64}, "hidden_size=64 must be 32, the served model's"),
        ({"target_hidden_size": 64}, "model config: target_hidden_size=64 must be 32, the served model's"),
        (
            {"target_hidden_size": 32, "hidden_size": 64},
            "model config: hidden_size=64 must be 32, the served",
        ),
        ({"vocab_size": 96}, "vocab_size=96 must be 97, the served model's"),
        ({"draft_vocab_size": 98}, "draft_vocab_size=98 must be at most 97"),
        ({eagle3.TAPS: None}, r"layer_ids=\[2, 1, -1\] must be a list of different ints in \[0, 2\]"),
        ({"fc_norm": True}, "fc_norm=True must be False or left out"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False must be True or"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle' must be 'eagle3'"),
    ],
)
def test_a_head_of_another_kind_is_refused(said, message):
    with pytest.raises(InputError, match=message):
        tiny_head.config(**said)


def test_tensors_of_another_head_are_refused():
    tensors = tiny_head.tensors()
    for changed, message in (
        ({eagle3.OFFSETS: tensors[eagle3.OFFSETS] * 0 + 97}, "must be offsets to different tokens below 97"),
        ({eagle3.OFFSETS: tensors[eagle3.OFFSETS][1:]}, "must be integers, one for each of 64 choices"),
        ({"fc.weight": tensors["fc.weight"][:, 1:]}, r"'fc.weight' has shape \(32, 95\), must be \(32, 96\)"),
    ):
        with pytest.raises(InputError, match=message):
            tiny_head.draft(tensors | changed).load(tiny.LoadAs(np.dtype("float32")))


def test_a_head_needs_a_directory(tmp_path):
    served = loading.open_checkpoint(write_gguf(tmp_path / "tiny.gguf"))
    for more, message in (
        ({"model": str(served.path)}, "speculative_config: model=.* must be the directory or the hub id of"),
        ({"model": str(tmp_path)}, r"speculative_config: model=.* must contain a config.json"),
        ({"quantization": "gguf"}, "quantization='gguf' must be None, 'int8', 'int4' or 'fp8' for a head"),
    ):
        asked = EngineConfig(speculative_config=drafts(tmp_path) | more)
        with pytest.raises(InputError, match=message):
            draft_of(asked, served)


@pytest.mark.nightly
def test_an_mtp_layer_drafts_and_changes_no_answer(tmp_path):
    """The model has experts, and computes the last layer of all prompt tokens for its MTP layer."""
    checkpoint = loading.open_checkpoint(tiny_mtp.write(tmp_path))
    params = [tiny.greedy(40), SamplingParams(max_tokens=40, temperature=1.0, top_k=2, seed=1, logprobs=1)]
    told = []
    for drafts in (None, {"method": "mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 4}):
        options = EngineConfig(**tiny.DEFAULTS | {"max_model_len": 100, "speculative_config": drafts})
        draft = draft_of(options, checkpoint)
        draft = draft and dataclasses.replace(draft, cost=tiny.CHEAP)
        shapes = checkpoint.abstract
        driver = Driver(options, checkpoint.config, checkpoint.model, shapes=shapes, draft=draft)
        for prompt in ([5, 7, 11], [*range(40)]):
            numbers = tiny.submit(driver, [prompt, prompt], params)
            found = tiny.drain(driver)
            told.append([(found[number].token_ids, found[number].scores) for number in numbers])
        assert (driver.stats.num_draft_tokens > 10) == (drafts is not None)
        tiny.assert_nothing_is_held(driver)
    assert told[:2] == told[2:]


@pytest.mark.parametrize("leading", [(6, 1), (1, 6)])
def test_features_lie_at_the_slots_of_their_tokens(leading):
    """Blocks lie by themselves, or within one array of all layers."""
    slots = jnp.array([9, 22, 4])
    new = jnp.arange(9, dtype=jnp.float32).reshape(3, 3) + 1
    made = features.write(jnp.zeros((*leading, 4, 3)), slots, new)
    want = np.zeros((24, 3))
    want[slots] = new
    np.testing.assert_array_equal(made.reshape(24, 3), want)
    np.testing.assert_array_equal(features.read(made, slots), new)
