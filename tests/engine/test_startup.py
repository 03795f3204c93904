"""Loops turned by the device and by the host, and widths of decode passes: the answers are the same."""

import dataclasses
import logging
import os
import platform
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import machine, start
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.request import Delta
from jaxpaged.engine.setup import Setup
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.step import step
from jaxpaged.step.plan import plan, slots_of
from jaxpaged.step.state import EngineState, Phase
from pallas_kernels.ops import choice
from tests import tiny
from tests.marks import slow_and_nightly

# One program for both: a step for the host to turn, with decode passes of 1, 3 and 4 rows.
BY_HOST = tiny.SMALL | {"loop": "host", "decode_widths": (1, 3)}
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=9, seed=3, logprobs=2),
    SamplingParams(max_tokens=15, temperature=0.0, prompt_logprobs=1),
    SamplingParams(max_tokens=20, seed=4, n=2),
    SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=0.5),
    SamplingParams(max_tokens=1, temperature=0.0),
]


def submit(driver: Driver) -> None:
    """Submit requests of all kinds, under the same numbers in each driver."""
    prompts = tiny.prompts([40, 3, 33, 12, 60, 20, 7])
    requests = [
        each for prompt, its in zip(prompts, PARAMS, strict=False) for each in driver.door.admit(prompt, its)
    ]
    requests += driver.door.admit_search(prompts[-1], BeamSearchParams(beam_width=2, max_tokens=6))
    for number, request in enumerate(requests, start=1):
        driver.add(dataclasses.replace(request, request_id=number))


def assert_same(of_device: Any, of_host: Any) -> None:
    """Compare trees of arrays. Numbers computed in passes of other widths may differ by rounding."""

    def compare(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)

    jax.tree.map(compare, of_device, of_host)


def told(deltas: list[Delta]) -> list[Any]:
    """Return all deltas as a tree."""
    return [
        (d.request_id, d.token_ids, d.finish_reason, d.num_hit_tokens, d.scores, d.prompt_scores, d.beam)
        for d in deltas
    ]


@pytest.mark.slow
def test_turned_by_the_host_the_loop_makes_the_same_states_and_reports():
    """Run by run, of one step or many, until all is answered: with rows that wait, fork, and give way."""
    device, host = drivers = tiny.driver(**tiny.SMALL), tiny.driver(**BY_HOST)
    for driver in drivers:
        submit(driver)
    num_steps = np.random.default_rng(0).integers(1, 20, 1000).tolist()
    while device.has_work:
        steps = num_steps.pop()
        assert_same(told(device.turn(steps)), told(host.turn(steps)))
        assert_same(*(dataclasses.replace(d.snapshot().state, kv_cache=None) for d in drivers))
        assert device.has_work == host.has_work
    assert len(num_steps) < 1000 - 5
    assert device.stats.num_preemptions == host.stats.num_preemptions > 0
    assert device.stats == host.stats
    tiny.assert_nothing_is_held(host)


class WidthModel:
    """Says how many rows its pass has."""

    hidden_size = 1
    dtype = jnp.dtype("float32")

    def __call__(self, token_ids, positions, cache, batch):
        return jnp.full((token_ids.shape[0], 1), token_ids.shape[0], jnp.float32), cache

    def logits(self, hidden):
        return hidden


def test_a_step_takes_the_narrowest_pass_that_holds_all_that_run():
    driver = tiny.driver(**tiny.SMALL)
    config = dataclasses.replace(driver.step_config, decode_widths=(1, 3))

    def widths_of(state: EngineState) -> jax.Array:
        """Return, for each slot, the rows of the pass that computed it."""
        its_plan = plan(state, config)
        state = step.append(state, its_plan, config.max_blocks_touched(state.tables.block_size))
        slots = slots_of(state.rows.running, config.max_num_seqs)
        room = step.no_prompt_scores(config, state.rows)
        return step.forward(WidthModel(), state, its_plan, slots, config, room)[1][:, 0]

    compiled = jax.jit(widths_of)
    found = []
    for prompt in tiny.prompts([9, 5, 12, 3]):
        tiny.submit(driver, [prompt], tiny.greedy(20))
        driver.turn(max_steps=2)
        driver.turn(max_steps=1)
        found.append(compiled(driver.state).astype(int).tolist())
    assert np.count_nonzero(np.asarray(driver.state.rows.phase) == Phase.RUNNING) == 4
    assert found == [[1, 0, 0, 0], [3, 3, 0, 0], [3, 3, 3, 0], [4, 4, 4, 4]]


