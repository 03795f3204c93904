"""Fates of vLLM's methods, and of their arguments, that are not served. `names.json` has what vLLM has."""

from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, check, shown, unknown
from jaxpaged.vllm_names.judge import fields_of, known_names
from jaxpaged.vllm_names.table import REQUEST, Verdict


def _not_there(meaning: str, names: str, use: str = "") -> dict[str, Verdict]:
    return dict.fromkeys(names.split(), Verdict(meaning, use=use))


# Methods and attributes of any class, or "Class.name" of one, that are refused: why, and what to take.
METHODS: dict[str, Verdict] = {
    **_not_there(
        "there are no workers to call",
        "AsyncLLM.collective_rpc LLMEngine.collective_rpc",
        use="the methods of LLM, such as update_weights",
    ),
    **_not_there("the model is arrays, not a module", "apply_model", use="LLM.weights"),
    **_not_there(
        "weights come as arrays or files, without a transfer engine",
        "init_weight_transfer_engine shutdown_weight_transfer_engine",
        use="update_weights",
    ),
    **_not_there("a draft model's weights stay", "start_draft_weight_update", use="update_weights"),
    **_not_there("sums of weights are not made", "compute_weight_checksums", use="LLM.weights"),
    **_not_there(
        "adapters are kept by their last use", "pin_lora", use="max_cpu_loras, to keep as many as there are"
    ),
    "supported_tasks": Verdict("one attribute says what a model is for", use="runner_type"),
    "renderer": Verdict("prompts are rendered by the model", use="LLM.render_chat"),
    "request_counter": Verdict("the engine numbers requests", use="RequestOutput.request_id"),
    "AsyncLLM.add_request": Verdict("a request is a stream of outputs", use="generate"),
    "AsyncLLM.encode": Verdict("vectors are made by LLM alone", use="LLM.encode"),
    **_not_there("the server limits what waits", "check_admission get_num_queued_tokens", use="--max-queue"),
    **_not_there("blocks are fetched, not sent", "notify_kv_transfer_request_rejected", use="adopt_blocks"),
    **_not_there("a process is not frozen", "checkpoint_prepare checkpoint_restore", use="sleep and wake_up"),
    **_not_there(
        "the number of devices stays",
        "scale_elastic_ep get_external_elastic_ep_status",
        use="data_parallel_size of a new engine",
    ),
    **_not_there(
        "an engine that fails stops", "handle_fault get_status", use="check_health, errored and dead_error"
    ),
    **_not_there(
        "events of blocks are told to subscribers", "get_kv_event_sources", use="jaxpaged.kv_events"
    ),
    **_not_there(
        "requests are drained by pauses",
        "wait_for_requests_to_drain",
        use="pause_generation(mode='wait')",
    ),
    "should_keep_api_server_alive": Verdict("the server ends with its engine", use="is_running"),
    "has_unfinished_requests_dp": Verdict(
        "replicas are in one engine", use="LLMEngine.has_unfinished_requests"
    ),
    "set_weight_version": Verdict("versions rise with new weights", use="LLM.update_weight_version"),
    "do_log_stats_with_interval": Verdict("nothing is logged by time", use="LLM.get_metrics"),
    **_not_there(
        "parameters are brought to the model when a request is made",
        "update_from_generation_config update_from_tokenizer verify sampling_type for_sampler_warmup",
        use="LLM.get_default_sampling_params",
    ),
    **_not_there(
        "the engine adds the model's tokens to stop at",
        "eos_token_id all_stop_token_ids",
        use="stop_token_ids",
    ),
    **_not_there("words are cut into tokens by the engine", "bad_words_token_ids", use="bad_words"),
    "num_logprobs": Verdict("numbers are fields", use="logprobs"),
    **_not_there(
        "requests are of text, by a decoder", "encoder_prompt encoder_prompt_token_ids", use="prompt"
    ),
    "num_cache_creation_tokens": Verdict("all of a prompt is cached", use="num_cached_tokens"),
    **_not_there(
        "caches are handed over by bytes", "kv_transfer_params ec_transfer_params", use="export_blocks"
    ),
    "RequestOutput.add": Verdict("outputs do not change", use="RequestOutputKind.CUMULATIVE"),
    "CompletionOutput.lora_request": Verdict("it is the prompt's", use="RequestOutput.lora_request"),
    "spec_decode_metrics": Verdict("they are the prompt's", use="RequestOutput.metrics.speculative_decoding"),
    **_not_there("a search keeps tokens", "orig_prompt get_prompt", use="tokens"),
    "from_base": Verdict("outputs are made by the model", use="LLM.embed, LLM.classify or LLM.score"),
    **_not_there("errors are raised", "error", use="try and except"),
    "late_chunking": Verdict("a text has one vector", use="pooling_task='token_embed'"),
}
_HINT = "it says where or how a request runs, which changes no answer"
# Arguments that a method takes beside those in its signature, and the values that pass.
ARGUMENTS: dict[str, Verdict] = {
    **dict.fromkeys(
        ["data_parallel_rank", "session_id", "kv_hints", "internal", "prompt_text", "log_requests"],
        Verdict(_HINT, takes_all=True),
    ),
    "mm_processor_kwargs": Verdict("images, sound and video", neutral=({},), use="prompts of text"),
    "reasoning_ended": Verdict(
        "a constraint that waits for the end of reasoning",
        neutral=(True,),
        use="structured_outputs with a pattern of both",
    ),
    "reasoning_parser_kwargs": Verdict("a parser in the engine", neutral=({},), use="--reasoning-parser"),
    "request": Verdict("a transfer engine's request", use="weights, a mapping of names to arrays"),
    "tokenization_kwargs": Verdict(
        "texts cut in another way", neutral=({},), use="truncate_prompt_tokens of the parameters"
    ),
    "lora_request": Verdict("an adapter for a pooling model", use="a model with its adapter merged"),
    "delay_iterations": Verdict("a trace of some steps", neutral=(0,), use="start_profile and stop_profile"),
    "max_iterations": Verdict("a trace of some steps", neutral=(0,), use="start_profile and stop_profile"),
    "profiler_kwargs": Verdict("options of torch's profiler", neutral=({},), use="jax.profiler"),
}


