"""Barriers of the kernels' forms without wgmma, or without TMA: each is taken away in turn.

As the tests of Hopper's forms do it, with the primitives of `primitives.py`. Registers are loaded from shared
memory here, which the race detector sees. It takes a warpgroup for one thread. So it sees no lack of the
barriers among a warpgroup's own threads, `commit`, by which nothing but its warps is ordered.
"""

import itertools
from collections.abc import Callable

import pytest

from tests.kernels import test_mosaic_interpreter as decode
from tests.kernels import test_mosaic_products as quantised
from tests.kernels import test_mosaic_tiles as prompts
from tests.kernels import test_product as dense
from tests.kernels.interpreter import (
    OPTIONAL,
    fresh_interpreter,
    is_run_with_more_threads,
    unnoticed_calls,
)
from tests.kernels.primitives import interpretable

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)


def run_decode() -> None:
    decode.assert_close(decode.RING, decode.launch(decode.RING, decode.CUT))


def run_prompts() -> None:
    prompts.assert_close(prompts.RING, prompts.launch(prompts.RING))


def run_widened() -> None:
    prompts.assert_close(prompts.RINGS, prompts.launch(prompts.RINGS))


FORMS: dict[str, Callable[[], None]] = {
    "decode": run_decode,
    "prompts": run_prompts,
    "prompts, widened": run_widened,
    "quantised products": quantised.launch,
    "layers' products": dense.launch,
}
WAITS = {"decode": 5, "prompts": 6, "prompts, widened": 7, "quantised products": 3, "layers' products": 3}
# With tensor memory those of the warp that multiplies, and for it; of two consumers none for another.
MORE_WAITS = {"prompts": 4, "prompts, widened": 5}
AMONG_WARPS = ("commit", "commit_smem")
# With tensor memory: the queries, which a consumer and who multiplies both wait for; and what is not run
# here: sums that are rescaled, and a tile without keys.
TENSOR_MEMORY = {
    ("barrier_wait", "load_queries"),
    ("wait_load_tmem", "_rescale"),
    ("commit_tmem", "_no_keys"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "capability"),
    [*itertools.product(FORMS, ("8.0", "12.0")), ("prompts", "10.0"), ("prompts, widened", "10.0")],
)
def test_every_barrier_is_needed(
    form: str, capability: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Arrivals are not tried: without one a thread would wait for ever."""
    if capability == "10.0" and is_run_with_more_threads(request):
        return
    with interpretable(capability):
        calls, unnoticed = unnoticed_calls(
            FORMS[form], lambda call: "arrive" in call[0], capsys, shadows=False
        )
    waits = [call for call in calls if call[0] in ("wait", "barrier_wait")]
    more = MORE_WAITS[form] if capability == "10.0" else 0
    assert len(waits) == WAITS[form] + more, calls
    unseen = TENSOR_MEMORY if capability == "10.0" else set()
    assert {call for call in unnoticed - OPTIONAL - unseen if call[0] not in AMONG_WARPS} == set()
