"""Parameters of one request: how its tokens are chosen and its answer is given. Names and defaults are
vLLM's.
"""

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from jaxpaged import sampling_lists
from jaxpaged.checks import (
    FLOAT32_MAX,
    InputError,
    check,
    checked_bool,
    checked_int,
    checked_number,
    is_int,
    shown,
    unknown,
)
from jaxpaged.compat import names_of
from jaxpaged.options import checks_of, choice, number, option, optional, whole
from jaxpaged.structured_outputs import StructuredOutputsParams, structured_outputs
from jaxpaged.vllm_names.judge import BEAM_NAMES, SAMPLING_NAMES, Names, without_neutral
from jaxpaged.vllm_names.methods import VllmClass, missing

# The likeliest tokens that a step can tell of beside the chosen one: vLLM's default `max_logprobs`.
MAX_LOGPROBS = 20
# Beams of one search at most, for two continuations of each are looked at for each: vLLM's default bound.
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
# Answers to one prompt at most, as in vLLM.
MAX_ANSWERS = 16_384
# Largest penalty: a length to a higher power may exceed float32.
MOST_PENALTY = 5
# What `from_optional` makes of a larger bias, as vLLM does.
MOST_BIAS = 100.0
MOST_TOKENS = "at most 2**31 - 1"
COUNT_RULE = f"None or an int in [0, {MAX_LOGPROBS}]"
INT64 = 2**63


def _taking_vllms[T](names: Names) -> Callable[[type[T]], type[T]]:
    """Let a class be made with vLLM's further options, too, where they ask for nothing.

    None stands for a field's default where None is no value of the field. Raises `InputError` for options
    that ask for what is not there.
    """

    def decorate(cls: Any) -> Any:
        init, fields = cls.__init__, cls.__dataclass_fields__
        not_none = frozenset(name for name, field in fields.items() if _is_never_none(field))

        @functools.wraps(init)
        def __init__(self: Any, **options: Any) -> None:
            if not options.keys() <= fields.keys():
                options = without_neutral(options, fields, names)
                for name in options.keys() - fields.keys():
                    raise unknown(f"{cls.__name__}: option ", name, fields)
            if any(value is None for value in options.values()):
                options = {n: v for n, v in options.items() if v is not None or n not in not_none}
            init(self, **options)

        cls.__init__ = __init__
        return cls

    return decorate


def _is_never_none(field: "dataclasses.Field[Any]") -> bool:
    has_default = field.default is not dataclasses.MISSING and field.default is not None
    return has_default and field.name != "max_tokens"


