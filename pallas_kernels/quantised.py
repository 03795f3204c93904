"""Weights of 8, 6 or 4 bits, which stay so in memory and become numbers where a product reads them.

Output o has for its input i the weight `scale[o, g] * code[o, i] + minimum[o, g]`, where g is the group of
neighbouring inputs that contains i. Codes are:

* 8 bits: signed integers, or floats of the type e4m3;
* 6 bits, on GPUs only: from -32 to 31;
* 4 bits: floats of the type e2m1; from 0 to 15 with minima; from -8 to 7 without.

`Quantised` is the form for CPUs and XLA, `Halfwords` that for GPUs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt16, UInt32

from pallas_kernels.native.product import PANEL_WIDTH

CODE_BITS = (8, 4)
OFFSET = 8  # added to signed codes of 4 bits
RUN = 32  # neighbouring inputs with codes in the same bits of halfwords; a group's, if it has fewer
PLANES = {8: (8,), 6: (4, 2), 4: (4,)}  # bits of a code that lie together, from its lowest on
NUM_OUTPUTS, NUM_INPUTS = 64, 128  # halfwords are padded to multiples of these


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A weight [out_features, in_features], or a stack of one a layer, in the order of the CPU's product.

    A panel holds 32 outputs, or one where XLA multiplies, which then transposes nothing. A word holds the
    next 4 or 8 codes of an output, the first in its lowest bits. `in_features` may exceed the inputs of the
    rows it multiplies: the codes of the rest stand for zeros.
    """

    codes: UInt32[Array | np.ndarray, "*num_layers num_panels num_words panel_width"]
    scales: Float[Array | np.ndarray, "*num_layers num_panels num_groups panel_width"]  # float16 or float32
    minima: Float[Array | np.ndarray, "*num_layers num_panels num_groups panel_width"] | None
    bits: int = field(metadata={"static": True})
    out_features: int = field(metadata={"static": True})
    is_float: bool = field(default=False, metadata={"static": True})

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[-2]) * 32 // self.bits

    def of_layer(self, layer: int | Int[Array, ""]) -> "Quantised":
        """Return one weight of a stack."""
        one: Quantised = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), self)
        return one

    @property
    def panel_width(self) -> int:
        return int(self.codes.shape[-1])

    def widened(self) -> Float[Array, "out_features in_features"]:
        """Return all weights in float32."""
        return self._numbers(self._by_row)[: self.out_features]

    def rows(self, outputs: Int[Array, " n"]) -> Float[Array, "n in_features"]:
        """Return the weights of some outputs in float32."""
        panel, place = outputs // self.panel_width, outputs % self.panel_width
        return self._numbers(lambda x: jnp.asarray(x)[panel, :, place])

    def factors(
        self, dtype: jnp.dtype
    ) -> tuple[Float[Array, "out_features in_features"], Float[Array, " out_features"] | None]:
        """Return a matrix in a dtype, and factors of the outputs of products with it, or None.

        With one scale an output these are the codes, which XLA converts within its product, and the scales.
        Otherwise they are the weights, without factors.
        """
        if self.scales.shape[-2] > 1 or self.minima is not None:
            return self.widened().astype(dtype), None
        codes = self._codes(self._by_row(self.codes), dtype)
        codes = codes.reshape(codes.shape[0], -1)[: self.out_features]
        return codes, self._by_row(self.scales)[: self.out_features, 0].astype(jnp.float32)

    @staticmethod
    def _by_row(x: Array | np.ndarray) -> Array:
        return jnp.swapaxes(jnp.asarray(x), 1, 2).reshape(-1, x.shape[1])

    def _codes(self, codes: Array, dtype: jnp.dtype) -> Float[Array, "num_rows num_words codes_of_word"]:
        """Convert rows of words to numbers of a dtype that can represent all codes."""
        if self.is_float and self.bits == 4:
            return _e2m1(_fields(codes, self.bits), dtype)
        if self.is_float:
            return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)
        if self.bits == 8:
            return lax.bitcast_convert_type(codes, jnp.int8).astype(dtype)
        numbers = _fields(codes, self.bits).astype(dtype)
        return numbers - OFFSET if self.minima is None else numbers

    def _numbers(
        self, rows_of: Callable[[Array | np.ndarray], Array]
    ) -> Float[Array, "num_rows in_features"]:
        """Return the weights of the rows that `rows_of` selects from an array."""
        codes, scales = rows_of(self.codes), rows_of(self.scales)
        numbers = self._codes(codes, jnp.dtype("float32"))
        numbers = numbers.reshape(*scales.shape, -1) * scales.astype(jnp.float32)[..., None]
        if self.minima is not None:
            numbers = numbers + rows_of(self.minima).astype(jnp.float32)[..., None]
        return numbers.reshape(scales.shape[0], -1)


