"""Weights of 8 or 4 bits that stay so in memory, and become numbers where a product reads them.

Output o has for its input i the weight `scale[o, g] * code[o, i] + minimum[o, g]`, of the group g of
neighbouring inputs that i is in. Codes of 8 bits are signed, or floats of the type e4m3; those of 4 bits go
from 0 to 15 where there are minima, else from -8 to 7.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.native.product import PANEL_WIDTH

CODE_BITS = (8, 4)
OFFSET = 8  # that is added to codes of 4 bits which are signed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A weight [out_features, in_features], or a stack of one a layer, in the order of the CPU's product.

    A panel holds 32 outputs, or one where XLA multiplies, which then transposes nothing; a word the next 4 or
    8 codes of one of them, the first in its lowest bits.
    `in_features` may be more than those of the rows that it meets: of the rest, codes stand for zeros.
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
        """One of a stack."""
        one: Quantised = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False), self)
        return one

    @property
    def panel_width(self) -> int:
        return int(self.codes.shape[-1])

    def widened(self) -> Float[Array, "out_features in_features"]:
        """All weights, in float32."""
        return self._numbers(self._by_row)[: self.out_features]

    def rows(self, outputs: Int[Array, " n"]) -> Float[Array, "n in_features"]:
        """The weights of some outputs, in float32."""
        panel, place = outputs // self.panel_width, outputs % self.panel_width
        return self._numbers(lambda x: jnp.asarray(x)[panel, :, place])

    def factors(
        self, dtype: jnp.dtype
    ) -> tuple[Float[Array, "out_features in_features"], Float[Array, " out_features"] | None]:
        """All weights in a dtype, and what their products are still to be multiplied by: the scales, where an
        output has one. Then the former are the codes, which XLA makes within its product.
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
        """Rows of words as numbers of a dtype, which holds them."""
        if self.is_float:
            return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)
        if self.bits == 8:
            return lax.bitcast_convert_type(codes, jnp.int8).astype(dtype)
        shifts = jnp.arange(0, 32, self.bits, dtype=jnp.uint32)
        numbers = (codes[..., None] >> shifts & 15).astype(dtype)
        return numbers - OFFSET if self.minima is None else numbers

    def _numbers(
        self, rows_of: Callable[[Array | np.ndarray], Array]
    ) -> Float[Array, "num_rows in_features"]:
        """The weights of some rows."""
        codes, scales = rows_of(self.codes), rows_of(self.scales)
        numbers = self._codes(codes, jnp.dtype("float32"))
        numbers = numbers.reshape(*scales.shape, -1) * scales.astype(jnp.float32)[..., None]
        if self.minima is not None:
            numbers = numbers + rows_of(self.minima).astype(jnp.float32)[..., None]
        return numbers.reshape(scales.shape[0], -1)


def pack(
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None = None,
    *,
    bits: int,
    is_float: bool = False,
    panel_width: int = PANEL_WIDTH,
) -> Quantised:
    """A weight of NumPy's: a byte a code [out_features, in_features], scales and minima [out_features,
    num_groups]. Codes of 4 bits go from 0 to 15: those that are signed have 8 added. Of floats, the bytes.

    Outputs that are missing to whole panels are zeros. A group has whole words: a multiple of 4 codes, or 8.
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
    sides = (
        _panels(words, panel_width),
        _panels(scales, panel_width),
        None if minima is None else _panels(minima, panel_width),
    )
    return Quantised(*sides, bits=bits, out_features=out_features, is_float=is_float)


def _panels(rows: np.ndarray, width: int) -> np.ndarray:
    """[out_features, n] as [num_panels, n, width]."""
    missing = -rows.shape[0] % width
    whole = np.pad(rows, ((0, missing), (0, 0))) if missing else rows
    return whole.reshape(-1, width, rows.shape[1]).transpose(0, 2, 1)
