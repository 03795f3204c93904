"""The loop of a model on eight H200s, compiled on a machine without one."""

import pytest

from benchmarks import compile_parallel, cuda_compiler

missing = cuda_compiler.missing_packages()
needs_compiler = pytest.mark.skipif(
    bool(missing), reason=f"needs the cuda-compile extra: {', '.join(missing)}"
)


@pytest.mark.slow
@needs_compiler
def test_eight_devices_add_up_twice_a_layer_and_gather_logits_once() -> None:
    """For each of the loop's two passes, of 8 rows that decode and of 4 tiles of 32 prompt tokens."""
    report = compile_parallel.run(str(compile_parallel.SMALL))
    assert report.collectives == {
        "all-reduce f32[8,1024]": 2 * 2,
        "all-reduce f32[128,1024]": 2 * 2,
        "all-gather f32[8,4096]": 1,
        "all-gather f32[32,4096]": 1,  # a prompt's logprobs, where they are asked for
        "all-reduce u32[2]": 2,  # behind the loop: that all devices have come to the same state
    }
    assert report.outermost.count("kWhile") == 1  # no graph as on one device: XLA turns the loop
    assert not [kind for kind in report.outermost if kind.startswith("kHost")]
    table, heads = 4096 * 1024, 4096 * 1024 // 8
    layers = 2 * (1024 * (1024 + 2 * 1024) + 1024 * 1024 + 3 * 1024 * 2048) // 8
    assert report.weight_bytes == 2 * (table + heads + layers + 5 * 1024)
    # K and V and the rest of the state stay where they are, and the compiled loop's own memory is small.
    assert report.cache_bytes == report.num_blocks * 2 * 2 * 16 * 128 * 2
    assert report.alias_bytes > report.cache_bytes
    assert report.temp_bytes < 64 * 2**20
    assert report.fits


def test_collectives_are_counted_by_their_results() -> None:
    text = """
  %a = f32[8,64]{1,0} all-reduce(%x), channel_id=1
  %b = ((f32[8,16]{0,1}), f32[8,128]{0,1}) all-gather-start(%y), channel_id=2
  %c = f32[8,128]{0,1} all-gather-done(%b)
  %d = (f32[8,64]{1,0}, u32[]) all-reduce(%x, %z), channel_id=3
  %e = bf16[8]{0} fusion(%a), metadata={op_name="all-reduce"}
"""
    assert compile_parallel.collectives(text) == {
        "all-gather f32[8,128]": 1,
        "all-reduce f32[8,64]": 1,
        "all-reduce f32[8,64] u32[]": 1,
    }
