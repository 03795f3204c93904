"""The engine's fixed sizes and choices, checked once; each message names the value and the rule."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxpaged.checks import (
    INT32_MAX,
    check,
    checked_bool,
    checked_choice,
    checked_int,
    checked_number,
    is_int,
)
from jaxpaged.sampling_params import MAX_LOGPROBS, checked_seed

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["gguf", "int8", "int4", "fp8"]
Attention = Literal["auto", "mosaic_gpu", "native", "xla"]
PreemptionMode = Literal["recompute", "swap"]
# Those of `memory/eviction.py`.
EvictionPolicy = Literal["lru", "lru_split", "fifo", "lfu", "depth", "sieve", "s3fifo"]
Loop = Literal["auto", "device", "host"]
Sums = Literal["fast", "ordered"]  # see `models.shards.Shards`
SchedulingPolicy = Literal["fcfs", "priority"]  # first come first served; or lower `priority` first

# Prompts are computed in tiles of so many neighbouring tokens, counted from the prompt's start, so that a
# token is always computed in the same place of the same shape whatever else is in the batch.
PREFILL_TILE = 32
DEFAULT_PREFILL_TOKENS = 512
MOST_BATCHED_TOKENS = 2**20
MOST_WIDTHS = 4  # each is a pass through all layers to compile
AUTO: Literal["auto"] = "auto"
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's


def config_of(options: Mapping[str, Any]) -> "EngineConfig":
    """Return the config of those of `LLM`'s options that are the engine's. Raises `InputError`."""
    return EngineConfig(**{n: v for n, v in options.items() if n in EngineConfig.__dataclass_fields__})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's fixed sizes: everything compiled depends on them, nothing on the requests."""

    dtype: DType = "auto"  # of weights, activations and cache; auto: float32 on a CPU, bfloat16 on a GPU
    # Weights that stay quantised in memory: as a GGUF file has them, or quantised on load. None: those that a
    # directory has so.
    quantization: Quantization | None = None
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None  # in the cache, the null block included; None: what memory allows
    max_num_seqs: int = 16  # rows decoded together
    # Tokens of a prompt with its answer, which the cache must hold. None: the model's own limit; "auto", or
    # -1: what fits of it.
    max_model_len: int | Literal["auto"] | None = None
    max_num_batched_tokens: int | None = None  # computed in one step; None: max_num_seqs + 512
    enable_prefix_caching: bool = True  # requests that begin alike share the blocks of what they share
    reuse_answers: bool = False  # also blocks that were computed as an answer, whose last bits may differ
    eviction_policy: EvictionPolicy = "lru"  # which free blocks are taken first, and lose what they hold
    num_host_blocks: int = 0  # of the pool in host memory that preempted requests are swapped to
    preemption_mode: PreemptionMode = "recompute"  # of who gives way when blocks run out
    scheduling_policy: SchedulingPolicy = "fcfs"
    # How K and V lie in their blocks, and in what numbers: see `pallas_kernels.layouts`, which checks the
    # two.
    kv_layout: Any = "token_major"  # a layout's name, "package.module:Name", or a `Layout`
    kv_cache_dtype: str = "auto"  # the layout's own; or fp8 (fp8_e4m3), fp8_e5m2, int8 or int4
    calculate_kv_scales: bool = False  # of an fp8 cache, from the first tokens; otherwise they are 1
    gpu_memory_utilization: float = 0.9  # share of the device memory to use
    enable_lora: bool = False  # requests may have low-rank adapters of their own
    max_loras: int = 1  # different ones that run together
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None  # kept in the host's memory; None: all that were asked for
    tensor_parallel_size: int = 1  # devices that share the model: heads, feed-forward columns, vocabulary
    # What they add up: "fast", or "ordered", in their order whatever the library, for more bytes moved.
    tensor_parallel_sums: Sums = "fast"
    data_parallel_size: int = 1  # groups of so many devices: each has the model, rows and a cache of its own
    # Processes that have as many of those devices each, and meet at process 0's "HOST:PORT".
    distributed_init: str | None = None
    num_processes: int = 1
    process_id: int = 0
    attention: Attention = "auto"  # auto: a kernel where the device has one, else xla
    # Who turns the serving loop. auto: the device, or the host where a GPU fails to run it as one program.
    loop: Loop = "auto"
    # Rows of narrower decode passes, rising, each below max_num_seqs: a step takes the narrowest that holds
    # all that run. A token's last bits may then depend on how many run beside it, and each is compiled.
    decode_widths: tuple[int, ...] = ()
    # Whether layers are computed in a loop, so that compiling does not take longer for more of them. None:
    # where our CPU kernels multiply. On a GPU True needs Hopper, 16 bits and its attention kernel: products
    # are then by our kernel, which was never measured, in place of cuBLAS.
    loop_over_layers: bool | None = None
    max_logprobs: int = MAX_LOGPROBS  # likeliest tokens that a request may ask to be told of
    # Whether compiled programs and weights as programs read them are kept on disk for the next start.
    keep_programs: bool = True
    seed: int = 0  # for requests without a seed: any number of 64 bits

    def __post_init__(self) -> None:
        """Raises `InputError`; what is kept is Python's own numbers."""
        self._set("dtype", _dtype_name(self.dtype))
        for name, choices in (
            ("dtype", DType),
            ("attention", Attention),
            ("eviction_policy", EvictionPolicy),
            ("loop", Loop),
            ("preemption_mode", PreemptionMode),
            ("scheduling_policy", SchedulingPolicy),
            ("tensor_parallel_sums", Sums),
        ):
            checked_choice(name, getattr(self, name), get_args(choices))
        if self.quantization is not None:
            kinds = get_args(Quantization)
            is_one = isinstance(self.quantization, str) and self.quantization in kinds
            check("quantization", self.quantization, f"None or one of {', '.join(kinds)}", is_one)
        for name in (
            "enable_prefix_caching",
            "reuse_answers",
            "calculate_kv_scales",
            "enable_lora",
            "keep_programs",
        ):
            checked_bool(name, getattr(self, name))
        if self.loop_over_layers is not None:
            checked_bool("loop_over_layers", self.loop_over_layers)
        rule = "False without enable_prefix_caching"
        check("reuse_answers", self.reuse_answers, rule, self.enable_prefix_caching or not self.reuse_answers)
        for name, most in (("block_size", 1024), ("max_num_seqs", 4096)):
            self._set_int(name, f"a positive int, at most {most}", 1, most)
        least = self.max_num_seqs + PREFILL_TILE
        rule = (
            f"None or an int >= {least}, max_num_seqs and one tile of {PREFILL_TILE} prompt tokens, and at "
        )
        self._set_int(
            "max_num_batched_tokens", f"{rule}most {MOST_BATCHED_TOKENS}", least, MOST_BATCHED_TOKENS
        )
        # A slot is an int32: block_id * block_size + offset.
        most_blocks = INT32_MAX // self.block_size
        self._set_int("num_blocks", f"None or an int >= 2, at most {most_blocks}", 2, most_blocks)
        if _is_auto(self.max_model_len):
            self._set("max_model_len", AUTO)
        else:
            rule = "None or an int >= 2, at most 2**31 - 1, or 'auto' (-1) for what fits"
            self._set_int("max_model_len", rule, 2)
        if self.preemption_mode == "swap":
            self._set_int("num_host_blocks", f"an int >= 2 to swap to, at most {most_blocks}", 2, most_blocks)
        else:
            self._set_int("num_host_blocks", "0 unless preemption_mode is 'swap'", 0, 0)
        self._set_int("tensor_parallel_size", "a positive int, at most 256", 1, 256)
        self._set_int("data_parallel_size", "a positive int, at most 256", 1, 256)
        self._check_processes()
        self._set_int("max_loras", "a positive int, at most 256", 1, 256)
        self._set_int("max_lora_rank", "a positive int, at most 512", 1, 512)
        self._set_int("max_cpu_loras", f"None or an int >= max_loras={self.max_loras}", self.max_loras)
        rule = f"ints that rise from 1 to less than max_num_seqs={self.max_num_seqs}, at most {MOST_WIDTHS}"
        widths = self.decode_widths
        check("decode_widths", widths, rule, isinstance(widths, (tuple, list)) and len(widths) <= MOST_WIDTHS)
        widths = tuple(
            checked_int("decode_widths", width, rule, 1, self.max_num_seqs - 1) for width in widths
        )
        check("decode_widths", widths, rule, list(widths) == sorted(set(widths)))
        self._set("decode_widths", widths)
        share = checked_number(
            "gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]", 0, 1, above=True
        )
        self._set("gpu_memory_utilization", share)
        rule = f"an int in [0, {MAX_LOGPROBS}], as many as a step tells of"
        self._set_int("max_logprobs", rule, 0, MAX_LOGPROBS)
        self._set("seed", checked_seed("seed", self.seed))

    @property
    def num_prefill_tiles(self) -> int:
        """Prompt tiles computed in one step: what the rows that decode leave of the budget."""
        tokens = self.max_num_batched_tokens or self.max_num_seqs + DEFAULT_PREFILL_TOKENS
        return (tokens - self.max_num_seqs) // PREFILL_TILE

    @property
    def num_rows(self) -> int:
        """Places for requests on the device: while all that can run do, as many again wait there."""
        return 2 * self.max_num_seqs

    def _check_processes(self) -> None:
        self._set_int("num_processes", "a positive int, at most 256", 1, 256)
        count, address = self.num_processes, self.distributed_init
        self._set_int("process_id", f"an int in [0, num_processes={count})", 0, count - 1)
        if count == 1:
            check("distributed_init", address, "None unless num_processes is more than 1", address is None)
            return
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        check(
            "distributed_init",
            address,
            "HOST:PORT of process 0",
            bool(host) and port.isascii() and port.isdigit(),
        )
        rule = f"a multiple of num_processes={count}"
        check("tensor_parallel_size", self.tensor_parallel_size, rule, self.tensor_parallel_size % count == 0)
        groups, rule = self.data_parallel_size, "1 with several processes: start an engine for each group"
        check("data_parallel_size", groups, rule, groups == 1)

    def _set_int(self, name: str, rule: str, least: int, most: int = INT32_MAX) -> None:
        """Check a field and keep it as Python's int; None is good where the field's default is None."""
        value = getattr(self, name)
        if value is not None or self.__dataclass_fields__[name].default is not None:
            self._set(name, checked_int(name, value, rule, least, most))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _is_auto(value: Any) -> bool:
    return value == AUTO if isinstance(value, str) else is_int(value) and value == -1


def _dtype_name(dtype: Any) -> Any:
    """ "float32" for "float32", "float", and for NumPy's, JAX's and PyTorch's types of that name."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    return name if name in get_args(DType) else dtype
