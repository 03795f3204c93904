"""Taps: hidden states that are kept on the way through a decoder's layers, for a head that drafts."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.models import layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Taps:
    """Hidden states behind some numbers of layers. The last place is for those that nobody asks for."""

    found: Float[Array, "places num_tokens hidden"]
    behind: tuple[int, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, behind: tuple[int, ...], x: Float[Array, "num_tokens *streams hidden"]) -> "Taps | None":
        """Make room for them; None where nothing is asked for, as of a model with several streams."""
        return cls(jnp.zeros((len(behind) + 1, *x.shape), x.dtype), behind) if behind else None

    def noted(self, x: Float[Array, "num_tokens hidden"], num_layers: layers.Layer, count: int) -> "Taps":
        """Return the taps with those behind `num_layers` of `count` layers, if they are asked for."""
        if isinstance(num_layers, int) and num_layers not in self.behind:
            return self
        last = len(self.behind)
        places = [self.behind.index(i) if i in self.behind else last for i in range(count + 1)]
        return replace(self, found=self.found.at[layers.value_of(places, num_layers)].set(x))
