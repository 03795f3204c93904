"""How one request's tokens are chosen. Names and defaults are vLLM's."""

import dataclasses

from jaxpaged.checks import InputError, check, checked_bool, checked_int, checked_number, is_int, shown

# A row's stop tokens lie in a fixed array: the model's end-of-sequence tokens and the request's own.
MAX_STOP_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose one request's tokens.

    Sampling draws from `softmax(logits / temperature)` after dropping what `top_k`, `top_p` and `min_p`
    exclude. The draw depends on `seed` and the token's position only, never on the rest of the batch.
    """

    max_tokens: int | None = 16  # at most so many new tokens; None: up to the model's length
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 and -1 keep all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # keep tokens at least so likely, relative to the likeliest
    seed: int | None = None  # None: a seed of the request's own, from the engine's seed
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] | None = ()  # end the answer, like the model's end-of-sequence tokens
    logprobs: int | None = None  # 0: give each answer token's log-probability too

    def __post_init__(self) -> None:
        """Raises `InputError` for a value out of its range; what is kept is Python's own numbers."""
        values = {
            "max_tokens": None
            if self.max_tokens is None
            else checked_int("max_tokens", self.max_tokens, "None or a positive int, at most 2**31 - 1", 1),
            "temperature": checked_number(
                "temperature", self.temperature, "a number >= 0, at most 3.4e38", 0
            ),
            "top_k": max(
                0, checked_int("top_k", self.top_k, "an int >= 0, at most 2**31 - 1 (0 and -1 keep all)", -1)
            ),
            "top_p": checked_number("top_p", self.top_p, "in (0, 1]", 0, 1, above=True),
            "min_p": checked_number("min_p", self.min_p, "in [0, 1]", 0, 1),
            "seed": None
            if self.seed is None
            else checked_int("seed", self.seed, "None or an int in [0, 2**32)", 0, 2**32 - 1),
            "ignore_eos": checked_bool("ignore_eos", self.ignore_eos),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "logprobs": self.logprobs,
        }
        check(
            "logprobs",
            self.logprobs,
            "None or 0 (the answer's own tokens; others are not kept)",
            self.logprobs is None or (is_int(self.logprobs) and self.logprobs == 0),
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    """Whether they are the model's tokens is checked when the request comes to a model."""
    if ids is None:
        return ()
    rule = f"at most {MAX_STOP_TOKENS} token ids >= 0"
    check("stop_token_ids", ids, rule, isinstance(ids, tuple | list) and len(ids) <= MAX_STOP_TOKENS)
    assert isinstance(ids, tuple | list)
    for token in ids:
        if not is_int(token) or token < 0:
            raise InputError(f"stop_token_ids={shown(ids)} must be {rule}")
    return tuple(int(token) for token in ids)
