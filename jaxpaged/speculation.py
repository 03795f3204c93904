"""Option `speculative_config`: how tokens are drafted, in vLLM's words."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, check, checked_choice, checked_int, shown

# Methods of vLLM's, by what they need.
OTHER_METHODS = (
    "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram_gpu", "suffix",
)  # fmt: skip
# A report has 32 tokens of a row: the drafts of one step, and the token behind them.
MOST_DRAFTS = 31
LONGEST_END = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafts from a request's own tokens, by the longest end of them that occurs before."""

    method: str = "ngram"
    num_speculative_tokens: int = 7  # drafts of a request in one step
    prompt_lookup_max: int | None = None  # tokens of the longest end that is looked for; None: 4
    prompt_lookup_min: int | None = (
        None  # tokens of the shortest one; None: 2, or the longest if that is less
    )

    def __post_init__(self) -> None:
        """Check the values. Raises `InputError`."""
        unknown = self.method in OTHER_METHODS
        rule = "'ngram': other methods of drafting are not supported" if unknown else "'ngram'"
        check("speculative_config: method", self.method, rule, self.method == "ngram")
        self._count("num_speculative_tokens", 1, MOST_DRAFTS)
        if self.prompt_lookup_max is None:
            least = self.prompt_lookup_min
            object.__setattr__(self, "prompt_lookup_max", max(4, least) if isinstance(least, int) else 4)
        self._count("prompt_lookup_max", 1, LONGEST_END)
        assert self.prompt_lookup_max is not None
        if self.prompt_lookup_min is None:
            object.__setattr__(self, "prompt_lookup_min", min(2, self.prompt_lookup_max))
        self._count("prompt_lookup_min", 1, self.prompt_lookup_max, "prompt_lookup_max=")

    def _count(self, name: str, least: int, most: int, origin: str = "") -> None:
        rule = f"an int in [{least}, {origin}{most}]"
        value = checked_int(f"speculative_config: {name}", getattr(self, name), rule, least, most)
        object.__setattr__(self, name, value)


def speculation(name: str, value: Any) -> Speculation | None:
    """Return the option's value: None, a `Speculation`, a mapping of its fields, or such a mapping in JSON.

    Raises `InputError`.
    """
    if value is None or isinstance(value, Speculation):
        return value
    rule = 'None or a mapping such as {"method": "ngram", "num_speculative_tokens": 7}'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InputError(f"{name}={shown(value)} must be {rule}") from None
    check(name, value, rule, isinstance(value, Mapping))
    known = [field.name for field in dataclasses.fields(Speculation)]
    for key in value:
        checked_choice(f"{name}: key", key, known)
    return Speculation(**value)
