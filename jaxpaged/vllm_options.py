"""Options of vLLM's `LLM` that ours has not: accepted where they change nothing, else said to be vLLM's."""

import numbers
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, shown

# By another name here.
RENAMED = {"num_gpu_blocks_override": "num_blocks"}

# How vLLM does its work, not what it answers: any value is good.
IRRELEVANT = frozenset(
    {
        "async_scheduling",
        "compilation_config",
        "cuda_graph_sizes",
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_log_stats",
        "distributed_executor_backend",
        "enforce_eager",
        "max_logprobs",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "optimization_level",
        "prefix_caching_hash_algo",
        "safetensors_load_strategy",
        "swap_space",
        "use_tqdm_on_load",
    }
)

# Values that ask for nothing that is not there; None is good for all of them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_local_media_path": ("",),
    "code_revision": (),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "decode_context_parallel_size": (1,),
    "device": ("auto",),
    "disable_sliding_window": (False,),
    "download_dir": (),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora_bias": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "fully_sharded_loras": (False,),
    "hf_config_path": (),
    "hf_overrides": ({},),
    "hf_token": (),
    "kv_transfer_config": (),
    "limit_mm_per_prompt": ({},),
    "load_format": ("auto", "safetensors", "gguf"),
    "logits_processors": ([],),
    "lora_dtype": ("auto",),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto", "vllm"),
    "num_lookahead_slots": (0,),
    "num_scheduler_steps": (1,),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "pooler_config": (),
    "quantization_param_path": (),
    "rope_scaling": ({},),
    "rope_theta": (),
    "runner": ("auto", "generate"),
    "served_model_name": (),
    "speculative_config": (),
    "structured_outputs_config": (),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (),
    "trust_remote_code": (False,),
}


def defaults() -> dict[str, object]:
    """Return vLLM's options that are not ours, each with a value that asks for nothing."""
    neutral = {name: next(iter(values), None) for name, values in NEUTRAL.items()}
    return dict.fromkeys((*RENAMED, *sorted(IRRELEVANT))) | neutral


def translated(options: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The options by our own names, without those that change nothing: None stands for the default, as in
    vLLM.

    Raises `InputError` for a value that is not supported here, and for a name that neither has.
    """
    ours: dict[str, Any] = {}
    for name, value in options.items():
        if name in known or name in RENAMED:
            name = RENAMED.get(name, name)
            if value is None:
                continue
            if name in ours:
                raise InputError(f"{name} is given twice, the second time as {shown(value)}: give it once")
            ours[name] = value
        elif name in NEUTRAL:
            if value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                rule = " or ".join(map(repr, (None, *NEUTRAL[name])))
                raise InputError(
                    f"{name}={shown(value)}, an option of vLLM's, is not supported: must be {rule}"
                )
        elif name not in IRRELEVANT:
            raise InputError(f"option {name!r} must be one of {', '.join(sorted(known))}")
    return ours


def _same(value: object, neutral: object) -> bool:
    is_plain = isinstance(value, str | numbers.Real | list | dict)
    return is_plain and isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
