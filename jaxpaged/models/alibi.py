"""Slopes of ALiBi: by how much a head's scores fall with the distance."""

import math


def alibi_slopes(num_heads: int, max_bias: float = 8.0, factor: float = 1.0) -> tuple[float, ...]:
    """Return `factor * 2 ** (-max_bias * i / n)` for heads i = 1 to n, if n is a power of two.

    Of another number, those of the next lower power, then every second one of the next higher.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-max_bias * i / lower) for i in range(1, lower + 1)]
    slopes += [2 ** (-max_bias * i / (2 * lower)) for i in range(1, 2 * lower + 1, 2)]
    return tuple(factor * slope for slope in slopes[:num_heads])
