"""Primitives of GPUs before Hopper: what they compute, and decode steps with them.

Kernels are interpreted with Pallas' own primitives in place of these (`primitives.interpretable`), and
nothing else changed. Unproven without a chip: that a GPU's cp.async arrives at its barrier after its bytes,
and the order of a warpgroup's four warps.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.research.verify.cases.decode import DecodeCase
from pallas_kernels.gpu import common, cp_async
from tests.kernels.checks import assert_close
from tests.kernels.interpreter import fresh_interpreter, races_found
from tests.kernels.primitives import interpretable
from tests.kernels.test_mosaic_interpreter import ALONE, interpret


@pytest.mark.parametrize("width", [32, 64, 128])
def test_rows_lie_as_their_swizzle_says(width: int) -> None:
    """An address's bits from 4 up are exchanged by those from 7 up: one, two or three by the width."""
    rows, chunks = 16, 2 * width // 16
    tile = cp_async.Tile(width // 16, rows_stride=8 * width, columns_stride=rows * width, row_stride=width)
    row, chunk = (each.ravel() for each in np.indices((rows, chunks)))
    column = chunk * 16
    plain = row // 8 * 8 * width + column // width * rows * width + row % 8 * width + column % width
    bits = width // 16 - 1
    np.testing.assert_array_equal(cp_async.offset_of(row, chunk, tile), plain ^ (plain >> 7 & bits) << 4)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_float16_by_its_bits(dtype: str) -> None:
    """What `common.widened` computes on GPUs without an instruction for it: of all numbers, by NumPy."""
    every = np.arange(256, dtype=np.uint8)
    zeros = np.zeros((64, 4), np.uint8)
    choice = np.hstack([every.reshape(-1, 4), zeros])  # prmt: digits of the pair name bytes of both operands
    places = [[pair >> 4 * digit & 15 for digit in range(4)] for pair in common.SPREAD]
    words = choice[:, np.array(places).reshape(-1)].copy().view(np.uint32).reshape(-1)
    if dtype == "float8_e4m3fn":
        words = words & np.uint32(common.SIGN_BITS) | (words & np.uint32(common.OTHER_BITS)) >> 1
    got = words.view(np.float16)
    if dtype == "float8_e4m3fn":
        got = got * np.uint32([common.TIMES_256]).view(np.float16)[0]
    wanted = every.view(jnp.dtype(dtype)).astype(np.float16)
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[is_number], wanted[is_number])
    assert is_number.sum() >= 250


CASES = (
    DecodeCase("tiles and partitions, soft cap", seq_lens=(15, 0, 256), soft_cap=20.0, **ALONE),
    DecodeCase("head_dim 80, window, a ring in turn", seq_lens=(370, 12), sliding_window=300, head_dim=80),
    DecodeCase("float8, sinks", seq_lens=(130, 5), cache_dtype="float8_e4m3fn", sinks=True),
)


@pytest.mark.usefixtures(fresh_interpreter.__name__)
@pytest.mark.parametrize(
    "c",
    [
        pytest.param(c, id=c.name, marks=marks)
        for c, marks in zip(CASES, ([], pytest.mark.slow, pytest.mark.nightly), strict=True)
    ],
)
def test_decode_before_hopper_equals_the_oracle_without_a_race(
    c: DecodeCase, capsys: pytest.CaptureFixture[str]
) -> None:
    with interpretable("8.0") as used:
        got = interpret(c, "decode")
    assert all(used[name] for name in ("mma", "copy", "wait", "arrive", "commit", "store_rows"))
    assert not used["wrong phase"]
    assert_close(c, got)
    assert not races_found(capsys)