def test_the_host_turns_the_loop_where_the_device_fails_to(monkeypatch, caplog):
    """Unless it is not to. What fails has used up the state; what runs then is the device's loop again."""
    run_of = start.run_of
    by_hosts = []

    def run_or_fail(*loaded, by_host):
        def fails(params, state, max_steps, host_has_more):
            jax.tree.map(lambda x: x.delete(), state)
            raise jax.errors.JaxRuntimeError("INTERNAL: the graph cannot be launched")

        by_hosts.append(by_host)
        return run_of(*loaded, by_host=False) if by_host else fails

    monkeypatch.setattr(start, "run_of", run_or_fail)
    with pytest.raises(jax.errors.JaxRuntimeError):  # on a CPU it is no graph that fails
        tiny.driver(**tiny.SMALL)
    monkeypatch.setattr(machine, "may_fail_to_launch", lambda error: True)
    with pytest.raises(jax.errors.JaxRuntimeError):
        tiny.driver(**tiny.SMALL, loop="device")
    with caplog.at_level(logging.WARNING):
        driver = tiny.driver(**tiny.SMALL)
    assert by_hosts == [False, False, False, True]
    assert "does not run the serving loop as one program: INTERNAL: the graph cannot" in caplog.text
    [prompt] = tiny.prompts([20])
    assert tiny.generate(driver, [prompt], tiny.greedy(5)) == [tiny.reference_answer(tuple(prompt), 5)]


def test_a_gpu_without_memory_is_not_one_that_fails_to_launch(monkeypatch):
    failed, full = (jax.errors.JaxRuntimeError(f"{code}: x") for code in ("INTERNAL", "RESOURCE_EXHAUSTED"))
    assert not machine.may_fail_to_launch(failed)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert machine.may_fail_to_launch(failed)
    assert not machine.may_fail_to_launch(full)


@pytest.mark.parametrize(
    ("loops", "use_native"), slow_and_nightly([(True, "0"), (False, "1")], [(True, "0")])
)
def test_layers_in_a_loop_and_one_by_one_answer_alike(loops, use_native, monkeypatch):
    """Layers are in a loop where XLA multiplies, too, and one by one where our kernels do."""
    monkeypatch.setenv("JAXPAGED_NATIVE", use_native)
    driver = tiny.driver(loop_over_layers=loops, **tiny.SMALL)
    prompts = tiny.prompts([40, 3, 33])
    want = [tiny.reference_answer(tuple(prompt), 9) for prompt in prompts]
    assert tiny.generate(driver, prompts, tiny.greedy(9)) == want


def test_a_loop_over_layers_that_a_gpu_cannot_have_is_refused(monkeypatch):
    """The refusal comes before anything is loaded."""
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    asked = {"loop_over_layers": True, "dtype": "bfloat16", "attention": "mosaic_gpu", "block_size": 16}

    def refuse(**options):
        Setup(EngineConfig(**asked | options), dataclasses.replace(tiny.CONFIG, head_dim=64)).check()

    refuse()  # on a CPU XLA may copy what it likes
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rule = r"loop_over_layers=True must be None or False with {} and attention by {} on this device"
    with pytest.raises(InputError, match=rule.format("bfloat16", "mosaic_gpu")):
        refuse()  # no GPU of ours
    monkeypatch.setattr(choice, "default_implementation", lambda: "mosaic_gpu")
    refuse()
    refuse(loop_over_layers=None, dtype="float32", attention="xla")
    with pytest.raises(InputError, match=rule.format("float32", "xla")):
        refuse(dtype="float32", attention="xla")
    with pytest.raises(InputError, match=rule.format("bfloat16", "xla")):
        refuse(attention="xla")
    with pytest.raises(InputError, match="loop_over_layers=2 must be"):
        refuse(loop_over_layers=2)


@pytest.mark.parametrize("widths", [(0,), (4,), (2, 1), (1, 1), 2, "1", (1, 1.5), (1, 2, 3, 4, 5)])
def test_decode_widths_that_mean_nothing_are_refused(widths):
    with pytest.raises(
        InputError, match=r"decode_widths=.* must be ints that rise from 1 to less than max_nu"
    ):
        EngineConfig(max_num_seqs=9 if len(str(widths)) > 12 else 4, decode_widths=widths)
    assert EngineConfig(max_num_seqs=4, decode_widths=[1, 3]).decode_widths == (1, 3)


def test_the_cpu_kernels_have_narrower_passes_by_default(monkeypatch):
    def widths(config=tiny.CONFIG, **options):
        return Setup(EngineConfig(**tiny.DEFAULTS | {"max_num_seqs": 64} | options), config).decode_widths

    monkeypatch.setenv("JAXPAGED_NATIVE", "1")
    assert widths() == (2, 16, 32)
    assert widths(max_num_seqs=16) == (4, 8)
    assert widths(max_num_seqs=8) == (2,)
    assert widths(max_num_seqs=4) == widths(decode_widths=()) == widths(loop_over_layers=False) == ()
    assert widths(decode_widths=(3,), loop_over_layers=False) == (3,)
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    assert widths() == widths(loop_over_layers=True) == ()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it will")
@pytest.mark.parametrize(("chosen", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, False)])
def test_memory_that_the_loop_frees_is_kept_for_its_next_run(chosen: dict[str, str], is_kept: bool) -> None:
    """48 MiB, asked for again, are zeroed by the system once; by who has chosen otherwise, each time."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", TOUCHED_AGAIN]
    faults = subprocess.run(command, env=environ | chosen, check=True, capture_output=True, text=True).stdout
    assert (int(faults) < 1000) == is_kept


TOUCHED_AGAIN = """
import ctypes, resource
from jaxpaged.engine import machine

size, libc = 48 * 2**20, ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
machine.keep_freed(size)

def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(memory, 1, size)
    libc.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touch()
print(touch())
"""