def check_arguments(method: str, given: Mapping[str, Any], known: tuple[str, ...] = ()) -> None:
    """Check a method's arguments that are in no signature of ours. None asks for nothing.

    Raises `InputError` for a value that asks for what is not there, and for a name that `names.json` does not
    have for "Class.method" and that is none of those `known`.
    """
    title, _, name = method.partition(".")
    names = known_names()["signatures"][title].get(name) or ()
    for argument, value in given.items():
        verdict = ARGUMENTS.get(argument)
        if verdict is None or argument not in (*names, *known):
            raise unknown(f"{method}: argument ", argument, dict.fromkeys((*names, *known)))
        is_none = value is None or any(
            type(value) is type(each) and value == each for each in verdict.neutral
        )
        if not verdict.takes_all and not is_none:
            rule = " or ".join(map(repr, (None, *verdict.neutral)))
            what = f"{argument}={shown(value)}, an argument of vLLM's {method} ({verdict.meaning})"
            raise InputError(f"{what}, is not supported: must be {rule}; use {verdict.use}")


def missing(title: str, name: str) -> AttributeError:
    """Return the error for an attribute that a class of vLLM's name does not have here."""
    if name in known_names()["signatures"].get(title, ()):
        verdict = METHODS.get(f"{title}.{name}", METHODS.get(name)) or REQUEST.get(name)
        if verdict is not None:
            use = f" (use {verdict.use})" if verdict.use else ""
            return AttributeError(f"vLLM's {title}.{name} is not served: {verdict.meaning}{use}")
    return AttributeError(f"{title!r} object has no attribute {name!r}")


class VllmClass(ABCMeta):
    """Class by the name of one of vLLM's: an attribute that it lacks is refused in a sentence."""

    def __getattr__(cls, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for an attribute of vLLM's."""
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        known = known_names()["signatures"]
        raise missing(
            next((each.__name__ for each in cls.__mro__ if each.__name__ in known), cls.__name__), name
        )


def not_from_config(title: str) -> InputError:
    """Return the error for an engine that is to be made of vLLM's own config."""
    return InputError(f"{title}.from_vllm_config is not served: there is no VllmConfig; use from_engine_args")


def profile_directory(profiler_config: Any) -> str:
    """Return the directory for traces that a `profiler_config=` names; "" for none. It is checked before."""
    if profiler_config is None:
        return ""
    directory = fields_of("profiler_config", profiler_config, "an object").get("torch_profiler_dir") or ""
    check("torch_profiler_dir", directory, "a string", isinstance(directory, str))
    return str(directory)
