"""Option `speculative_config`: how tokens are drafted, in vLLM's words."""

import dataclasses
import os
from typing import Any

from jaxpaged.checks import INT32_MAX, check, checked_int, checked_mapping, checked_number, parsed_json
from jaxpaged.vllm_names.judge import check_keys
from jaxpaged.vllm_names.table import SPECULATION

# Methods of vLLM's, by what they need.
OTHER_METHODS = "eagle", "medusa", "mlp_speculator", "ngram_gpu"
DRAFT_MODEL, EAGLE3, MTP = "draft_model", "eagle3", "mtp"
BY_MODEL = DRAFT_MODEL, EAGLE3, MTP  # methods whose drafts come of weights
GRAMMAR = "grammar"  # ours
# A report has 32 tokens of a row: the drafts of one step, and the token behind them.
MOST_DRAFTS = 31
LONGEST_END = 16
DEEPEST = 64
MOST_PER_TOKEN = 31
# Past answers share room for so many tokens each.
MOST_CACHED, TOKENS_OF_CACHED = 4096, 256
LONGEST_DEFAULT, SHORTEST_DEFAULT, DEPTH_DEFAULT = 4, 2, 24
# Options of each method, with what stands for None.
OPTIONS: dict[str, dict[str, int | float | str | None]] = {
    "ngram": {"prompt_lookup_max": LONGEST_DEFAULT, "prompt_lookup_min": SHORTEST_DEFAULT},
    "suffix": {
        "suffix_decoding_max_tree_depth": DEPTH_DEFAULT,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
    DRAFT_MODEL: {"model": None, "quantization": None},
    EAGLE3: {"model": None, "quantization": None},
    MTP: {"quantization": None},
    GRAMMAR: {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Drafts from a request's own tokens and past answers, by the longest end that occurs; or by a model; or
    only of text that a structured output forces.

    Options of other methods are None.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 7  # drafts of a request in one step
    # Tokens of the longest and the shortest end that is looked for.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None  # tokens of an end and of most drafts behind it
    # Past answers, of TOKENS_OF_CACHED tokens in the mean, that are looked into, too.
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None  # drafts for each token of the end
    suffix_decoding_min_token_prob: float | None = None  # least share of occurrences that have the drafts
    model: str | None = None  # the model that drafts: what `LLM` takes; or the directory of a head
    quantization: str | None = None  # as `EngineConfig.quantization`, for the model that drafts
    # Answers that may run together while drafts are made. None: any number, but 1 for a model on a CPU.
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises `InputError`."""
        unknown = self.method in OTHER_METHODS
        rule = "'ngram', 'suffix', 'draft_model', 'eagle3', 'mtp' or 'grammar'"
        rule += ": other methods of drafting are not supported" * unknown
        check("speculative_config: method", self.method, rule, self.method in [*OPTIONS])
        self._count("num_speculative_tokens", 1, MOST_DRAFTS)
        if self.disable_by_batch_size is not None:
            self._count("disable_by_batch_size", 1, INT32_MAX)
        for method, names in OPTIONS.items():
            for name in [name for name in names if name not in OPTIONS[self.method]]:
                value = getattr(self, name)
                rule = f"left out: it is of method {method!r}"
                check(f"speculative_config: {name}", value, rule, value is None)
        if self.method == "ngram":
            self._check_ngram()
        elif self.method == "suffix":
            self._check_suffix()
        elif self.method in BY_MODEL:
            self._check_model()

    @property
    def past_tokens(self) -> int:
        """Tokens of past answers that are kept; 0: none."""
        return (self.suffix_decoding_max_cached_requests or 0) * TOKENS_OF_CACHED

    def _check_model(self) -> None:
        if self.method != MTP:
            is_name = isinstance(self.model, str | os.PathLike)
            what = "model" if self.method == DRAFT_MODEL else "head"
            rule = f"the name or the directory of the {what} that drafts"
            check("speculative_config: model", self.model, rule, is_name)
            object.__setattr__(self, "model", os.fspath(str(self.model)))
        value, rule = self.quantization, "None or a string: what quantization takes"
        check("speculative_config: quantization", value, rule, value is None or isinstance(value, str))

    def _check_ngram(self) -> None:
        if self.prompt_lookup_max is None:
            least = self.prompt_lookup_min
            longest = LONGEST_DEFAULT
            longest = max(longest, least) if isinstance(least, int) else longest
            object.__setattr__(self, "prompt_lookup_max", longest)
        self._count("prompt_lookup_max", 1, LONGEST_END)
        assert self.prompt_lookup_max is not None
        if self.prompt_lookup_min is None:
            shortest = min(SHORTEST_DEFAULT, self.prompt_lookup_max)
            object.__setattr__(self, "prompt_lookup_min", shortest)
        self._count("prompt_lookup_min", 1, self.prompt_lookup_max, "prompt_lookup_max=")

    def _check_suffix(self) -> None:
        for name, value in OPTIONS["suffix"].items():
            if getattr(self, name) is None:
                if name == "suffix_decoding_max_tree_depth":
                    value = max(DEPTH_DEFAULT, 2 * self.num_speculative_tokens)
                object.__setattr__(self, name, value)
        self._count("suffix_decoding_max_tree_depth", self.num_speculative_tokens + 1, DEEPEST)
        self._count("suffix_decoding_max_cached_requests", 0, MOST_CACHED)
        self._number("suffix_decoding_max_spec_factor", f"a number in (0, {MOST_PER_TOKEN}]", MOST_PER_TOKEN)
        self._number("suffix_decoding_min_token_prob", "a number in [0, 1]", 1, above=False)

    def _count(self, name: str, minimum: int, maximum: int, origin: str = "") -> None:
        rule = f"an int in [{minimum}, {origin}{maximum}]"
        value = checked_int(f"speculative_config: {name}", getattr(self, name), rule, minimum, maximum)
        object.__setattr__(self, name, value)

    def _number(self, name: str, rule: str, maximum: float, *, above: bool = True) -> None:
        value = getattr(self, name)
        value = checked_number(f"speculative_config: {name}", value, rule, 0, maximum, above=above)
        object.__setattr__(self, name, value)


def speculation(name: str, value: Any) -> Speculation | None:
    """Return the option's value: None, a `Speculation`, a mapping of its fields, or such a mapping in JSON.

    Raises `InputError`.
    """
    if value is None or isinstance(value, Speculation):
        return value
    rule = 'None or a mapping such as {"method": "ngram", "num_speculative_tokens": 7}'
    ours = Speculation.__dataclass_fields__
    value = checked_mapping(name, parsed_json(name, value, rule), rule, [*ours, *SPECULATION])
    check_keys(name, {key: setting for key, setting in value.items() if key not in ours}, SPECULATION)
    value = {key: setting for key, setting in value.items() if key in ours}
    by_model = {"method": DRAFT_MODEL} if value.get("model") is not None else {}
    return Speculation(**by_model | {**value})