class RequestOutputKind(enum.Enum):
    """Content of each output that is streamed."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # all, in one output at the end


def _output_kind(name: str, kind: object) -> RequestOutputKind:
    rule = "one of RequestOutputKind.CUMULATIVE, DELTA and FINAL_ONLY"
    check(name, kind, rule, isinstance(kind, RequestOutputKind))
    assert isinstance(kind, RequestOutputKind)
    return kind


def _num_kept(name: str, value: object) -> int:
    rule = "None, -1 or a positive int"
    kept = checked_int(name, value, rule, -1)
    check(name, value, rule, kept != 0)
    return kept


def _seed(name: str, seed: object) -> int | None:
    is_none = seed is None or (is_int(seed) and seed == -1)
    return None if is_none else checked_seed(name, seed, "None, -1 or an int in [-2**63, 2**64)")


def checked_seed(name: str, seed: object, rule: str = "an int in [-2**63, 2**64)") -> int:
    """Return a seed, if it is an integer of 64 bits, with a sign or without."""
    return checked_int(name, seed, rule, -INT64, 2 * INT64 - 1)


def _logit_bias(name: str, bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    rule = "a mapping of token ids, ints >= 0, to numbers of at most 3.4e38 either way"
    check(name, bias, rule, isinstance(bias, Mapping))
    assert isinstance(bias, Mapping)
    try:
        return {
            checked_int("", token, "", 0): checked_number("", value, "", -FLOAT32_MAX)
            for token, value in bias.items()
        } or None
    except InputError:
        raise InputError(f"{name}={shown(bias)} must be {rule}") from None


def _penalty_flag(default: float) -> Mapping[str, Any]:
    help_ = f"penalty on tokens that are in the text already (default {default:g}: none)"
    return {"type": float, "default": default, "help": help_}


def _extra_args(name: str, value: Any) -> dict[str, Any] | None:
    is_mapping = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    check(name, value, "None or a mapping of names to values", value is None or is_mapping)
    return dict(value) if value else None


@_taking_vllms(SAMPLING_NAMES)
@dataclasses.dataclass(kw_only=True)
class SamplingParams(metaclass=VllmClass):
    """Parameters by which one request's tokens are chosen.

    The logits of a step are changed in this order: what `structured_outputs` does not allow is barred, then
    all but `allowed_token_ids`, then `bad_words`, and stop tokens until there are `min_tokens`; `logit_bias`
    is added; the penalties apply. Where they would bar all that a structured output allows, they do not
    count. Sampling draws
    from `softmax(logits / temperature)` after dropping what `min_p`, then `top_k`, then `top_p` exclude. The
    draw depends on `seed` and the token's position only, never on the rest of the batch. Log-probabilities
    are those of the model's own logits, before any of this; of a structured output, among what it allows.

    Each field may be changed later. A value out of its range raises `InputError` when it is assigned, and
    values that contradict each other when a request is made of them. A request under way keeps those it was
    made of. None stands for a default wherever it is no value, and vLLM's further options are taken where
    they ask for nothing.
    """

    # Most new tokens. None: up to the model's length.
    max_tokens: int | None = option(
        16,
        optional(whole(f"None or a positive int, {MOST_TOKENS}", 1)),
        flag={"type": int, "default": 64, "help": "most new tokens of an answer (default 64)"},
    )
    # Divisor of the logits before sampling. 0: the likeliest token is taken (greedy).
    temperature: float = option(
        1.0,
        number("a number >= 0, at most 3.4e38", 0),
        field=float,
        from_model=True,
        flag={"type": float, "default": 0.0, "help": "sampling temperature (default 0: greedy)"},
    )
    # Number of answers, each drawn by itself. With a `seed`, answer i is that of seed + i.
    n: int = option(
        1,
        whole(f"an int in [1, {MAX_ANSWERS}]", 1, MAX_ANSWERS),
        flag={"type": int, "default": 1, "help": "answers to each prompt (default 1)"},
    )
    # Keep the k likeliest tokens; 0 and -1 keep all.
    top_k: int = option(
        0,
        lambda name, v: max(0, checked_int(name, v, f"an int >= 0, {MOST_TOKENS} (0 and -1 keep all)", -1)),
        field=int,
        from_model=True,
        flag={"type": int, "default": 0, "help": "keep the k likeliest tokens (default 0: all)"},
    )
    # Keep the likeliest tokens that together reach this probability.
    top_p: float = option(
        1.0,
        number("in (0, 1]", 0, 1, above=True),
        field=float,
        from_model=True,
        flag={
            "type": float,
            "default": 1.0,
            "help": "keep the likeliest tokens of this total probability (default 1: all)",
        },
    )
    # Keep tokens whose probability is at least this share of the likeliest token's.
    min_p: float = option(
        0.0,
        number("in [0, 1]", 0, 1),
        field=float,
        from_model=True,
        flag={
            "type": float,
            "default": 0.0,
            "help": "keep tokens of at least this share of the likeliest one's probability (default 0)",
        },
    )
    # Seed of up to 64 bits. None or -1: a seed of the request's own, made from the engine's seed.
    seed: int | None = option(
        None,
        _seed,
        field=int,
        flag={"type": int, "help": "seed of the answer (default: made from the request's number)"},
    )
    # Subtracted from the logit of each token that the answer has.
    presence_penalty: float = option(0.0, number("in [-2, 2]", -2, 2), field=float, flag=_penalty_flag(0.0))
    # Subtracted once for each time that the answer has the token.
    frequency_penalty: float = option(0.0, number("in [-2, 2]", -2, 2), field=float, flag=_penalty_flag(0.0))
    # Divides positive logits, and multiplies negative ones, of tokens that the prompt or the answer has.
    repetition_penalty: float = option(
        1.0,
        number("a number > 0, at most 3.4e38", 0, above=True),
        field=float,
        from_model=True,
        flag=_penalty_flag(1.0),
    )
    # Added to the logits of these tokens.
    logit_bias: Mapping[int, float] | None = option(None, _logit_bias, field=dict[str, float])
    # Tokens that may be chosen. None: all.
    allowed_token_ids: tuple[int, ...] | None = option(None, sampling_lists.allowed, field=list[int])
    # Texts that the answer must not contain, as sequences of tokens at a text's start or behind a space.
    bad_words: tuple[str, ...] | None = option((), sampling_lists.texts, field=list[str])
    # Texts that end the answer and are not part of it.
    stop: str | tuple[str, ...] | None = option(
        (),
        lambda name, v: sampling_lists.texts(name, (v,) if isinstance(v, str) else v),
        field=str | list[str],
        flag={
            "action": "append",
            "default": [],
            "metavar": "TEXT",
            "help": "text that ends an answer; may be repeated",
        },
    )
    # Tokens that end the answer, like the model's end-of-sequence tokens.
    stop_token_ids: tuple[int, ...] | None = option((), sampling_lists.token_ids, field=list[int])
    # Fewest new tokens: until then no stop token is chosen and no stop string is looked for.
    min_tokens: int = option(
        0,
        whole(f"an int >= 0, {MOST_TOKENS}", 0),
        field=int,
        flag={"type": int, "default": 0, "help": "fewest new tokens of an answer (default 0)"},
    )
    # Whether the model's end-of-sequence tokens are treated as any others.
    ignore_eos: bool = option(
        False,
        checked_bool,
        field=bool,
        flag={"action": "store_true", "help": "do not end at the model's end-of-sequence tokens"},
    )
    # Whether stop strings and stop tokens are part of the text.
    include_stop_str_in_output: bool = option(False, checked_bool, field=bool)
    # Number of likeliest tokens to report with each answer token's log-probability. None: no report.
    logprobs: int | None = option(None, optional(whole(COUNT_RULE, 0, MAX_LOGPROBS)))
    # Number of likeliest tokens to report with each prompt token's log-probability. None: no report.
    prompt_logprobs: int | None = option(None, optional(whole(COUNT_RULE, 0, MAX_LOGPROBS)))
    # Tokens whose log-probabilities are told behind places of the prompt: a line of ids for each place from
    # `prompt_logprob_start` on, but for the last. -1: none.
    prompt_logprob_token_ids: Any = option(None, sampling_lists.candidates, compare=False)
    prompt_logprob_start: int | None = option(None, optional(whole("None or an int >= 0", 0)))
    # First tokens of the prompt whose experts are not told, where the engine tells experts.
    routed_experts_prompt_start: int = option(0, whole("an int >= 0", 0))
    # Tokens to keep of a longer prompt. -1: as many as leave room for one answer token. None: refuse a prompt
    # that is too long.
    truncate_prompt_tokens: int | None = option(None, optional(_num_kept), field=int)
    # End of the prompt that is cut off. None: left.
    truncation_side: Literal["left", "right"] | None = option(
        None,
        optional(choice("left", "right")),
        field=Literal["left", "right"],
    )
    # What the answer's text must look like. None: anything.
    structured_outputs: StructuredOutputsParams | None = option(
        None, structured_outputs, field=dict[str, Any]
    )
    # Tokens that the answer is to have, whatever is sampled; what is told of them is the model's. None: none.
    trace_decode_token_ids: tuple[int, ...] | None = option(None, sampling_lists.trace)
    # Arguments of the engine's `logits_processors`. None: those that need one leave the request alone.
    extra_args: Mapping[str, Any] | None = option(None, _extra_args)
    # Whether outputs have the answer's text.
    detokenize: bool = option(True, checked_bool)
    # Whether special tokens are left out of the text.
    skip_special_tokens: bool = option(True, checked_bool, field=bool)
    # Whether special tokens that are kept have spaces between them, where the tokenizer supports it.
    spaces_between_special_tokens: bool = option(True, checked_bool, field=bool)
    # Content of a stream's outputs: all so far, only what is new, or the end alone.
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, _output_kind)

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for an attribute of vLLM's."""
        raise missing("SamplingParams", name)

    def __post_init__(self) -> None:
        """Check the fields against each other. Raises `InputError`."""
        rule = "1 with temperature=0, where all answers are the same"
        check("n", self.n, rule, self.n == 1 or self.temperature > 0)
        max_tokens = self.max_tokens
        rule = f"at most max_tokens={max_tokens}"
        check("min_tokens", self.min_tokens, rule, max_tokens is None or self.min_tokens <= max_tokens)
        check("stop", self.stop, "None with detokenize=False", self.detokenize or not self.stop)
        if self.prompt_logprob_token_ids is None:
            start = self.prompt_logprob_start
            check("prompt_logprob_start", start, "None without prompt_logprob_token_ids", start is None)
        if self.trace_decode_token_ids is not None:
            check("n", self.n, "1 with trace_decode_token_ids", self.n == 1)
            for name in ("stop", "stop_token_ids", "bad_words", "structured_outputs"):
                value = getattr(self, name)
                check(name, value, "None with trace_decode_token_ids", not value)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, converted to Python's own numbers. Raises `InputError` for a value out of range."""
        if name not in _CHECKS:
            raise AttributeError(f"SamplingParams has no option {name!r}")
        object.__setattr__(self, name, _CHECKS[name](name, value))

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, so that it is computed whole."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def cuts(self) -> Literal["left", "right"] | None:
        """End at which a prompt that is too long is cut off; None: it is refused."""
        return None if self.truncate_prompt_tokens is None else self.truncation_side or "left"

    def of_answer(self, index: int) -> Self:
        """Return the parameters of one of the `n` answers, as a request for it alone would have them.

        Only the first reports log-probabilities of the prompt.
        """
        if self.n == 1:
            return self
        seed = None if self.seed is None else self.seed + index
        if seed is not None and (seed == -1 or seed >= 2 * INT64):  # go round, past the number for no seed
            seed = seed % (2 * INT64)
        of_prompt = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start") if index else ()
        made = copy.copy(self)  # all is checked already, and there may be many answers
        for name, value in (("n", 1), ("seed", seed), *((name, None) for name in of_prompt)):
            object.__setattr__(made, name, value)
        return made

    @classmethod
    def from_optional(cls, **options: Any) -> Self:
        """Create parameters from the fields of a server's request.

        Token ids of `logit_bias` may be texts, and biases beyond 100 count as 100, as in vLLM.
        """
        bias = options.get("logit_bias")
        if isinstance(bias, Mapping):
            bias = {token_id(token): _within(value, MOST_BIAS) for token, value in bias.items()}
            options = options | {"logit_bias": bias}
        return cls(**options)

    def clone(self) -> Self:
        """Return an independent copy; `InputError` if values contradict each other."""
        return dataclasses.replace(self)


