"""The loop compiled for an H200, on a machine without one: no copy of the cache, and one CUDA graph.

That it is one graph is read from the compiled program; how it runs has not been measured.
"""

import os

import jax
import pytest

from benchmarks import compile_loop, cuda_compiler
from benchmarks.compile_loop import Case, Report
from tests.once import once

missing = cuda_compiler.missing_packages()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs the cuda-compile extra: {', '.join(missing)}")

# A case takes 35 s of processor time. JAXPAGED_EXHAUSTIVE=1 compiles all of them. The newest JAX compiles
# some, the oldest those of them that move blocks to the host, and whose layers are in a loop.
SWAPPED, ADAPTED = Case("mosaic_gpu", 128, 512, 256), Case("mosaic_gpu", 128, num_adapters=4)
# Layers one by one, and two and four of them in a loop, the four with twice the blocks.
LOOPED, DEEPER = (Case("mosaic_gpu", 128, 256 * layers, num_layers=layers, loops=True) for layers in (2, 4))
IS_NEWEST = jax.__version_info__ >= (0, 12)
CHOSEN = (SWAPPED, ADAPTED, LOOPED, DEEPER, Case("xla")) if IS_NEWEST else (SWAPPED, LOOPED)
LEAN = {str(case) for case in CHOSEN}
LOOPED_NODES = 18  # of a layer: norms are slices, and turns are counted
STEP_NODES = 66
EVERY = {str(case): case for case in compile_loop.cases() if case.capability == Case.capability}
WANTED = set(EVERY) if os.environ.get("JAXPAGED_EXHAUSTIVE") else LEAN


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    found = once(tmp_path_factory, "compiled_loops", lambda: compile_loop.run(sorted(WANTED)))
    return {report.case: report for report in found}


def test_every_case_compiles(reports: dict[str, Report]) -> None:
    assert set(reports) == WANTED


def test_the_whole_state_is_updated_in_place(reports: dict[str, Report]) -> None:
    for report in reports.values():
        assert report.alias_bytes == report.state_bytes, report
        assert report.alias_host_bytes == report.state_host_bytes, report
    assert reports[str(SWAPPED)].state_host_bytes == 256 * 2 * 2 * 16 * 2 * 128 * 2  # K and V of two layers


def test_no_array_of_the_cache_is_copied(reports: dict[str, Report]) -> None:
    """The scratch memory has no room even for K of one layer: products take three quarters of it. With
    twice the blocks the allocator takes a few words more for each, where K and V take 32 KiB.
    """
    ours = [report for name, report in reports.items() if name.startswith("mosaic_gpu d128")]
    assert len(ours) >= 2
    for report in ours:
        assert report.temp_bytes < 512 * 16 * 2 * 128 * 2
    if str(DEEPER) in reports:
        assert 0 <= reports[str(DEEPER)].temp_bytes - reports[str(LOOPED)].temp_bytes <= 64 * 512


def test_nothing_is_gathered_in_the_hosts_memory(reports: dict[str, Report]) -> None:
    assert {report.temp_host_bytes for report in reports.values()} == {0}


def test_with_the_packages_flags_the_loop_is_one_cuda_graph(reports: dict[str, Report]) -> None:
    """The one thunk is a command buffer, which holds all others: kernels, loops, branches, swaps.

    Without the flags the loop is in none.
    """
    for name, report in reports.items():
        assert (report.outermost == ("kCommandBuffer",)) == EVERY[name].flags, report
        assert report.thunks["kWhile"] > 0, report
        assert report.thunks["kConditional"] > 0, report
        assert not {kind for kind in report.thunks if kind.startswith("kHost")}, report


def test_a_decode_layer_and_the_rest_of_a_step_have_few_nodes(reports: dict[str, Report]) -> None:
    """A node takes a microsecond or so, whatever it does: eleven a layer, so 32 layers 0.4 ms.

    Room for adapters costs a layer one, and a row with one nine: two products for each of its four.
    """
    for name, report in reports.items():
        if EVERY[name].attention == "mosaic_gpu" and not EVERY[name].loops:
            has_room = EVERY[name].num_adapters > 0
            assert 0 < report.layer_nodes <= 11 + has_room, report
            assert 0 < report.step_nodes <= STEP_NODES + 4 * has_room, report
            assert (report.adapted_layer_nodes > report.layer_nodes) == has_room, report
            assert report.adapted_layer_nodes <= 20, report


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_the_loop_is_one_cuda_graph_on_every_target(capability: str) -> None:
    """Attention by our kernels, products by XLA, and no copy of the cache."""
    case = Case("mosaic_gpu", 128, capability=capability)
    [report] = compile_loop.run([str(case)])
    assert report.outermost == ("kCommandBuffer",)
    assert report.alias_bytes == report.state_bytes
    assert report.temp_bytes < 512 * 16 * 2 * 128 * 2


def test_a_loop_over_layers_grows_with_no_layer_and_copies_no_weights(reports: dict[str, Report]) -> None:
    looped = reports[str(LOOPED)]
    if deeper := reports.get(str(DEEPER)):
        assert looped.thunks == deeper.thunks
        assert looped.layer_nodes == deeper.layer_nodes
    assert looped.layer_nodes <= LOOPED_NODES
    assert looped.step_nodes <= STEP_NODES
    # Sums of 64 rows are the largest of them, 384 KiB. A layer has 2.1 MB of weights.
    assert looped.temp_bytes < 0.8e6


def test_nodes_are_counted_by_layer() -> None:
    """A loop has two nodes of its own, and a branch with two layers of three beside two others."""
    inside = [
        "kCopy",
        "kCustomKernel",
        "kCustomCall",
        "kCopy",
        "kCustomKernel",
        "kCustomCall",
        "kCopy",
        "kCopy",
    ]
    thunks = [(0, "kCommandBuffer"), (4, "kWhile"), (8, "kCopy"), (8, "kConditional")]
    thunks += [*((12, kind) for kind in inside), (8, "kConditional"), (12, "kCopy"), (8, "kCustomKernel")]
    assert compile_loop.count_nodes(thunks) == (3, 2 + 2)
    # With a branch in place of another, each around a layer: the first has one node more.
    longer = [(12, "kConditional"), *((16, kind) for kind in ("kCopy", *inside[1:5], "kCopy", *inside[5:]))]
    shorter = [(12, "kConditional"), *((16, kind) for kind in inside)]
    thunks = [*thunks[:4], (12, "kCopy"), *longer, *shorter, *thunks[-3:]]
    assert compile_loop.count_nodes(thunks) == (3, 2 + 1 + 2)
    assert compile_loop.count_nodes(thunks, passes_behind=1)[0] == 4
    # A loop over layers in the branch, its condition before its body.
    loop = [(12, "kWhile"), *((16, kind) for kind in ("kCustomKernel", *inside))]
    thunks = [*thunks[:4], (12, "kCopy"), *loop, *thunks[-3:]]
    assert compile_loop.count_nodes(thunks, LOOPED) == (1 + len(inside), 2 + 1)


def test_thunks_are_read_with_their_depth() -> None:
    dump = """000: kCommandBuffer [source | sink]
    002: kWhile        [prev=001 (1)  | next=586 (1) ]
condition:
        003: kCustomKernel [source       | next=004 (1)] input_reduce_fusion_4 grid: [1, 1, 1]
001: kCopy          [source       | next=002 (1)] kCopy
"""
    assert cuda_compiler.read_thunks(dump) == [
        (0, "kCommandBuffer"),
        (4, "kWhile"),
        (8, "kCustomKernel"),
        (0, "kCopy"),
    ]
