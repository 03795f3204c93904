"""Fragments: the elements of a matrix that a lane's registers hold, as PTX's document has it.

A register of 32 bits holds 2 neighbours of 16 bits, or 4 of 8 bits, along k. A group is 4 lanes.
"""

import numpy as np

from jaxpaged.research.ptx import rounding
from jaxpaged.research.ptx.registers import LANES, Array

GROUP, MEMBER = LANES // 4, LANES % 4


def left_operand(registers: list[Array], kind: str) -> Array:
    """Return A, [16, k], of its registers: rows of a group and 8 below, then the other half of k."""
    per = 4 // rounding.BYTES[kind]
    matrix = np.zeros((16, 4 * per * max(1, len(registers) // 2)), np.float32)
    for n, register in enumerate(registers):
        rows, columns = GROUP + 8 * (n % 2), per * MEMBER + 4 * per * (n // 2)
        values = _numbers(register, kind)
        for i in range(per):
            matrix[rows, columns + i] = values[:, i]
    return matrix


def right_operand(registers: list[Array], kind: str) -> Array:
    """Return B, [k, 8], of its registers: a group's column, along k."""
    per = 4 // rounding.BYTES[kind]
    matrix = np.zeros((4 * per * len(registers), 8), np.float32)
    for n, register in enumerate(registers):
        values = _numbers(register, kind)
        for i in range(per):
            matrix[per * MEMBER + 4 * per * n + i, GROUP] = values[:, i]
    return matrix


def _numbers(register: Array, kind: str) -> Array:
    return rounding.numbers(np.ascontiguousarray(register).view(np.uint8), kind).reshape(32, -1)


def accumulator(matrix: Array, number: int) -> Array:
    """Return the values of the lanes in one register of a product, [16, n]: pairs of columns, and 8 rows
    below.
    """
    row, column = GROUP + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * MEMBER + number % 2
    held: Array = matrix[row, column]
    return held


def tile_of(register: Array) -> Array:
    """Return the 8 x 8 matrix of 16 bits whose rows the groups hold."""
    tile = np.zeros((8, 8), np.uint16)
    halves = np.ascontiguousarray(register).view(np.uint16).reshape(32, 2)
    tile[GROUP, 2 * MEMBER], tile[GROUP, 2 * MEMBER + 1] = halves[:, 0], halves[:, 1]
    return tile


def register_of(tile: Array) -> Array:
    """Return the lanes' register for an 8 x 8 matrix of 16 bits."""
    halves = np.stack([tile[GROUP, 2 * MEMBER], tile[GROUP, 2 * MEMBER + 1]], 1)
    return np.ascontiguousarray(halves).view(np.uint32)[:, 0]
