"""Sleep and new weights of engines that draft, by every method and from every level."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged.api.draft import draft_of
from jaxpaged.config import EngineConfig
from jaxpaged.engine.device import MEMORY
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.updates import own_weights
from jaxpaged.models import loading
from jaxpaged.models.changes import named
from jaxpaged.models.files import safetensors_files
from jaxpaged.sampling_params import SamplingParams
from tests import tiny, tiny_mtp
from tests.engine.fuzz_settings import SETTINGS, SWAP
from tests.marks import slow_and_nightly

MTP = {"method": "mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
METHODS = {
    "draft_model": "swap, drafts by another",
    "eagle3": "swap, drafts by a head",
    "ngram": "swap, drafts",
    "suffix": "swap, suffixes",
    "grammar": None,
    "mtp": None,
}
# How an engine sleeps, what brings its weights, and what wakes it then.
WAYS: list[tuple[int, str | None, list[str]]] = [
    (0, None, []),
    (0, "names", []),
    (1, None, ["weights", "kv_cache"]),
    (1, "pytree", ["kv_cache"]),  # its own weights wait in the host's memory, and are dropped
    (2, None, ["kv_cache", "weights"]),
    (2, "names", ["kv_cache"]),
    (2, "pytree", ["kv_cache"]),
    (2, "names", ["weights", "kv_cache"]),
]


def driver_of(method: str, folder: Path) -> tuple[Driver, dict[str, np.ndarray]]:
    """Create an engine that drafts by a method; return also its weights by names."""
    if method == "mtp":
        checkpoint = loading.open_checkpoint(tiny_mtp.write(folder))
        config = EngineConfig(**tiny.DEFAULTS | {"max_model_len": 100, "speculative_config": MTP})
        draft = draft_of(config, checkpoint)
        assert draft is not None
        draft, names = dataclasses.replace(draft, cost=tiny.CHEAP), checkpoint.module_names
        its = checkpoint.config, checkpoint.model, checkpoint.abstract, names
        driver = Driver(config, *its, draft=draft)
        given = safetensors_files.load(tiny_mtp.GLM)
        return driver, {name: np.asarray(given[name]) for name in given}
    if method == "grammar":
        return tiny.driver(**SWAP, speculative_config={"method": "grammar"}), tiny.weights()
    return SETTINGS[str(METHODS[method])](folder), tiny.weights()


def put_to_sleep_and_back(
    driver: Driver, weights: dict[str, np.ndarray], level: int, brings: str | None, wakes: list[str]
) -> None:
    """Let an engine sleep and wake with the weights that it had."""
    tree = jax.tree.map(lambda x: x, own_weights(driver.device.params))
    driver.lifecycle.sleep(level)
    if brings == "names":
        driver.lifecycle.update_weights(driver.lifecycle.read_names(named(weights)))
    elif brings == "pytree":
        driver.lifecycle.update_weights(tree)
    for each in wakes:  # one after the other, in this order
        driver.lifecycle.wake_up([each])
    assert driver.device.resident == frozenset(MEMORY)


# Methods without weights of their own are like an engine without drafts.
@pytest.mark.parametrize(
    "method", ["draft_model", "eagle3", "mtp", *slow_and_nightly(["ngram", "suffix", "grammar"], ["ngram"])]
)
def test_no_weight_is_missing_when_an_engine_is_awake(method, tmp_path, monkeypatch):
    """Nothing runs here, so no loop is compiled."""
    tiny.replace(monkeypatch, Driver, "compile", lambda self: None)
    driver, weights = driver_of(method, tmp_path)
    want = [np.array(leaf) for leaf in jax.tree.leaves(driver.device.params)]
    paths = jax.tree.structure(driver.device.params)
    for way in WAYS:
        put_to_sleep_and_back(driver, weights, *way)
        found: Any = driver.device.params
        assert jax.tree.structure(found) == paths, way
        for leaf, like in zip(jax.tree.leaves(found), want, strict=True):
            assert isinstance(leaf, jax.Array), way
            np.testing.assert_array_equal(leaf, like, err_msg=str(way))


def test_an_update_that_cannot_read_what_drafts_changes_nothing(tmp_path, monkeypatch):
    tiny.replace(monkeypatch, Driver, "compile", lambda self: None)
    driver, weights = driver_of("mtp", tmp_path)
    driver.lifecycle.sleep(2)
    before = driver.device.params, driver.device.weight_version, driver.device.resident
    update = driver.lifecycle.read_names(named(weights))

    def gone(*_: Any) -> None:
        raise OSError("files are gone")

    with monkeypatch.context() as patch:
        patch.setattr("jaxpaged.engine.drafted.weights", gone)
        with pytest.raises(OSError, match="files are gone"):
            driver.lifecycle.update_weights(update)
    assert (driver.device.params, driver.device.weight_version, driver.device.resident) == before
    driver.lifecycle.update_weights(update)
    driver.lifecycle.wake_up(["kv_cache"])
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(driver.device.params))


@pytest.mark.parametrize("method", slow_and_nightly(METHODS, ["draft_model", "eagle3"]))
def test_an_engine_answers_and_drafts_as_before(method, tmp_path):
    driver, weights = driver_of(method, tmp_path)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, logprobs=1, ignore_eos=True)

    def answers() -> list[Any]:
        """Return answers with their scores. How much is drafted depends on what was drafted before."""
        found = []
        for prompt in tiny.prompts([40, 9]):
            [number] = tiny.submit(driver, [[token % 60 for token in prompt]], params)
            answer = tiny.drain(driver)[number]
            found.append((answer.token_ids, answer.scores))
            assert driver.reset_prefix_cache()
        return found

    want = answers()
    for way in WAYS:
        put_to_sleep_and_back(driver, weights, *way)
        assert answers() == want, way
    tiny.assert_nothing_is_held(driver)