def _fields(words: Array, bits: int) -> UInt32[Array, "num_rows num_words codes_of_word"]:
    """Return the codes of words, the one in the lowest bits first."""
    return words[..., None] >> jnp.arange(0, 32, bits, dtype=jnp.uint32) & (2**bits - 1)


def _e2m1(codes: UInt32[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """Return the numbers of codes of a sign, two bits of an exponent, and one of a fraction.

    Twice a number is an integer: the fraction's bit where the exponent is 0, else that and a bit above it,
    moved.
    """
    exponent, fraction = codes >> 1 & 3, codes & 1
    twice = jnp.where(exponent == 0, fraction, fraction + 2 << jnp.maximum(exponent, 1) - 1).astype(dtype)
    return jnp.where(codes >> 3 == 1, -twice, twice) * jnp.asarray(0.5, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Halfwords:
    """A weight [out_features, in_features], or a stack of one a layer, in the order of the GPU's product.

    A halfword has room for 16 / bits codes. 32 neighbouring halfwords hold the codes of as many runs of 32
    inputs: halfword i has input i of each run, the first run in its lowest bits. In groups of 16 inputs runs
    have 16. Codes of 6 bits lie in two planes: the lower 4 bits of 128 inputs, then their upper 2. Outputs
    are padded to a multiple of 64, inputs to one of 128, with scales of zero.
    """

    codes: UInt16[Array | np.ndarray, "*num_layers num_outputs num_halfwords"]
    scales: Float[Array | np.ndarray, "*num_layers num_groups num_outputs"]  # float16 or float32
    minima: Float[Array | np.ndarray, "*num_layers num_groups num_outputs"] | None
    bits: int = field(metadata={"static": True})
    out_features: int = field(metadata={"static": True})
    is_float: bool = field(default=False, metadata={"static": True})

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[-1]) * 16 // self.bits

    @property
    def group_size(self) -> int:
        return self.in_features // int(self.scales.shape[-2])

    @property
    def run(self) -> int:
        """The number of neighbouring inputs whose codes have the same bits of neighbouring halfwords."""
        return min(RUN, self.group_size)

    def of_layer(self, layer: int | Int[Array, ""]) -> "Halfwords":
        """Return one weight of a stack."""
        one: Halfwords = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), self)
        return one

    def widened(self) -> Float[Array, "out_features in_features"]:
        """Return all weights in float32."""
        return self._numbers(self.codes, self.scales, self.minima)[: self.out_features]

    def rows(self, outputs: Int[Array, " n"]) -> Float[Array, "n in_features"]:
        """Return the weights of some outputs in float32."""
        minima = None if self.minima is None else jnp.asarray(self.minima)[:, outputs]
        return self._numbers(jnp.asarray(self.codes)[outputs], jnp.asarray(self.scales)[:, outputs], minima)

    def factors(self, dtype: jnp.dtype) -> tuple[Float[Array, "out_features in_features"], None]:
        """Return all weights in a dtype, and None: their products need no factors."""
        return self.widened().astype(dtype), None

    def _numbers(
        self, codes: Array | np.ndarray, scales: Array | np.ndarray, minima: Array | np.ndarray | None
    ) -> Float[Array, "num_rows in_features"]:
        runs = self._runs(jnp.asarray(codes))
        if self.bits == 8:
            dtype = jnp.float8_e4m3fn if self.is_float else jnp.int8
            numbers = lax.bitcast_convert_type(runs.astype(jnp.uint8), dtype).astype(jnp.float32)
        else:
            numbers = runs.astype(jnp.float32)
            numbers = numbers - offset(self.bits) if minima is None else numbers
        wide = numbers.reshape(codes.shape[0], scales.shape[0], -1)
        wide = wide * jnp.asarray(scales).astype(jnp.float32).T[..., None]
        if minima is not None:
            wide = wide + jnp.asarray(minima).astype(jnp.float32).T[..., None]
        return wide.reshape(codes.shape[0], -1)

    def _runs(self, codes: Array) -> UInt16[Array, "num_rows ..."]:
        """Return the codes of some rows of halfwords, in the order of inputs."""
        planes = [codes]
        if len(PLANES[self.bits]) > 1:
            slots = codes.reshape(codes.shape[0], -1, NUM_INPUTS * self.bits // 16)
            planes = jnp.split(slots, [NUM_INPUTS * PLANES[self.bits][0] // 16], axis=2)
        fields: list[Array] = []
        first = 0
        for bits, plane in zip(PLANES[self.bits], planes, strict=True):
            shifts = jnp.arange(0, 16, bits, dtype=jnp.uint16)[:, None]
            runs = plane.reshape(codes.shape[0], -1, 1, self.run) >> shifts
            runs = runs if bits == 8 else runs & (2**bits - 1)
            fields.append(runs if first == 0 else runs.reshape(fields[0].shape) << first)
            first += bits
        return functools.reduce(jnp.bitwise_or, fields)


def offset(bits: int) -> int:
    """Return the number that is added to signed codes of fewer than 8 bits to store them."""
    return 1 << bits - 1


def pack_halfwords(
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None = None,
    *,
    bits: int,
    is_float: bool = False,
) -> Halfwords:
    """Pack a NumPy weight for a GPU.

    Arguments are those of `pack`. Groups must divide 128 inputs. Codes of 6 bits are signed, in groups of 16.
    """
    out_features, in_features = codes.shape
    group_size = in_features // scales.shape[1]
    missing = -out_features % NUM_OUTPUTS, -in_features % NUM_INPUTS
    whole = np.pad(codes.view(np.uint8), [(0, n) for n in missing]) if any(missing) else codes.view(np.uint8)
    if bits == 6:
        whole = whole + np.uint8(offset(bits))
    planes, first = [], 0
    for width in PLANES[bits]:
        plane = whole >> np.uint8(first) & np.uint8(2**width - 1)
        runs = plane.reshape(len(whole), -1, 16 // width, min(RUN, group_size))
        halfwords = np.zeros((len(whole), runs.shape[1], runs.shape[3]), np.uint16)
        for place in range(runs.shape[2]):
            halfwords |= runs[:, :, place].astype(np.uint16) << np.uint16(place * width)
        planes.append(halfwords.reshape(len(whole), -1, NUM_INPUTS * width // 16))
        first += width

    def by_group(numbers: np.ndarray) -> np.ndarray:
        return np.pad(numbers.T, ((0, missing[1] // group_size), (0, missing[0])))

    joined = planes[0] if len(planes) == 1 else np.concatenate(planes, axis=2)
    return Halfwords(
        codes=joined.reshape(len(whole), -1),
        scales=by_group(scales),
        minima=None if minima is None else by_group(minima),
        bits=bits,
        out_features=out_features,
        is_float=is_float,
    )


def pack(
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None = None,
    *,
    bits: int,
    is_float: bool = False,
    panel_width: int = PANEL_WIDTH,
) -> Quantised:
    """Pack a NumPy weight for a CPU, or for XLA with `panel_width` 1.

    codes: [out_features, in_features], one byte each. Codes of 4 bits go from 0 to 15: 8 is added to signed
        ones. For floats they are the float's bits.
    scales, minima: [out_features, num_groups].

    Missing outputs of the last panel are zeros. A group must have whole words: a multiple of 4 codes of 8
    bits, or of 8 codes of 4.

    Raises: ValueError if it has not, or for other bits.
    """
    if bits not in CODE_BITS:
        raise ValueError(f"{bits=} must be 8 or 4")
    out_features, in_features = codes.shape
    group, rest = divmod(in_features, scales.shape[1])
    if rest or group % (32 // bits):
        raise ValueError(
            f"{in_features=} must be {scales.shape[1]} groups of whole words, which have {32 // bits} codes"
        )
    codes = codes.view(np.uint8)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    words = np.ascontiguousarray(codes).view("<u4")
    return Quantised(
        codes=_panels(words, panel_width),
        scales=_panels(scales, panel_width),
        minima=None if minima is None else _panels(minima, panel_width),
        bits=bits,
        out_features=out_features,
        is_float=is_float,
    )


def _panels(rows: np.ndarray, width: int) -> np.ndarray:
    """Reorder [out_features, n] into [num_panels, n, width], padded with zeros."""
    missing = -rows.shape[0] % width
    whole = np.pad(rows, ((0, missing), (0, 0))) if missing else rows
    return whole.reshape(-1, width, rows.shape[1]).transpose(0, 2, 1)
