"""The oracle of weights of few bits against the package that llama.cpp's makers have for them."""

import gguf
import numpy as np
import pytest

from reference import quantisation


def blocks(kind: str, num_rows: int = 3, num_values: int = 512) -> np.ndarray:
    """Draw rows of blocks of any bytes, whose scales are ordinary, subnormal, zero or negative numbers."""
    rng = np.random.default_rng(0)
    size, num_bytes = quantisation.BLOCKS[kind]
    found = rng.integers(0, 256, (num_rows, num_values // size, num_bytes), dtype=np.uint8)
    scales = np.array([0.013, -0.5, 3e-7, 0.0, 1.0, 40000.0, 6.1e-5], np.float16)
    if kind == "MXFP4":  # its scale is an exponent; of the least ones XLA makes zeros, and the last is none
        found[..., 0] = rng.choice([2, 98, 126, 127, 128, 150, 200], found.shape[:2])
        return found.reshape(num_rows, -1)
    for start in {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208]}.get(kind, [0, 2]):
        drawn = rng.choice(scales, (*found.shape[:2], 1))
        found[..., start : start + 2] = drawn.view(np.uint8)
    return found.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", quantisation.BLOCKS)
def test_blocks_have_the_values_that_gguf_gives_them(kind):
    rows = blocks(kind)
    found = quantisation.dequantise(rows, kind)
    assert found.shape == (3, 512)
    assert np.unique(found).size > 50
    np.testing.assert_array_equal(found, gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", quantisation.ON_LOAD.values())
def test_blocks_are_made_as_gguf_makes_them(kind):
    weight = np.random.default_rng(1).standard_normal((4, 96), np.float32)
    weight[0, :32] = 0
    weight[1] = np.arange(96) / 127 - 0.375  # with halves between two codes
    weight[2] *= 1e-6
    np.testing.assert_array_equal(
        quantisation.quantise(weight, kind), gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    )
