"""Weights of few bits as tools leave them in safetensors files, and e4m3: from tensors to numbers.

Tensors have the names that they have in a file. All numbers are float32 [outputs, inputs].
"""

import numpy as np

from .quantisation import E2M1

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs whose codes a word has, from its lowest bits on


def awq(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Decode an AWQ weight.

    qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] are words of 4-bit codes; scales [groups,
    outputs].
    """
    codes, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].astype(np.float32)
    num_inputs, num_outputs = len(codes), scales.shape[1]
    group_size = num_inputs // len(scales)
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    for place, output in enumerate(AWQ_ORDER):
        code, zero = field(codes, 4, place), field(zeros, 4, place)
        for i in range(num_inputs):
            group = i // group_size
            weight[output::8, i] = (code[i] - zero[group]) * scales[group, output::8]
    return weight


def gptq(tensors: dict[str, np.ndarray], bits: int, group_size: int, zero_is_less_one: bool) -> np.ndarray:
    """Decode a GPTQ weight.

    A word of qweight [inputs * bits / 32, outputs] holds neighbouring inputs. A word of qzeros [groups,
    outputs * bits / 32] holds neighbouring outputs. The rest: scales [groups, outputs]; g_idx [inputs], if
    there is one.

    In the first version of the format zero points are stored less one.
    """
    codes, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].astype(np.float32)
    count = 32 // bits
    num_inputs, num_outputs = count * len(codes), scales.shape[1]
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    for i in range(num_inputs):
        group = tensors["g_idx"][i] if "g_idx" in tensors else i // group_size
        code = field(codes[i // count], bits, i % count)
        for place in range(count):
            zero = field(zeros[group], bits, place)
            if zero_is_less_one:
                zero = (zero + 1) % 2**bits
            entries = slice(place, None, count)
            weight[entries, i] = (code[entries] - zero) * scales[group, entries]
    return weight


def packed(tensors: dict[str, np.ndarray], bits: int) -> np.ndarray:
    """Decode a packed weight of compressed-tensors.

    Tensors: weight_packed [outputs, words], weight_scale [outputs, groups], and sometimes weight_zero_point
    [words, groups] and weight_g_idx [inputs]. All codes count from -2**(bits - 1).
    """
    codes, scales = tensors["weight_packed"], tensors["weight_scale"].astype(np.float32)
    num_outputs, num_inputs = tensors["weight_shape"]
    count, least = 32 // bits, -(2 ** (bits - 1))
    group_size = num_inputs // scales.shape[1]
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    for i in range(num_inputs):
        group = tensors["weight_g_idx"][i] if "weight_g_idx" in tensors else i // group_size
        code = least + field(codes[:, i // count], bits, i % count)
        zero = np.zeros(num_outputs)
        if "weight_zero_point" in tensors:
            for output in range(num_outputs):
                word = tensors["weight_zero_point"][output // count, group]
                zero[output] = least + field(word, bits, output % count)
        weight[:, i] = (code - zero) * scales[:, group]
    return weight


def scaled(
    codes: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None = None,
    block: tuple[int, int] | None = None,
) -> np.ndarray:
    """Multiply integers, or numbers of e4m3, by their scales.

    There is one scale, one per output, one per group of an output's inputs, or one per block.
    """
    num_outputs, num_inputs = codes.shape
    wide = codes.astype(np.float32)
    if zero_points is not None:
        wide = wide - zero_points.astype(np.float32).reshape(len(zero_points), -1)
    scales = scales.astype(np.float32)
    if scales.size == 1:
        return wide * scales.reshape(())
    if block is None:
        scales = scales.reshape(num_outputs, -1)
        block = 1, num_inputs // scales.shape[1]
    for i in range(num_outputs):
        for j in range(num_inputs):
            wide[i, j] *= scales[i // block[0], j // block[1]]
    return wide


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode an MXFP4 weight.

    Each byte of [outputs, groups, 16] has two neighbouring inputs' codes of e2m1, the first in its lower
    half. Scales [outputs, groups] are powers of two, their exponents counted from -127.
    """
    num_outputs, num_groups, num_bytes = blocks.shape
    weight = np.zeros((num_outputs, num_groups * 2 * num_bytes), np.float32)
    for output in range(num_outputs):
        for group in range(num_groups):
            scale = 2.0 ** (int(scales[output, group]) - 127)
            for i, byte in enumerate(blocks[output, group]):
                first = 2 * (group * num_bytes + i)
                weight[output, first] = scale * E2M1[byte & 15]
                weight[output, first + 1] = scale * E2M1[byte >> 4]
    return weight


def field(words: np.ndarray, bits: int, place: int) -> np.ndarray:
    """Return the code at an index of each word, counted from its lowest bits."""
    return words.astype(np.int64) >> bits * place & 2**bits - 1


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of bytes: a sign, four bits of an exponent biased by 7, three of a fraction.

    An exponent of 0 stands for subnormal numbers. There is no infinity; all ones are NaN.
    """
    wide = codes.astype(np.int64)
    sign, exponent, fraction = 1 - 2 * (wide >> 7), wide >> 3 & 15, wide & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(wide & 127 == 127, np.nan, sign * size).astype(np.float32)


def as_e4m3(weight: np.ndarray) -> np.ndarray:
    """Return a weight as `quantization="fp8"` stores it: numbers of e4m3 and a scale per row.

    The scale makes the row's largest number 448. Each number is the nearest that e4m3 has, ties to even.
    """
    every = e4m3(np.arange(127))
    rounded = np.zeros(weight.shape, np.float32)
    for row, values in zip(rounded, weight.astype(np.float32), strict=True):
        scale = np.abs(values).max() / np.float32(448)
        for i, number in enumerate(values if scale > 0 else ()):
            size = np.abs(number / scale)
            distance = np.abs(every.astype(np.float64) - size)
            nearest = np.flatnonzero(distance == distance.min())
            code = next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)
            row[i] = np.sign(number) * every[code] * scale
    return rounded
