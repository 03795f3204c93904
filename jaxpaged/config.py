"""The engine's fixed sizes and choices, checked once; each message names the value and the rule."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxpaged.checks import INT32_MAX, check, checked_bool, checked_int
from jaxpaged.compat import names_of
from jaxpaged.config_rules import check_processes, check_together
from jaxpaged.kv_events.options import KVEvents, kv_events
from jaxpaged.options import (
    AUTO,
    checks_of,
    choice,
    count,
    length,
    number,
    number_format,
    option,
    optional,
    ours_or_path,
    parts_or_paths,
    store_of_blocks,
    sums,
    text,
    whole,
    yes_or_no,
)
from jaxpaged.sampling_params import MAX_LOGPROBS, checked_seed
from jaxpaged.speculation import GRAMMAR, speculation

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["gguf", "int8", "int4", "fp8"]
Attention = Literal["auto", "mosaic_gpu", "native", "xla"]
PreemptionMode = Literal["recompute", "swap"]
# Names of the policies in `memory/eviction.py`.
EvictionPolicy = Literal[
    "lru", "lru_split", "fifo", "lfu", "depth", "sieve",
    "plain_lfu", "s3fifo", "tinylfu", "greedy_dual", "queue_lru",
]  # fmt: skip
Loop = Literal["auto", "device", "host"]
Sums = Literal["fast", "ordered"] | int  # see `models.shards.Shards`
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
SchedulingPolicy = Literal["fcfs", "priority"]  # first come first served; or lower `priority` first

# Prompts are computed in tiles of so many neighbouring tokens, counted from the prompt's start, so that a
# token is always computed in the same place of the same shape whatever else is in the batch.
PREFILL_TILE = 32
LATE_ARENA_MIB = 64  # for structured outputs, where no option says how much
DEFAULT_PREFILL_TOKENS = 512
MOST_BATCHED_TOKENS = 2**20
MOST_WIDTHS = 4  # each is a pass through all layers to compile


def config_of(options: Mapping[str, Any]) -> "EngineConfig":
    """Return the config of those of `LLM`'s options that are the engine's. Raises `InputError`."""
    return EngineConfig(**{n: v for n, v in options.items() if n in EngineConfig.__dataclass_fields__})


def _quantization(name: str, value: Any) -> Any:
    """Check `quantization`."""
    choices = get_args(Quantization)
    is_one = value is None or (isinstance(value, str) and value in choices)
    check(name, value, f"None or one of {', '.join(choices)}", is_one)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's fixed sizes: everything compiled depends on them, nothing on the requests."""

    # Number format of weights, activations and the cache. auto: float32 on a CPU, bfloat16 on a GPU.
    dtype: DType = option(
        "auto",
        number_format(*get_args(DType)),
        flag=text("number format: auto (default), float32, bfloat16 or float16"),
    )
    # Weights that stay quantised in memory: as in the GGUF file, or quantised while loading. None: as in the
    # directory.
    quantization: Quantization | None = option(
        None,
        _quantization,
        flag=text(
            "weights that stay quantised in memory: gguf (as a file has them), int8, int4 or fp8 (on load)"
        ),
        short="-q",
    )
    # Implementation of attention. auto: a kernel where the device has one, else xla. "package.module:name" is
    # one from outside (`jaxpaged.contracts`).
    attention: Any = option(
        "auto",
        ours_or_path(
            get_args(Attention), f"one of {', '.join(get_args(Attention))}, or 'package.module:function'"
        ),
        flag=text("implementation of attention: auto (default), mosaic_gpu, native, xla, or module:function"),
    )
    # Choice of the tokens of requests that sample. None: ours. "package.module:function" is one from outside
    # (`jaxpaged.contracts`).
    sampler: Any = option(
        None,
        ours_or_path((), "None or 'package.module:function' of a sampler"),
        flag=text("function that chooses tokens: module:function of yours (default: ours)"),
    )
    # Functions that change logits: 'package.module:function' each, or the functions (`jaxpaged.contracts`).
    # Requests give their arguments as `SamplingParams.extra_args`.
    logits_processors: Any = option(
        None,
        parts_or_paths("None, or a list of 'package.module:function' of processors"),
        flag={
            "nargs": "+",
            "metavar": "MODULE:FUNCTION",
            "help": "functions of yours that change the logits of requests (default: none)",
        },
    )
    block_size: int = option(
        16, whole("a positive int, at most 1024", 1, 1024), flag=count("tokens a block (default 16)")
    )
    # Blocks of the cache, the null block included. None: as many as memory allows.
    num_blocks: int | None = option(
        None,
        flag=count("blocks of the cache (default: as many as memory allows)"),
        short="--num-gpu-blocks-override",
    )
    gpu_memory_utilization: float = option(
        0.9,
        number("in (0, 1]", 0, 1, above=True),
        flag={"type": float, "help": "share of a device's memory to use (default 0.9)"},
    )
    # A layout's name, "package.module:Name", or a `Layout`. `pallas_kernels.layouts` checks it, and the next.
    kv_layout: Any = option(
        "token_major",
        flag=text("layout of K and V in a block: token_major (default), another name, or module:Name"),
    )
    # Number format of K and V. auto: the layout's own.
    kv_cache_dtype: str = option(
        "auto", flag=text("number format of K and V: auto (default), fp8, fp8_e4m3, fp8_e5m2, int8 or int4")
    )
    calculate_kv_scales: bool = option(
        False,
        checked_bool,
        flag=yes_or_no("measure the scales of an fp8 cache on the first prompt (default: no, they are 1)"),
    )
    max_num_seqs: int = option(
        16,
        whole("a positive int, at most 4096", 1, 4096),
        flag=count("sequences decoded together (default 16)"),
    )
    # Most tokens of a prompt with its answer; the cache must hold them. None: the model's limit. "auto" or
    # -1: the largest part of that limit that fits.
    max_model_len: int | Literal["auto"] | None = option(
        None,
        length,
        flag={
            "type": lambda text: text if text == AUTO else int(text),
            "help": "most tokens of a prompt with its answer (default: the model's limit), or auto (-1): as "
            "many as the cache holds",
        },
    )
    # Most tokens computed in one step. None: max_num_seqs + 512.
    max_num_batched_tokens: int | None = option(
        None, flag=count("most tokens computed in one step (default: max-num-seqs + 512)")
    )
    enable_prefix_caching: bool = option(
        True, checked_bool, flag=yes_or_no("let requests that begin alike share blocks (default: yes)")
    )
    # Whether prompts share blocks with earlier answers, too. The last bits of such blocks may differ.
    reuse_answers: bool = option(
        False,
        checked_bool,
        flag=yes_or_no(
            "let prompts share blocks with earlier answers, whose last bits may differ (default: no)"
        ),
    )
    # Whether all layers share one block table, which keeps what the layer that reads most needs. Else each
    # kind of layer has tables of its own, and gives back what has left its window.
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        checked_bool,
        flag=yes_or_no("let all kinds of layers share one block table, and keep more (default: no)"),
    )
    # Kind of the layers that would read everything, or a function that returns each layer's kind. None: the
    # model's own. "package.module:Name" is one from outside (`jaxpaged.contracts`).
    layer_kind: Any = option(
        None,
        ours_or_path((), "None or 'package.module:Name' of a kind of layer"),
        flag=text(
            "kind of the layers that would read all tokens: module:Name of yours (default: the model's)"
        ),
    )
    # Order in which free blocks are taken and lose their content: a name, "package.module:Name", or a policy.
    eviction_policy: Any = option(
        "lru",
        ours_or_path(
            get_args(EvictionPolicy),
            f"one of {', '.join(get_args(EvictionPolicy))}, or 'package.module:Name'",
        ),
        flag=text(
            "order in which free blocks are taken: the longest unused first (lru, default), those without "
            "content and then the longest unused (lru_split), or fifo, lfu, depth, sieve, plain_lfu, s3fifo, "
            "tinylfu, greedy_dual, queue_lru, or module:Name of one of yours"
        ),
    )
    # Treatment of a request that is preempted when blocks run out.
    preemption_mode: PreemptionMode = option(
        "recompute",
        choice(*get_args(PreemptionMode)),
        flag=text("treatment of a preempted request: recompute (default) or swap"),
    )
    # Blocks of the pool in host memory that preempted requests are swapped to.
    num_host_blocks: int = option(0, flag=count("blocks in host memory to swap to"))
    # GiB of host memory for blocks of prompts that leave the device. None: they are forgotten.
    kv_offloading_size: float | None = option(
        None,
        optional(number("None or a number > 0", 0, 2**20, above=True)),
        flag={"type": float, "help": "GiB of host memory for prompts' blocks that leave the device"},
    )
    # Stores of such blocks: host memory (vLLM's name: native); with "disk:DIR" a directory below it, and with
    # "package.module:Name" a store of one's own.
    kv_offloading_backend: Any = option(
        "host",
        store_of_blocks,
        flag=text("stores of such blocks: host (default); with disk:DIR or module:Name one below it, too"),
    )
    kv_offloading_disk_size: float = option(
        16.0,
        number("a number > 0", 0, 2**20, above=True),
        flag={"type": float, "help": "GiB of files in the directory of disk:DIR (default 16)"},
    )
    # Events of the prefix cache for routers, in vLLM's words and messages (extra `events`).
    kv_events_config: KVEvents | None = option(
        None,
        kv_events,
        flag=text(
            'events of the prefix cache for routers: {"enable_kv_cache_events": true, "endpoint": '
            '"tcp://*:5557"} (default: none)'
        ),
    )
    scheduling_policy: SchedulingPolicy = option(
        "fcfs", choice(*get_args(SchedulingPolicy)), flag=text("fcfs (default) or priority")
    )
    enable_lora: bool = option(False, checked_bool, flag=yes_or_no("let requests have low-rank adapters"))
    max_loras: int = option(
        1,
        whole("a positive int, at most 256", 1, 256),
        flag=count("different adapters that run together (default 1)"),
    )
    max_lora_rank: int = option(
        16,
        whole("a positive int, at most 512", 1, 512),
        flag=count("largest rank of an adapter (default 16)"),
    )
    # MiB of the device's memory for the automata of structured outputs. 0: requests have none. None: 64,
    # which an engine of one process takes when a request first asks for them.
    structured_outputs_mib: int | None = option(
        None,
        flag=count("MiB of the device's memory for structured outputs, 0 for none (default: 64 when asked)"),
    )
    # Drafts of coming tokens, verified in slots that no sequence needs; vLLM's words. Answers stay the same.
    speculative_config: Any = option(
        None,
        speculation,
        flag=text('drafts of coming tokens: {"method": "ngram", "num_speculative_tokens": 7} (default: no)'),
        short="-sc",
    )
    # Whether requests may have `SamplingParams.trace_decode_token_ids`. The loop then looks for them.
    enable_trace_replay: bool = option(False, checked_bool, flag=yes_or_no("let requests replay answers"))
    # Whether answers tell what tokens were chosen from. Each row takes 4 bytes a token of the vocabulary.
    return_sampling_mask: bool = option(False, checked_bool, flag=yes_or_no("tell what was chosen from"))
    # Whether answers tell which experts each token has chosen. It takes some bytes a token, layer and expert.
    enable_return_routed_experts: bool = option(
        False, checked_bool, flag=yes_or_no("tell which experts each token has chosen")
    )
    # Tokens in a line of `prompt_logprob_token_ids` at most. A row takes 4 bytes for each at each position.
    max_prompt_logprob_token_ids: int = option(
        0, whole("an int in [0, 4096]", 0, 4096), flag=count("candidates for a prompt's token (default 0)")
    )
    # Adapters kept in host memory. None: all that were used.
    max_cpu_loras: int | None = option(None, flag=count("adapters kept in host memory (default: all)"))
    # Rows of narrower decode passes, rising, each below max_num_seqs. A step takes the narrowest pass that
    # holds all running rows. A token's last bits may then depend on their number. Each pass is compiled.
    # None: a 32nd, a quarter and a half of max_num_seqs where CPU kernels compute, for which they do
    # not; else none.
    decode_widths: tuple[int, ...] | None = option(
        None,
        flag={
            "type": int,
            "nargs": "+",
            "metavar": "ROWS",
            "help": "rows of narrower decode passes. A step takes the narrowest pass that holds all running "
            "rows. A token's last bits may then depend on their number (default: on a CPU a quarter, a half)",
        },
    )
    # Address of process 0, "HOST:PORT", where a model's processes meet. Each has equally many of its devices.
    distributed_init: str | None = option(
        None,
        flag={"metavar": "HOST:PORT", "help": "address of process 0, where the processes of a model meet"},
    )
    num_processes: int = option(
        1,
        whole("a positive int, at most 256", 1, 256),
        flag=count("processes that share the model's devices (default 1)"),
    )
    process_id: int = option(0, flag=count("number of this process, from 0 (default)"))
    # Devices that share a model's heads, feed-forward columns and vocabulary.
    tensor_parallel_size: int = option(
        1,
        whole("a positive int, at most 256", 1, 256),
        flag=count("devices that share the model (default 1)"),
        short="-tp",
    )
    # Replicas of the model, each on tensor_parallel_size devices, with rows and a cache of its own.
    data_parallel_size: int = option(
        1,
        whole("a positive int, at most 256", 1, 256),
        flag=count("replicas of the model, each on tensor-parallel-size devices (default 1)"),
        short="-dp",
    )
    # Sums over the devices of a model: "fast"; "ordered": in the devices' order with any library, for more
    # bytes moved; or a number: as so many devices would sum, on however many, with equal bits.
    tensor_parallel_sums: Sums = option(
        "fast",
        sums,
        flag={
            "type": lambda value: int(value) if value.isdecimal() else value,
            "help": "sums over the devices: fast (default); ordered: in their order, for more bytes moved; "
            "or a number: as so many devices would, with equal bits on fewer",
        },
    )
    # Whether the device or the host runs the serving loop. auto: the device; the host where a GPU fails to
    # run it as one program.
    loop: Loop = option(
        "auto",
        choice(*get_args(Loop)),
        flag=text(
            "where the serving loop runs: device, host, or auto (default): on the device, and on the host "
            "where a GPU fails to run it as one program"
        ),
    )
    # Whether layers are computed in a loop: then compiling takes as long for many as for few. None: where our
    # CPU kernels multiply. On a GPU True needs 16 bits and the attention kernel. Our own kernel,
    # which was never measured, then multiplies in place of cuBLAS.
    loop_over_layers: bool | None = option(
        None,
        optional(checked_bool),
        flag=yes_or_no(
            "compute layers in a loop, so that compiling takes as long for many as for few (default: where "
            "our CPU kernels multiply; on a GPU a kernel that was never measured then multiplies)"
        ),
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        whole(f"an int in [0, {MAX_LOGPROBS}], as many as a step tells of", 0, MAX_LOGPROBS),
        flag=count("likeliest tokens that a request may ask for (default and most: 20)"),
    )
    # Meaning of the numbers told of an answer's tokens; "processed": after all options that change them.
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        choice(*get_args(LogprobsMode)),
        flag=text(
            "numbers told of tokens: raw_logprobs (default), processed_logprobs, or the same of logits"
        ),
    )
    # Whether compiled programs and packed weights are kept on disk for the next start.
    keep_programs: bool = option(
        True,
        checked_bool,
        flag=yes_or_no("keep compiled programs and packed weights on disk for the next start (default: yes)"),
    )
    # Seed for requests without one, of up to 64 bits. (On the command line --seed is the request's.)
    seed: int = option(0, checked_seed)

    def __post_init__(self) -> None:
        """Check the values, each by itself and then together; keep Python's own numbers.

        Raises `InputError`.
        """
        for name, checked in _CHECKS.items():
            self._set(name, checked(name, getattr(self, name)))
        if isinstance(self.kv_offloading_backend, str) and self.kv_offloading_backend == "native":
            self._set("kv_offloading_backend", "host")
        self._set_int("structured_outputs_mib", "None or an int in [0, 4096]", 0, 4096)
        drafts = self.speculative_config
        if self.structured_outputs_mib is None and drafts is not None and drafts.method == GRAMMAR:
            self._set("structured_outputs_mib", LATE_ARENA_MIB)
        check_together(self)
        # What a hit takes from the cache nobody computes, and so nobody routes.
        caches, rule = self.enable_prefix_caching, "False with enable_return_routed_experts"
        check("enable_prefix_caching", caches, rule, not (caches and self.enable_return_routed_experts))
        self._check_tokens_and_blocks()
        num_processes = self.num_processes
        self._set_int("process_id", f"an int in [0, num_processes={num_processes})", 0, num_processes - 1)
        check_processes(self)
        self._set_int("max_cpu_loras", f"None or an int >= max_loras={self.max_loras}", self.max_loras)
        self._check_widths()

    @property
    def arena_words(self) -> int:
        """Number of 32-bit words for the automata of structured outputs, from the start on."""
        return (self.structured_outputs_mib or 0) * 2**18

    @property
    def most_arena_words(self) -> int:
        """Number of 32-bit words for the automata of structured outputs when a request has asked for them."""
        is_late = self.structured_outputs_mib is None and self.num_processes == 1
        return LATE_ARENA_MIB * 2**18 if is_late else self.arena_words

    @property
    def most_drafts(self) -> int:
        """Drafts of a sequence in one step; 0: there are none."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    def _check_tokens_and_blocks(self) -> None:
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
        if self.preemption_mode == "swap":
            self._set_int("num_host_blocks", f"an int >= 2 to swap to, at most {most_blocks}", 2, most_blocks)
        else:
            self._set_int("num_host_blocks", "0 unless preemption_mode is 'swap'", 0, 0)

    def _check_widths(self) -> None:
        rule = f"ints that rise from 1 to less than max_num_seqs={self.max_num_seqs}, at most {MOST_WIDTHS}"
        if (widths := self.decode_widths) is None:
            return
        check("decode_widths", widths, rule, isinstance(widths, (tuple, list)) and len(widths) <= MOST_WIDTHS)
        widths = tuple(
            checked_int("decode_widths", width, rule, 1, self.max_num_seqs - 1) for width in widths
        )
        check("decode_widths", widths, rule, list(widths) == sorted(set(widths)))
        self._set("decode_widths", widths)

    @property
    def num_prefill_tiles(self) -> int:
        """Prompt tiles computed in one step: the tokens of a step less one for each decoding row."""
        tokens = self.max_num_batched_tokens or self.max_num_seqs + DEFAULT_PREFILL_TOKENS
        return (tokens - self.max_num_seqs) // PREFILL_TILE

    @property
    def num_rows(self) -> int:
        """Rows on the device: one for each running sequence, and as many for waiting ones."""
        return 2 * self.max_num_seqs

    def _set_int(self, name: str, rule: str, minimum: int, maximum: int = INT32_MAX) -> None:
        """Check a field and keep it as Python's int; None is good where the field's default is None."""
        value = getattr(self, name)
        if value is not None or self.__dataclass_fields__[name].default is not None:
            self._set(name, checked_int(name, value, rule, minimum, maximum))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_CHECKS = checks_of(EngineConfig)


# Names that vLLM has here, and modules below: `compat` has both.
__path__: list[str] = []
__getattr__ = names_of("config")
