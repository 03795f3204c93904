"""Colours of policies: one each, the same in every figure and report of the laboratory."""

from collections.abc import Iterable

from jaxpaged.memory import eviction
from jaxpaged.research.lab.belady import BELADY

BOUND = "#222222"  # Belady's, which no policy of an engine passes
# Colours that are told apart on white, by most who confuse some.
PALETTE = (
    *("#4477aa", "#66ccee", "#999933", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#ee7733"),
    *("#009988", "#882255", "#88ccaa", "#aa7755", "#bb99ff", "#0044cc", "#ff99bb", "#889999"),
)


def colours(policies: Iterable[str] = ()) -> dict[str, str]:
    """Return a colour for each built-in policy, the same in every report, and for each further policy."""
    known = [name for name in eviction.EVICTION_POLICIES if name != BELADY.name]
    others = [name for name in dict.fromkeys(policies) if name not in (*known, BELADY.name)]
    order = enumerate([*known, *others])
    return {name: PALETTE[i % len(PALETTE)] for i, name in order} | {BELADY.name: BOUND}
