"""Weights of few bits in the blocks of llama.cpp's GGUF files: from bytes to numbers, and of two kinds back.

A row of a weight is a sequence of blocks, a block so many neighbouring values with the scales they share.
What `quantization="int8"` makes of a model's weights is Q8_0, what "int4" makes of them Q4_0: `ON_LOAD`.
"""

import numpy as np

# Values of a block, and its bytes.
BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
# e2m1: a sign, two bits of an exponent that counts from -1, one of a fraction; 0 is for subnormal numbers.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ON_LOAD = {"int8": "Q8_0", "int4": "Q4_0"}


def dequantise(rows: np.ndarray, kind: str) -> np.ndarray:
    """Return the values, float32 [num_rows, num_values], of rows of blocks, uint8 [num_rows, num_bytes]."""
    num_values, num_bytes = BLOCKS[kind]
    blocks = rows.reshape(-1, num_bytes)
    values = np.stack([_DEQUANTISE[kind](block) for block in blocks])
    assert values.shape == (len(blocks), num_values)
    return values.astype(np.float32).reshape(len(rows), -1)


def quantise(weight: np.ndarray, kind: str) -> np.ndarray:
    """Return rows of blocks, uint8 [num_rows, num_bytes], of format Q8_0 or Q4_0.

    They hold the numbers nearest to values, float32 [num_rows, num_values].
    """
    num_values, _ = BLOCKS[kind]
    blocks = weight.astype(np.float32).reshape(-1, num_values)
    made = [_QUANTISE[kind](block) for block in blocks]
    return np.stack(made).reshape(len(weight), -1)


def _q8_0(block: np.ndarray) -> np.ndarray:
    return _float16(block, 0) * block[2:].view(np.int8).astype(np.float32)


def _q4_0(block: np.ndarray) -> np.ndarray:
    """Decode codes that count from -8."""
    return _float16(block, 0) * (_nibbles(block[2:]) - 8)


def _q4_1(block: np.ndarray) -> np.ndarray:
    """Decode codes that count from a minimum."""
    return _float16(block, 0) * _nibbles(block[4:]) + _float16(block, 2)


def _q5_0(block: np.ndarray) -> np.ndarray:
    """Decode codes of five bits; the fifth bits of all codes come first, one per value."""
    return _float16(block, 0) * (_nibbles(block[6:]) + 16 * _bits(block[2:6]) - 16)


def _q5_1(block: np.ndarray) -> np.ndarray:
    return _float16(block, 0) * (_nibbles(block[8:]) + 16 * _bits(block[4:8])) + _float16(block, 2)


def _q4_k(block: np.ndarray) -> np.ndarray:
    """Decode eight groups of 32 values. Two share 32 bytes: one has the lower halves, one the upper."""
    scales, minima = _k_scales(block)
    values = []
    for group in range(8):
        pair = block[16 + 32 * (group // 2) :][:32]
        codes = pair >> 4 if group % 2 else pair & 15
        values.append(scales[group] * codes.astype(np.float32) - minima[group])
    return np.concatenate(values)


def _q5_k(block: np.ndarray) -> np.ndarray:
    """Decode Q4_K's codes with a fifth bit. 32 bytes before them hold one for each value."""
    scales, minima = _k_scales(block)
    values = []
    for group in range(8):
        pair = block[48 + 32 * (group // 2) :][:32]
        codes = (pair >> 4 if group % 2 else pair & 15) + 16 * (block[16:48] >> group & 1)
        values.append(scales[group] * codes.astype(np.float32) - minima[group])
    return np.concatenate(values)


def _q6_k(block: np.ndarray) -> np.ndarray:
    """Decode two halves of 128 values: four bits in 64 bytes, two bits in 32; a scale per 16 values."""
    scales = _float16(block, 208) * block[192:208].view(np.int8).astype(np.float32)
    codes = []
    for half in range(2):
        low, high = block[64 * half :][:64], block[128 + 32 * half :][:32]
        for quarter in range(4):
            four = low[32 * (quarter % 2) :][:32]
            four = four >> 4 if quarter >= 2 else four & 15
            two = high >> 2 * quarter & 3
            codes.append((four + 16 * two).astype(np.float32) - 32)
    return np.repeat(scales, 16) * np.concatenate(codes)


def _mxfp4(block: np.ndarray) -> np.ndarray:
    """Decode codes of e2m1 with a scale that is a power of two, stored as a byte: the exponent plus 127."""
    codes = _nibbles(block[1:]).astype(np.int64)
    return np.float32(2.0 ** (int(block[0]) - 127)) * E2M1[codes]


def _k_scales(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode scales and minima of eight groups: six bits each in twelve bytes, times two numbers of all
    groups.
    """
    packed = block[4:16].astype(np.int32)
    scales, minima = [], []
    for group in range(8):
        if group < 4:
            scales.append(packed[group] & 63)
            minima.append(packed[group + 4] & 63)
        else:
            scales.append((packed[group + 4] & 15) + 16 * (packed[group - 4] >> 6))
            minima.append((packed[group + 4] >> 4) + 16 * (packed[group] >> 6))
    as_floats = np.array([scales, minima], np.float32)
    return _float16(block, 0) * as_floats[0], _float16(block, 2) * as_floats[1]


def _float16(block: np.ndarray, start: int) -> np.float32:
    """Return the number in two bytes, as float32."""
    return np.float32(block[start : start + 2].copy().view("<f2")[0])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return all lower halves of the bytes, then all upper ones."""
    return np.concatenate([codes & 15, codes >> 4]).astype(np.float32)


def _bits(codes: np.ndarray) -> np.ndarray:
    return np.unpackbits(codes, bitorder="little").astype(np.float32)


def _to_q8_0(block: np.ndarray) -> np.ndarray:
    """Encode values so that the largest becomes 127 or -127; halves are rounded away from zero."""
    scale = np.abs(block).max() / np.float32(127)
    scaled = block * _inverse(scale)
    codes = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))
    return np.concatenate([_bytes(scale), codes.astype(np.int8).view(np.uint8)])


def _to_q4_0(block: np.ndarray) -> np.ndarray:
    """Encode values so that the largest becomes -8, for there is no 8; halves are rounded up."""
    scale = block[np.abs(block).argmax()] / np.float32(-8)
    codes = np.floor(block * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return np.concatenate([_bytes(scale), codes[:16] + 16 * codes[16:]])


def _inverse(scale: np.float32) -> np.float32:
    return np.float32(0) if scale == 0 else np.float32(1) / scale


def _bytes(scale: np.float32) -> np.ndarray:
    return np.array([scale]).astype("<f2").view(np.uint8)


_DEQUANTISE = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
_QUANTISE = {"Q8_0": _to_q8_0, "Q4_0": _to_q4_0}