@_taking_vllms(BEAM_NAMES)
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a search for the likeliest answers to a prompt.

    `beam_width` sequences go on side by side. From each, the 2 * beam_width likeliest next tokens are
    candidates, and the best of all candidates go on. A sequence that ends with the model's end-of-sequence
    token is set aside. In the end the beam_width best of all are the answers, by

        (sum of the tokens' log-probabilities) / (number of tokens) ** length_penalty

    where the number of tokens has the prompt's, and not the end-of-sequence token.
    """

    beam_width: int
    max_tokens: int  # new tokens of each answer at most
    ignore_eos: bool = False  # take the model's end-of-sequence tokens for tokens like others
    temperature: float = 0.0  # log-probabilities are of logits divided by it; 0, as 1: the model's own
    length_penalty: float = 1.0  # above 0 prefers long answers, 0 is the sum itself
    # Option of vLLM's server. `LLM.beam_search` returns the token that ended a sequence in any case.
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # what every answer must look like

    def __post_init__(self) -> None:
        """Check each value and keep Python's own numbers. Raises `InputError`."""
        rule = f"an int in [1, {MAX_BEAM_WIDTH}]"
        values = {
            "beam_width": checked_int("beam_width", self.beam_width, rule, 1, MAX_BEAM_WIDTH),
            "max_tokens": checked_int("max_tokens", self.max_tokens, "a positive int, at most 2**31 - 1", 1),
            "ignore_eos": checked_bool("ignore_eos", self.ignore_eos),
            "include_stop_str_in_output": checked_bool(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
            "temperature": checked_number(
                "temperature", self.temperature, "a number >= 0, at most 3.4e38", 0
            ),
            "structured_outputs": structured_outputs("structured_outputs", self.structured_outputs),
            "length_penalty": checked_number(
                "length_penalty",
                self.length_penalty,
                f"in [-{MOST_PENALTY}, {MOST_PENALTY}]",
                -MOST_PENALTY,
                MOST_PENALTY,
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def seed_bits(seed: int) -> int:
    """Return the 32 bits of a seed that the device draws with: the seed itself if it has 32 bits, else both
    halves combined.
    """
    return (seed ^ (seed >> 32)) % 2**32 if not 0 <= seed < 2**32 else seed


def token_id(token: object) -> object:
    """Return the number of a short text of digits, and any other value unchanged, to be refused later."""
    return int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token


def _within(value: Any, bound: float) -> Any:
    """Return a number brought into [-bound, bound], and any other value unchanged, to be refused later."""
    try:
        return min(bound, max(-bound, value)) if value == value else value
    except Exception:
        return value


_CHECKS = checks_of(SamplingParams)
# Fields that a model's generation_config.json may set.
FROM_MODEL = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.metadata.get("from_model")
)


# Names that vLLM has here.
__getattr__ = names_of("sampling_params")
