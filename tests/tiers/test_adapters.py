"""Adapters in engines with tiers: their blocks are apart, also where files are torn, gone, or another's."""

import gc
import shutil

import pytest

from jaxpaged.lora import LoRARequest
from tests import tiny, tiny_lora
from tests.tiers.test_engines import BLOCK_BYTES, GIB, Always, ask, small_pieces, tokens

__all__ = ["small_pieces"]  # a fixture
SEEDS = None, 0, 1


@pytest.mark.slow
def test_adapters_are_apart_in_a_directory_whatever_happens_to_it(tmp_path):
    """One prompt without an adapter and with two, in engines with room for ten blocks in host memory."""
    folder, kept = tmp_path / "adapters", tmp_path / "kept"
    folder.mkdir()
    prompt, *others = tiny.prompts([70, *[100] * 6], seed=21)

    def make():
        sizes = {"kv_offloading_size": 10 * BLOCK_BYTES / GIB, "kv_offloading_backend": f"disk:{kept}"}
        driver = tiny_lora.driver(folder, **sizes)
        driver.offloading.rule = Always()
        return driver

    def hits(driver, adapter, seed):
        """Return what a request found on disk, behind others; its answer must be the oracle's."""
        for other in others:
            ask(driver, other)
        driver.offloading.tiers.below.flush()
        answer, num_hits, fetched = ask(driver, prompt, tiny.greedy(4), lora_request=adapter)
        assert tokens(answer) == tiny_lora.reference_answer(seed, prompt, 4)
        assert fetched.get("disk", 0) == num_hits
        return num_hits

    adapters = {seed: None if seed is None else tiny_lora.request(folder, seed) for seed in SEEDS}
    first = make()
    assert [hits(first, adapters[seed], seed) for seed in SEEDS] == [0, 0, 0]
    assert [hits(first, adapters[seed], seed) for seed in SEEDS] == [64, 64, 64]
    # Another engine reads the adapters anew, in another order, and finds the blocks of each.
    second = make()
    assert [hits(second, adapters[seed], seed) for seed in SEEDS[::-1]] == [64, 64, 64]
    # Other arrays under the name and the id of adapter 0 find nothing of its, and then their own.
    second.door.adapters.remove(adapters[0].lora_int_id)
    other = LoRARequest("adapter0", adapters[0].lora_int_id, tiny_lora.write(tmp_path / "other", 2))
    assert [hits(second, other, 2), hits(second, other, 2)] == [0, 64]
    # When others have taken its place on the device, nothing is kept of it.
    for seed, number in ((1, 8), (2, 9)):
        more = LoRARequest(f"more{number}", number, tiny_lora.write(tmp_path / f"more{number}", seed))
        assert hits(second, more, seed) == 64
    gc.collect()
    paths = {str(adapter.request.lora_path) for adapter in second.offloading._adapters}
    assert str(adapters[0].lora_path) not in paths
    assert str(more.lora_path) in paths
    assert hits(first, adapters[0], 0) == 64
    # Files that are torn are misses for all, and are written again.
    for file in kept.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert [hits(first, adapters[seed], seed) for seed in SEEDS] == [0, 0, 0]
    assert [hits(first, adapters[seed], seed) for seed in SEEDS] == [64, 64, 64]
    shutil.rmtree(kept)
    assert [hits(first, adapters[seed], seed) for seed in SEEDS] == [0, 0, 0]
    for driver in (first, second):
        tiny.assert_nothing_is_held(driver)
        driver.close()
