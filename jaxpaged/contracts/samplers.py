"""The contract of samplers: a function from outside that chooses the tokens of requests that sample.

    sampler(logits, options, positions) -> token_ids

- logits: float32 [rows, vocab], after the requests' own rules: allowed tokens, penalties, biases. A barred
  token has minus infinity.
- options: `SamplingOptions`, arrays [rows].
- positions: int32 [rows], the position of the new token in its sequence.
- token_ids: int32 [rows], each in [0, vocab).

A row's token may depend on its own logits, options and position alone, so that an answer is the same in any
company. Rows with temperature 0 have the likeliest token, whatever the function returns. Beam searches do not
sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxpaged.checks import InputError, check, shown
from jaxpaged.contracts import versions

FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # what a sampler need not obey, and what asks for nothing


class SamplingOptions(NamedTuple):
    """The options of requests that a sampler may obey, a value a row."""

    temperature: Float[Array, " rows"]  # above 0; of rows that do not sample, 0
    top_k: Int[Array, " rows"]  # 0 keeps all
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]


@dataclass(frozen=True)
class Sampler:
    """A sampler from outside: the function, and which of FILTERS it obeys. The others are refused."""

    function: Callable[..., Any]
    options: tuple[str, ...] = ()
    contract: int = 1
    name: str = ""  # set when it is found by its path

    def __post_init__(self) -> None:
        """Check the names of options. Raises `InputError`."""
        for name in self.options:
            check("options", name, f"of {', '.join(FILTERS)}", name in FILTERS)

    def __call__(
        self,
        logits: Float[Array, "rows vocab"],
        options: SamplingOptions,
        positions: Int[Array, " rows"],
    ) -> Int[Array, " rows"]:
        """Choose a token a row. Raises ValueError, while tracing, for another shape or dtype."""
        out = self.function(logits, options, positions)
        shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
        if shape != positions.shape or dtype != jnp.int32:
            got = f"{dtype or type(out).__name__}{list(shape or ())}"
            raise ValueError(f"sampler={self.name!r} must return int32{list(positions.shape)}, not {got}")
        return out

    def check_request(self, params: Any) -> None:
        """Raise `InputError` for a request that asks for a filter that the sampler does not obey."""
        for name, nothing in FILTERS.items():
            value = getattr(params, name)
            serves = name in self.options or value == nothing
            check(name, value, f"{nothing} with sampler={self.name!r}, which does not obey it", serves)


def sampler[F: Callable[..., Any]](options: tuple[str, ...] = (), *, contract: int = 1) -> Callable[[F], F]:
    """Declare the filters that a function obeys; the decorator returns the function itself."""

    def declared(function: F) -> F:
        for name, value in (("options", Sampler(function, options).options), ("contract", contract)):
            setattr(function, name, value)
        return function

    return declared


def keys(options: SamplingOptions, positions: Int[Array, " rows"]) -> Key[Array, " rows"]:
    """Return a random key a row, from its seed and the position alone: the ones that our sampler uses."""
    return jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(
        options.seed, positions
    )


def named(asked: Any) -> Sampler:
    """Return the sampler that a path or a value means. Raises `InputError`."""
    rule = "a function under @sampler, or a Sampler (docs/research/sampler.md)"
    path = asked if isinstance(asked, str) else ""
    chosen = versions.imported("sampler", path, rule) if path else asked
    versions.check_version("sampler", asked, chosen, "sampler")
    if not isinstance(chosen, Sampler):
        options = getattr(chosen, "options", None)
        if not callable(chosen) or not isinstance(options, tuple):
            raise InputError(f"sampler={shown(asked)} must be {rule}")
        chosen = Sampler(chosen, options, getattr(chosen, "contract", 1), getattr(chosen, "__qualname__", ""))
    return replace(chosen, name=path or chosen.name or "sampler")
