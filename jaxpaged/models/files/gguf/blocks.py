"""GGUF's quantised blocks as codes, scales and minima; nothing of a value is lost on the way.

Codes are a byte each here, of one tensor at a time. `reference/quantisation.py` says what blocks mean.
"""

import math

import gguf
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError
from jaxpaged.models.quantised.codes import CodedRows, CodeFormat, TensorSlice

MXFP4 = CodeFormat(4, 32, "float32", False, is_float=True)
# Tensor types that stay quantised. Products do not support other types.
FORMATS = {
    "Q8_0": CodeFormat(8, 32, "float16", False),
    "Q4_0": CodeFormat(4, 32, "float16", False),
    "Q4_1": CodeFormat(4, 32, "float16", True),
    "Q5_0": CodeFormat(8, 32, "float16", False),
    "Q5_1": CodeFormat(8, 32, "float16", True),
    "Q4_K": CodeFormat(4, 32, "float32", True),
    "Q5_K": CodeFormat(8, 32, "float32", True),
    "Q6_K": CodeFormat(8, 16, "float32", False, is_short=True),
    "MXFP4": MXFP4,
}


def rows(raw: np.ndarray, kind: str, name: str) -> CodedRows:
    """Decode rows of blocks, uint8 [outputs, bytes], of one of FORMATS.

    Raises: InputError with the tensor's name if a scale is NaN or infinite.
    """
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    decoded = _READ[kind](np.asarray(raw).reshape(raw.shape[0], -1, num_bytes))
    for numbers in decoded[1:]:
        if numbers is not None and not np.isfinite(numbers).all():
            raise InputError(f"weight {name!r} has NaN or infinity in it, must be finite")
    return CodedRows(decoded.codes.reshape(raw.shape[0], -1), *decoded[1:])


def shape_of(raw: np.ndarray, kind: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of rows of blocks."""
    length, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return raw.shape[0], math.prod(raw.shape[1:]) // num_bytes * length


def part_of(raw: np.ndarray, kind: str, name: str, part: TensorSlice) -> CodedRows:
    """Decode a slice of rows of blocks; no more is read than whole blocks."""
    length, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = part.groups(length)
    lines = raw.reshape(raw.shape[0], -1)[part.span(), blocks.start * num_bytes : blocks.stop * num_bytes]
    decoded = rows(part.of(lines), kind, name)
    first, size = blocks.start * length, FORMATS[kind].group_size
    groups = slice((part.inputs.start - first) // size, cdiv(part.inputs.stop - first, size))
    codes = decoded.codes[:, part.inputs.start - first : part.inputs.stop - first]
    return CodedRows(
        codes, decoded.scales[:, groups], None if decoded.minima is None else decoded.minima[:, groups]
    )


def quantised(weight: np.ndarray, kind: str, name: str) -> CodedRows:
    """Quantise a weight [outputs, inputs] to Q8_0 or Q4_0; inputs missing to a group are zeros.

    Raises: InputError with the weight's name if a scale is beyond float16.
    """
    wide = np.asarray(weight, np.float32)
    missing = -wide.shape[1] % FORMATS[kind].group_size
    wide = np.pad(wide, ((0, 0), (0, missing))) if missing else wide
    with np.errstate(over="ignore"):
        return rows(gguf.quantize(wide, gguf.GGMLQuantizationType[kind]), kind, name)


def _q8_0(blocks: np.ndarray) -> CodedRows:
    return CodedRows(blocks[..., 2:].view(np.int8), _half(blocks, 0), None)


def _q4_0(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_nibbles(blocks[..., 2:], 16), _half(blocks, 0), None)


def _q4_1(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> CodedRows:
    codes = _nibbles(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4
    return CodedRows(codes.view(np.int8) - np.int8(16), _half(blocks, 0), None)


def _q5_1(blocks: np.ndarray) -> CodedRows:
    codes = _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return CodedRows(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_nibbles(blocks[..., 16:], 32), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> CodedRows:
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[..., None, 16:48] >> groups & 1
    codes = _nibbles(blocks[..., 48:], 32) | fifth.reshape(*blocks.shape[:-1], -1) << 4
    return CodedRows(codes.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> CodedRows:
    halves = (*blocks.shape[:-1], 2)
    four = _nibbles(blocks[..., :128], 64).reshape(*halves, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    two = blocks[..., 128:192].reshape(*halves, 1, 32) >> shifts & 3
    codes = (four | two << 4).view(np.int8) - np.int8(32)
    scales = _half(blocks, 208).astype(np.float32)[..., None] * blocks[..., 192:208].view(np.int8)
    return CodedRows(codes.reshape(*blocks.shape[:-1], -1), _by_row(scales), None)


def _mxfp4(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_nibbles(blocks[..., 1:], 16), powers(blocks[..., 0]), None)


def powers(exponents: np.ndarray) -> np.ndarray:
    """Return e8m0's numbers, float32: powers of two from 2**-127 on; the last code is NaN."""
    values = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), values)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the minimum of each group of 32, multiplied out."""
    low, middle, high = np.split(blocks[..., 4:16], 3, axis=-1)
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    all_scales, all_minima = (_half(blocks, i).astype(np.float32)[..., None] for i in (0, 2))
    return _by_row(all_scales * scales), _by_row(-all_minima * minima)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 number at byte `start` of each block: [outputs, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype(np.float16)


def _nibbles(packed: np.ndarray, run: int) -> np.ndarray:
    """Return codes of four bits: the lower halves of each `run` bytes, then the upper ones."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, run)
    return (runs >> np.array([[0], [4]], np.uint8) & 15).reshape(*packed.shape[:-1], -1)


def _bits(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _by_row(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(numbers.shape[0], -1)


_READ = {
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
