"""Low-rank additions to products, for adapters: y + x @ a @ b, where each tile of rows chooses its a and
b.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import native

PANEL_WIDTH = 16  # columns that lie side by side


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The matrices a and b of each layer and choice, for every section of a product's outputs.

    Sections are neighbouring outputs, such as those of queries, keys and values; `widths` counts each one's.
    The a of all sections lie side by side, `rank` columns each; the b of each section has panels of its own.
    """

    a: Float[Array, "num_layers num_choices a_panels in_features panel_width"]
    b: Float[Array, "num_layers num_choices b_panels rank panel_width"]
    widths: tuple[int, ...] = field(metadata={"static": True})

    @property
    def rank(self) -> int:
        """The columns of an a, padding included: whole panels."""
        return int(self.b.shape[-2])

    @property
    def b_panels(self) -> list[int]:
        """The number of panels that each section's b has."""
        return [num_panels(width) for width in self.widths]


def num_panels(columns: int) -> int:
    """Return how many panels hold so many columns."""
    return math.ceil(columns / PANEL_WIDTH)


def zeros(
    num_layers: int, num_choices: int, in_features: int, widths: tuple[int, ...], rank: int, dtype: jnp.dtype
) -> LowRank:
    """Return choices that add nothing yet, for ranks up to this one."""
    panels = num_panels(rank)
    stack = num_layers, num_choices
    a = jnp.zeros((*stack, len(widths) * panels, in_features, PANEL_WIDTH), dtype)
    b = jnp.zeros((*stack, sum(map(num_panels, widths)), panels * PANEL_WIDTH, PANEL_WIDTH), dtype)
    return LowRank(a, b, widths)


def pack(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix [rows, columns] as panels [num_panels, rows, panel_width], padded with zeros."""
    rows, columns = matrix.shape
    whole = np.pad(matrix, ((0, 0), (0, -columns % PANEL_WIDTH)))
    return np.ascontiguousarray(whole.reshape(rows, -1, PANEL_WIDTH).swapaxes(0, 1))


def add(
    y: Float[Array, "num_rows out_features"],
    x: Float[Array, "num_rows in_features"],
    matrices: LowRank,
    layer: int | Int[Array, ""],
    choices: Int[Array, " num_tiles"],
) -> Float[Array, "num_rows out_features"]:
    """Add `x @ a @ b` to y in float32, with the matrices that each tile of rows has chosen.

    choices: for each tile a choice, counted from 1; 0 adds nothing.

    A row's bits depend on its tile and the choice's a and b alone, not on the choice's number.
    """
    if native.serves(x.dtype, "low_rank"):
        choice = jnp.repeat(choices, x.shape[0] // choices.shape[0])
        return native.add_low_rank(y, x, matrices.a, matrices.b, choice, layer, matrices.widths)
    return add_by_xla(y, x, matrices, layer, choices)


def add_by_xla(
    y: Float[Array, "num_rows out_features"],
    x: Float[Array, "num_rows in_features"],
    matrices: LowRank,
    layer: int | Int[Array, ""],
    choices: Int[Array, " num_tiles"],
) -> Float[Array, "num_rows out_features"]:
    """Compute `add` by gathering the chosen matrices: a copy for each tile."""
    num_tiles, num_sections = choices.shape[0], len(matrices.widths)
    chosen = layer, jnp.maximum(choices - 1, 0)
    a, b = matrices.a[chosen], matrices.b[chosen]
    tiles = x.reshape(num_tiles, -1, x.shape[1])
    between = jnp.einsum("tli,tpic->tlpc", tiles, a, preferred_element_type=jnp.float32)
    between = between.reshape(*tiles.shape[:2], num_sections, matrices.rank).astype(x.dtype)
    sections, first = [], 0
    for i, (width, panels) in enumerate(zip(matrices.widths, matrices.b_panels, strict=True)):
        of_section = b[:, first : first + panels]
        section = jnp.einsum(
            "tlr,tprc->tlpc", between[:, :, i], of_section, preferred_element_type=jnp.float32
        )
        sections.append(section.reshape(x.shape[0], -1)[:, :width])
        first += panels
    has_one = jnp.repeat(choices > 0, x.shape[0] // num_tiles)
    return jnp.where(has_one[:, None], y + jnp.concatenate(sections, axis=1), y)
