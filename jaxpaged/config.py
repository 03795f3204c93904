"""What a user may choose, checked once; each message names the value and the rule."""

import dataclasses
from typing import Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "mosaic_gpu", "native", "xla"]
PreemptionMode = Literal["recompute", "swap"]
EvictionPolicy = Literal["lru", "lru_split"]  # those of `memory/policies.py` that keep content
SchedulingPolicy = Literal["fcfs", "priority"]  # first come first served; or lower `priority` first


class InputError(ValueError):
    """A mistake in what the user gave: one sentence with the name, the value and the rule."""


def check(name: str, value: object, rule: str, ok: bool) -> None:
    """Raise `InputError` with the one form all our messages have, unless `ok`."""
    if not ok:
        raise InputError(f"{name}={value!r} must be {rule}")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose one request's tokens. Names and defaults are vLLM's.

    Sampling draws from `softmax(logits / temperature)` after dropping what `top_k`, `top_p` and `min_p`
    exclude. The draw depends on `seed` and the token's position only, never on the rest of the batch.
    """

    max_tokens: int = 16  # at most so many new tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # keep tokens at least so likely, relative to the likeliest
    seed: int | None = None  # None: a seed of the request's own, from the engine's seed
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # end the answer, like the model's end-of-sequence tokens
    logprobs: int | None = None  # 0: give each answer token's log-probability too

    def __post_init__(self) -> None:
        check(
            "max_tokens", self.max_tokens, "a positive int", is_int(self.max_tokens) and self.max_tokens > 0
        )
        check("temperature", self.temperature, "a number >= 0", is_finite_at_least(self.temperature, 0))
        check("top_k", self.top_k, "an int >= 0 (0 keeps all)", is_int(self.top_k) and self.top_k >= 0)
        check("top_p", self.top_p, "in (0, 1]", is_number(self.top_p) and 0 < self.top_p <= 1)
        check("min_p", self.min_p, "in [0, 1]", is_number(self.min_p) and 0 <= self.min_p <= 1)
        check(
            "seed",
            self.seed,
            "None or an int in [0, 2**32)",
            self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**32),
        )
        ids = self.stop_token_ids
        check(
            "stop_token_ids",
            ids,
            f"at most {MAX_STOP_TOKENS} token ids >= 0",
            isinstance(ids, tuple | list)
            and len(ids) <= MAX_STOP_TOKENS
            and all(is_int(i) and i >= 0 for i in ids),
        )
        check(
            "logprobs",
            self.logprobs,
            "None or 0 (the answer's own tokens; others are not kept)",
            self.logprobs is None or (is_int(self.logprobs) and self.logprobs == 0),
        )
        object.__setattr__(self, "stop_token_ids", tuple(ids))


# A row's stop tokens lie in a fixed array: the model's end-of-sequence tokens and the request's own.
MAX_STOP_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's fixed sizes: everything compiled depends on them, nothing on the requests."""

    dtype: DType = "auto"  # of weights, activations and cache; auto: float32 on a CPU, bfloat16 on a GPU
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None  # in the cache, the null block included; None: what memory allows
    max_num_seqs: int = 16  # rows decoded together
    max_model_len: int | None = None  # tokens of a prompt with its answer; None: the model's own limit
    max_num_batched_tokens: int | None = None  # computed in one step; None: max_num_seqs + 512
    enable_prefix_caching: bool = True  # requests that begin alike share the blocks of what they share
    reuse_answers: bool = False  # also blocks that were computed as an answer, whose last bits may differ
    eviction_policy: EvictionPolicy = "lru"  # which free blocks are taken first, and lose what they hold
    num_host_blocks: int = 0  # of the pool in host memory that preempted requests are swapped to
    preemption_mode: PreemptionMode = "recompute"  # of who gives way when blocks run out
    scheduling_policy: SchedulingPolicy = "fcfs"
    gpu_memory_utilization: float = 0.9  # share of the device memory to use
    attention: Attention = "auto"  # auto: a kernel where the device has one, else xla
    seed: int = 0  # for requests without a seed

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", DType),
            ("attention", Attention),
            ("eviction_policy", EvictionPolicy),
            ("preemption_mode", PreemptionMode),
            ("scheduling_policy", SchedulingPolicy),
        ):
            value = getattr(self, name)
            check(name, value, f"one of {', '.join(get_args(choices))}", value in get_args(choices))
        for name in ("enable_prefix_caching", "reuse_answers"):
            value = getattr(self, name)
            check(name, value, "True or False", isinstance(value, bool))
        rule = "False without enable_prefix_caching"
        check("reuse_answers", self.reuse_answers, rule, self.enable_prefix_caching or not self.reuse_answers)
        for name in ("block_size", "max_num_seqs"):
            value = getattr(self, name)
            check(name, value, "a positive int", is_int(value) and value > 0)
        check("block_size", self.block_size, "at most 1024", self.block_size <= 1024)
        check("max_num_seqs", self.max_num_seqs, "at most 4096", self.max_num_seqs <= 4096)
        tokens = self.max_num_batched_tokens
        least = self.max_num_seqs + PREFILL_TILE
        check(
            "max_num_batched_tokens",
            tokens,
            f"None or an int >= {least}, max_num_seqs and one tile of {PREFILL_TILE} prompt tokens",
            tokens is None or (is_int(tokens) and tokens >= least),
        )
        host = self.num_host_blocks
        if self.preemption_mode == "swap":
            check("num_host_blocks", host, "an int >= 2 to swap to", is_int(host) and host >= 2)
        else:
            check("num_host_blocks", host, "0 unless preemption_mode is 'swap'", is_int(host) and host == 0)
        for name, least in (("num_blocks", 2), ("max_model_len", 2)):
            value = getattr(self, name)
            check(
                name, value, f"None or an int >= {least}", value is None or (is_int(value) and value >= least)
            )
        check(
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "in (0, 1]",
            is_number(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1,
        )
        check("seed", self.seed, "an int in [0, 2**32)", is_int(self.seed) and 0 <= self.seed < 2**32)

    @property
    def num_prefill_tiles(self) -> int:
        """Prompt tiles computed in one step: what the rows that decode leave of the budget."""
        tokens = self.max_num_batched_tokens or self.max_num_seqs + DEFAULT_PREFILL_TOKENS
        return (tokens - self.max_num_seqs) // PREFILL_TILE


# Prompts are computed in tiles of so many neighbouring tokens, counted from the prompt's start, so that a
# token is always computed in the same place of the same shape whatever else is in the batch.
PREFILL_TILE = 32
DEFAULT_PREFILL_TOKENS = 512


def is_finite_at_least(value: object, least: float) -> bool:
    return is_number(value) and least <= value < float("inf")  # type: ignore[operator]
