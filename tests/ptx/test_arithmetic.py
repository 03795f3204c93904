"""Meanings of instructions on registers, beside exact arithmetic in Python."""

import fractions

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.texts import run, stored, words

RNG = np.random.default_rng(0)


def computed(text, *columns, result=np.uint32):
    """Return %r10 after an instruction on %r1, %r2, ..., a column of 32 words each."""
    inputs = np.stack([np.ascontiguousarray(c).view(np.uint32) for c in columns])
    body = "\n".join([words(1, len(columns), 0), text, stored(10, 1, 1)])
    return run(body, [inputs], [((32,), result)]).outputs[0]


def singles():
    """Return float32 of all sizes, and the special ones."""
    x = (RNG.standard_normal(32) * 10.0 ** RNG.integers(-12, 6, 32)).astype(np.float32)
    x[:8] = [np.inf, -np.inf, np.nan, 0, -0.0, 65519, 65520, 2**-24]
    return x


@pytest.mark.parametrize(("kind", "dtype"), [("bf16x2", ml_dtypes.bfloat16), ("f16x2", np.float16)])
def test_a_pair_is_rounded_to_even_the_first_operand_above(kind, dtype):
    high, low = singles(), singles()[::-1].copy()
    low[5] = np.float32(1 + 2**-8)  # a tie of bfloat16
    got = computed(f"cvt.rn.{kind}.f32 %r10, %r1, %r2;", high, low)
    halves = got.view(np.uint16).reshape(32, 2)
    for n, x in ((1, high), (0, low)):
        numbers = halves[:, n].copy().view(dtype).astype(np.float32)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(numbers, x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)]
)
def test_eight_bits_become_sixteen_and_back(kind, dtype):
    bits = RNG.integers(0, 2**16, 32).astype(np.uint32)
    text = f"cvt.u16.u32 %h1, %r1; cvt.rn.f16x2.{kind} %r10, %h1;"
    got = computed(text, bits).view(np.float16).reshape(32, 2)
    pair = bits.astype(np.uint16).view(np.uint8).reshape(32, 2)
    np.testing.assert_array_equal(got, np.ascontiguousarray(pair).view(dtype).astype(np.float16))
    back = f"cvt.rn.satfinite.{kind}.f32 %h1, %r1, %r2; cvt.u32.u16 %r10, %h1;"
    high, low = RNG.standard_normal((2, 32)).astype(np.float32) * 1e3
    got = computed(back, high, low).astype(np.uint16).view(np.uint8).reshape(32, 2)
    largest = float(ml_dtypes.finfo(dtype).max)
    for n, x in ((0, low), (1, high)):
        wanted = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(np.ascontiguousarray(got[:, n]).view(dtype).astype(np.float32), wanted)


def test_fma_rounds_once():
    """Rounding in float64 first would lose what decides the tie."""
    a, b, c = (RNG.standard_normal(32).astype(np.float32) for _ in range(3))
    a[0] = b[0] = 1 + 2**-12
    c[0] = 2.0**-60
    c[1:16] = (c[1:16] * np.float32(2.0**-30)).astype(np.float32)
    got = computed("fma.rn.f32 %r10, %r1, %r2, %r3;", a, b, c, result=np.float32)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        exact = fractions.Fraction(float(x)) * fractions.Fraction(float(y)) + fractions.Fraction(float(z))
        others = [np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf)]
        error = abs(fractions.Fraction(float(result)) - exact)
        assert all(error <= abs(fractions.Fraction(float(other)) - exact) for other in others)
    assert got[0] == np.float32(1 + 2**-11 + 2**-23)


def _bytes(x, shift):
    return x >> shift & 255


def _even_bytes(a, b):
    return _bytes(a, 0) | _bytes(a, 16) << 8 | _bytes(b, 0) << 16 | _bytes(b, 16) << 24


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("prmt.b32 %r10, %r1, %r2, 0x6420;", _even_bytes),
        ("prmt.b32 %r10, %r1, %r2, 0x000f;", lambda a, b: 255 * (b >> 31) | _bytes(a, 0) * 0x01010100),
        ("mul.hi.u32 %r10, %r1, %r2;", lambda a, b: a * b >> 32),
        ("mad.lo.s32 %r10, %r1, %r2, %r1;", lambda a, b: a * b + a),
        ("shf.l.wrap.b32 %r10, %r1, %r2, 5;", lambda a, b: (b << 5) | (a >> 27)),
        ("bfe.u32 %r10, %r1, 7, 9;", lambda a, b: a >> 7 & 511),
        ("shl.b32 %r10, %r1, 32;", lambda a, b: 0),
        ("lop3.b32 %r10, %r1, %r2, %r1, 0x3c;", lambda a, b: a ^ b),
        ("popc.b32 %r10, %r1;", lambda a, b: a.bit_count()),
        ("div.u32 %r10, %r1, %r2;", lambda a, b: a // b),
        ("rem.u32 %r10, %r1, %r2;", lambda a, b: a % b),
    ],
)  # fmt: skip
def test_integers_and_bits(text, function):
    a, b = RNG.integers(1, 2**32, (2, 32)).astype(np.uint32)
    wanted = [function(int(x), int(y)) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(computed(text, a, b), wanted)


def test_not_a_number_is_what_each_form_says():
    x, y = singles(), np.ones(32, np.float32)
    np.testing.assert_array_equal(computed("max.f32 %r10, %r1, %r2;", x, y, result=np.float32), np.fmax(x, y))
    np.testing.assert_array_equal(
        computed("max.NaN.f32 %r10, %r1, %r2;", x, y, result=np.float32), np.maximum(x, y)
    )
    ordered = computed("setp.lt.f32 %p1, %r1, %r2; selp.b32 %r10, 1, 0, %p1;", x, y)
    unordered = computed("setp.ltu.f32 %p1, %r1, %r2; selp.b32 %r10, 1, 0, %p1;", x, y)
    np.testing.assert_array_equal(ordered, x < y)
    np.testing.assert_array_equal(unordered, ~(x >= y))
    small = computed("ex2.approx.ftz.f32 %r10, %r1;", np.full(32, -130, np.float32), result=np.float32)
    assert not small.any()
