"""The judgement of each of vLLM's names that is not served: which values pass, and what else there is.

Three tables, by what the names are said to: `ENGINE`, `SERVER` (flags of `vllm serve` alone) and `REQUEST`
(sampling options and the fields of HTTP bodies). None, a name's default in vLLM and, unless `is_strict`, an
empty list, object or text pass everywhere. After a new version of vLLM, `make.py` renews the names and the
tests say which ones still need a judgement here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Judgement of a name: its meaning, and which of its values pass."""

    meaning: str  # what it asks for, or why its value changes nothing
    takes_all: bool = False  # True: any value passes, for it changes no answer
    neutral: tuple[Any, ...] = ()  # passes beside None and vLLM's default
    use: str = ""  # what to take in its place
    like: str = ""  # another field: the same value as there passes, too
    is_strict: bool = False  # True: an empty object is no way to ask for nothing
    keys: "Mapping[str, Verdict] | None" = None  # of a value that is an object: each key is judged


def _all(meaning: str, names: str) -> dict[str, Verdict]:
    """Return a verdict for each name, separated by spaces: any value passes."""
    return dict.fromkeys(names.split(), Verdict(meaning, takes_all=True))


def _only(meaning: str, names: str, *neutral: Any, use: str = "", **more: Any) -> dict[str, Verdict]:
    """Return a verdict for each name, separated by spaces: only values that ask for nothing pass."""
    return dict.fromkeys(names.split(), Verdict(meaning, neutral=neutral, use=use, **more))


# Keys of `profiler_config`. The directory is read by `LLM.start_profile`.
PROFILER: dict[str, Verdict] = {
    "profiler": Verdict("traces are JAX's", neutral=("torch", ""), use="torch"),
    **_all("it is where traces go", "torch_profiler_dir"),
    **_all(
        "JAX's traces have their own content",
        "torch_profiler_activities torch_profiler_with_stack torch_profiler_with_flops "
        "torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
        "torch_profiler_with_memory detailed_trace_annotation ignore_frontend capture_torch_profiler "
        "warmup_iterations active_iterations wait_iterations proton_profiler_dir proton_context proton_data "
        "proton_backend proton_mode proton_hook proton_output_format proton_graph_attribution",
    ),
    **_only(
        "a trace of some steps",
        "delay_iterations max_iterations",
        0,
        use="start_profile and stop_profile",
    ),
}
# Keys of `pooler_config`.
POOLER: dict[str, Verdict] = {
    **_all("they say how vectors are made", "pooling_type seq_pooling_type use_activation normalize"),
    **_all("each method says what it is for", "task tok_pooling_type"),
    **_all("scores of many vectors are one product", "enable_flash_late_interaction"),
    **_only("vectors of fewer numbers", "dimensions", use="PoolingParams(dimensions=...)"),
    **_only(
        "texts longer than the model",
        "enable_chunked_processing max_embed_len",
        False,
        use="truncate_prompt_tokens of PoolingParams",
    ),
    **_only("scores moved by constants", "logit_mean logit_sigma", use="use_activation=False, and NumPy"),
    **_only("scores of steps", "step_tag_id returned_token_ids", use="pooling_task='token_embed'"),
}
# Keys of `kv_transfer_config`, and of what its connectors take; `connectors.py` reads both.
KV_TRANSFER: dict[str, Verdict] = {
    **_only(
        "caches handed between engines",
        "kv_connector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "ExampleConnector",
        "SharedStorageConnector",
        use="kv_offloading_size for tiers, or LLM.export_blocks and LLM.adopt_blocks",
    ),
    **_all("it is read with the connector", "kv_connector_extra_config"),
    **_all(
        "blocks are found by what they hold, and a failed read is a miss",
        "kv_role engine_id kv_buffer_device kv_buffer_size kv_port kv_rank kv_parallel_size kv_ip "
        "enable_permute_local_kv kv_load_failure_policy",
    ),
    **_only(
        "code of the user's",
        "kv_connector_module_path",
        use="kv_offloading_backend='package.module:Name' for a store",
    ),
}
CONNECTORS: dict[str, Verdict] = {
    **_all("it is read with the connector", "cpu_bytes_to_use shared_storage_path"),
    **_all("tiers store as the engine's own do", "block_size lazy_offload eviction_policy store_threshold"),
    **_only("another place for blocks", "spec_name", "CPUOffloadingSpec", use="kv_offloading_backend"),
}
# Keys of `structured_outputs_config`.
STRUCTURED_OUTPUTS: dict[str, Verdict] = {
    **_all("there is one way to compile constraints", "backend disable_fallback"),
    **_only(
        "structured outputs of one form for all requests",
        "disable_any_whitespace disable_additional_properties",
        False,
        use="structured_outputs of each request",
    ),
    **_only("reasoning taken out of the text", "reasoning_parser", use="--reasoning-parser of the server"),
    **_only("code of the user's", "reasoning_parser_plugin"),
    **_only("constraints on reasoning", "enable_in_reasoning", False),
}

# Keys of `speculative_config` that are not served.
SPECULATION: dict[str, Verdict] = {
    **_all(
        "how drafts are computed changes no answer",
        "attention_backend code_revision disable_mqa_scorer disable_padded_drafter_batch draft_sample_method "
        "enforce_eager max_model_len moe_backend use_local_argmax_reduction",
    ),
    **_all("log-probabilities of all tokens are told, drafted or not", "disable_logprobs"),
    **_only("drafts that are accepted by another rule", "acceptance_method", "rejection_sampler"),
    **_only(
        "drafts that are accepted by another rule",
        "rejection_sample_method",
        "strict",
        "standard",
        "probabilistic",
    ),
    **_only("drafts that are accepted by another rule", "synthetic_acceptance_rate"),
    **_all(
        "it goes with another rule of acceptance, which is refused",
        "posterior_alpha posterior_threshold typical_acceptance_sampler_posterior_alpha "
        "typical_acceptance_sampler_posterior_threshold",
    ),
    **_only("a drafting model on several devices", "draft_tensor_parallel_size tensor_parallel_size", 1),
    **_only("another revision of the drafting model", "revision", use="a directory as model"),
    **_only("a drafting model read in another way", "draft_load_config"),
    **_only("another form of drafts", "parallel_drafting use_heterogeneous_vocab", False),
    **_only("another form of drafts", "speculative_token_tree"),
}

ENGINE: dict[str, Verdict] = {
    **_all(
        "kernels and compilation are JAX's",
        "attention_backend attention_config compilation_config cuda_graph_sizes cudagraph_capture_sizes "
        "disable_cascade_attn enable_bf16x3_router_gemm enable_flashinfer_autotune enforce_eager "
        "gdn_prefill_backend ir_op_priority kda_decode_backend kda_prefill_backend kernel_config "
        "linear_backend max_context_len_to_capture max_cudagraph_capture_size max_seq_len_to_capture "
        "model_impl moe_backend monokernel optimization_level performance_mode sparse_indexer_topk_backend "
        "use_fp64_gumbel",
    ),
    **_all(
        "how files are read changes nothing in what they say, and no code of a model's is run",
        "allow_deprecated_quantization code_revision ignore_patterns max_parallel_loading_workers "
        "model_loader_extra_config pt_load_map_location safetensors_load_strategy "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads trust_remote_code use_tqdm_on_load",
    ),
    **_all(
        "the order of work changes no answer",
        "async_scheduling disable_async_output_proc disable_chunked_mm_input "
        "enable_chunked_prefill kv_sharing_fast_prefill long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_long_partial_prefills max_num_active_seqs "
        "max_num_partial_prefills max_num_scheduled_tokens multi_step_stream_outputs num_lookahead_slots "
        "num_scheduler_steps prefill_schedule_interval prefix_cache_retention_interval "
        "prefix_caching_hash_algo prefix_match_unit scheduler_delay_factor scheduler_reserve_full_isl "
        "stream_interval swa_bounded_replay swap_space use_v2_block_manager watermark",
    ),
    **_all("every engine can sleep", "enable_sleep_mode"),
    **_all(
        "devices talk by XLA's own collectives",
        "all2all_backend cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_address "
        "data_parallel_backend data_parallel_rpc_port dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate disable_custom_all_reduce "
        "disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds "
        "dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo "
        "enable_ep_weight_filter enable_eplb enable_expert_parallel enable_hc_sp enable_nccl_comm_suspend "
        "enable_shm_tensor_arena engine_use_ray eplb_config eplb_log_balancedness eplb_step_interval "
        "eplb_window_size expert_placement_strategy fault_tolerance_config master_addr master_port "
        "num_redundant_experts numa_bind numa_bind_cpus numa_bind_nodes ray_workers_use_nsight ubatch_size "
        "worker_use_ray",
    ),
    **_all(
        "it chooses what vLLM tells of itself",
        "aggregate_engine_logging cudagraph_metrics custom_histogram_buckets disable_log_requests "
        "disable_log_stats enable_layerwise_nvtx_tracing enable_log_requests "
        "enable_logging_iteration_details enable_mfu_metrics fail_on_environ_validation jit_monitor_mode "
        "jit_monitor_verbose kv_cache_metrics "
        "kv_cache_metrics_sample log_config_file log_level logging_config max_log_len "
        "per_request_spec_decode_metrics show_hidden_metrics_for_version shutdown_timeout watchdog_config",
    ),
    **_all(
        "requests are of text: an image or a sound in one is refused there",
        "allowed_local_media_path allowed_media_domains default_mm_loras disable_mm_preprocessor_cache "
        "ec_manager_config enable_mm_processor_stats enable_multimodal_encoder_data_parallel "
        "enable_tower_connector_lora image_feature_size image_input_shape image_input_type image_token_id "
        "interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs "
        "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode "
        "mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type "
        "mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc "
        "renderer_num_workers skip_mm_profiling video_pruning_method video_pruning_rate",
    ),
    **_all(
        "no served model has such layers",
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint mamba_backend "
        "mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config "
        "mamba_ssm_cache_dtype mamba_ssu_algorithm replayssm_buffer_len use_replayssm",
    ),
    **_all(
        "it goes with another option, which alone decides",
        "enable_cumem_allocator fully_sharded_loras guided_decoding_backend "
        "guided_decoding_disable_fallback lora_extra_vocab_size "
        "max_prompt_adapter_token max_prompt_adapters offload_backend offload_num_in_group "
        "offload_prefetch_step sleep_mode_backend sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names specialize_active_lora "
        "tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type "
        "typical_acceptance_sampler_posterior_alpha typical_acceptance_sampler_posterior_threshold "
        "served_model_name",
    ),
    **_only(
        "structured outputs of one form for all requests",
        "guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace",
        False,
        use="structured_outputs of each request",
    ),
    "structured_outputs_config": Verdict("structured outputs", keys=STRUCTURED_OUTPUTS),
    **_only(
        "drafts that are accepted by another rule", "spec_decoding_acceptance_method", "rejection_sampler"
    ),
    **_only(
        "layers, tokens or requests shared among devices in another way",
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size enable_elastic_ep "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb",
        use="tensor_parallel_size or data_parallel_size",
    ),
    **_only("several machines", "nnodes node_rank", use="num_processes, process_id and distributed_init"),
    **_only("a choice of devices", "device", "auto", use="the variable JAX_PLATFORMS"),
    **_only("a choice of devices", "device_ids", use="the variable CUDA_VISIBLE_DEVICES"),
    **_only("classes in the place of the engine's", "scheduler_cls worker_cls worker_extension_cls"),
    **_only("an engine that goes on when a device is lost", "enable_fault_tolerance"),
    **_only(
        "speculative decoding",
        "spec_method spec_model spec_tokens num_speculative_tokens speculative_model "
        "speculative_model_quantization speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size speculative_disable_mqa_scorer ngram_prompt_lookup_max "
        "ngram_prompt_lookup_min disable_logprobs_during_spec_decoding",
        use="speculative_config",
    ),
    **_only("another kind of model", "diffusion_config engram_config"),
    **_only("answers other than text", "task", "auto", "generate", use="runner='pooling'"),
    **_only("answers other than text", "convert", "auto", "none", use="runner='pooling'"),
    **_only("answers other than text", "override_pooler_config", use="pooler_config"),
    **_only("answers other than text", "io_processor_plugin"),
    **_only("code of the user's in each step", "logits_processor_pattern", use="logits_processors"),
    **_only(
        "another description of the model than its config.json",
        "hf_config_path model_class_overrides override_attention_dtype override_neuron_config "
        "disable_sliding_window",
        use="a copy of the model's directory with another config.json",
    ),
    **_only("weights from another place than the model", "model_weights", use="model"),
    **_only("a config of another form", "config_format", "auto", "hf"),
    **_only(
        "weights quantised in another way", "quantization_config", use="quantization, or a quantised model"
    ),
    **_only(
        "scales from a file",
        "quantization_param_path",
        use="calculate_kv_scales, or kv_layout=Fp8(..., k_scale=..., v_scale=...)",
    ),
    **_only("another tokenizer class", "tokenizer_mode", "auto", "hf"),
    **_only("another revision of the tokenizer", "tokenizer_revision", use="tokenizer, a directory"),
    **_only("another place for downloads", "download_dir", use="the variable HF_HOME"),
    **_only("a key for the hub", "hf_token", True, False, use="the variable HF_TOKEN"),
    **_only("other sampling defaults", "override_generation_config", use="SamplingParams"),
    **_only(
        "reasoning taken out of the text",
        "enable_reasoning reasoning_parser reasoning_parser_plugin reasoning_config",
    ),
    **_only(
        "more outputs",
        "aux_output_config",
    ),
    **_only("traces", "otlp_traces_endpoint collect_detailed_traces", use="/metrics of the server"),
    "profiler_config": Verdict("profiles", keys=PROFILER),
    **_only("a watermark in the answers", "watermark_config"),
    **_only("embeddings as prompts", "enable_prompt_embeds enable_mm_embeds"),
    **_only("adapters of another form", "lora_dtype", "auto"),
    **_only(
        "adapters of another form",
        "enable_lora_bias long_lora_scaling_factors lora_target_modules enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_lora_cls_labels enable_prompt_adapter qlora_adapter_name_or_path",
    ),
    **_only(
        "weights in host memory",
        "cpu_offload_gb cpu_offload_params offload_group_size offload_params",
        use="quantization",
    ),
    **_only("a cache of so many bytes", "kv_cache_memory_bytes", use="num_blocks or gpu_memory_utilization"),
    **_only("layers with another cache", "kv_cache_dtype_skip_layers"),
    **_only(
        "caches handed between engines", "ec_transfer_config", use="LLM.export_blocks and LLM.adopt_blocks"
    ),
    "kv_transfer_config": Verdict("tiers of blocks", keys=KV_TRANSFER),
    **_only(
        "weights handed over while it runs",
        "weight_transfer_config",
        use="LLM.update_weights, or --enable-weight-updates",
    ),
    **_only("limits of the queue", "max_num_queued_reqs max_num_queued_tokens", use="--max-queue"),
    **_only("a server of token ids alone", "tokens_only"),
    **_only("options of plugins", "additional_config"),
}

SERVER: dict[str, Verdict] = {
    **_all(
        "the server always does so",
        "enable_auto_tool_choice enable_prompt_tokens_details enable_request_id_headers "
        "enable_server_load_tracking exclude_tools_when_tool_choice_none disable_fastapi_docs",
    ),
    **_all(
        "it chooses what vLLM logs, or how it runs itself",
        "disable_access_log_for_endpoints disable_frontend_multiprocessing disable_uvicorn_access_log "
        "enable_log_deltas enable_offline_docs fingerprint_mode fingerprint_value "
        "h11_max_header_count h11_max_incomplete_event_size log_config_file log_error_stack max_log_len "
        "uvicorn_log_level data_parallel_supervisor_port dp_supervisor_probe_failure_threshold "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s",
    ),
    **_all(
        "it is about routes that are not served",
        "anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model "
        "enable_flash_late_interaction use_gpu_for_pooling_score trust_request_mm_kwargs",
    ),
    **_only("more processes of the server", "api_server_count", 1, use="several servers behind a balancer"),
    **_only("a process without a server", "headless data_parallel_start_rank", use="--process-id"),
    **_only("a file of options", "config"),
    **_only("another protocol", "grpc grpc_port enable_scale_out tokens_only"),
    **_only("another address", "uds root_path", use="--host and --port, or a proxy before the server"),
    **_only(
        "encrypted connections",
        "ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers enable_ssl_refresh",
        use="a proxy before the server",
    ),
    **_only("encrypted connections", "ssl_cert_reqs", 0, use="a proxy before the server"),
    **_only("code of the user's", "middleware tool_parser_plugin tool_server"),
    **_only("structured outputs", "tool_strict_level"),
    **_only("content as parts in templates", "chat_template_content_format", "auto", "string"),
    **_only("templates from clients", "trust_request_chat_template", use="--chat-template"),
    **_only(
        "the same arguments for each template",
        "default_chat_template_kwargs reasoning_effort_map",
        use="chat_template_kwargs in the request",
    ),
    **_only("another role for answers", "response_role"),
    **_only(
        "tokens by their ids", "return_tokens_as_token_ids", use="return_tokens_as_token_ids in the request"
    ),
    **_only("usage in each stream", "enable_force_include_usage", use="stream_options in the request"),
    **_only("answers in the log", "enable_log_outputs"),
    **_only("more routes or outputs", "enable_tokenizer_info_endpoint enable_per_request_metrics"),
    **_only("comments in idle streams", "sse_keep_alive_interval"),
    **_only("tools where none are to be called", "expand_tools_even_if_tool_choice_none"),
    **_only("adapters of another form", "prompt_adapters"),
}

REQUEST: dict[str, Verdict] = {
    **{
        name: verdict
        for names, field in (
            ("guided_json json_schema", "json"),
            ("guided_regex regex", "regex"),
            ("guided_choice", "choice"),
            ("guided_grammar grammar ebnf", "grammar"),
            ("guided_whitespace_pattern", "whitespace_pattern"),
            ("structural_tag", "structural_tag"),
        )
        for name, verdict in _only(
            "structured outputs by their older names",
            names,
            is_strict=True,
            use=f"structured_outputs={{{field!r}: ...}}",
        ).items()
    },
    **_only(
        "structured outputs by their older names",
        "guided_decoding guided_decoding_backend",
        is_strict=True,
        use="structured_outputs",
    ),
    **_only(
        "structured outputs",
        "response_format",
        {"type": "text"},
        "text",
        is_strict=True,
    ),
    **_only("the best of several answers", "best_of", use="n", like="n"),
    **_only("beam search", "use_beam_search", use="LLM.beam_search, in Python"),
    **_all(
        "it goes with another option, which alone decides",
        "length_penalty early_stopping mm_payload return_mm_kwargs return_token_offsets max_tool_calls",
    ),
    **_all("the server makes its own ids; it takes X-Request-Id", "request_id"),
    **_all(
        "it says who asks, or what the client wants kept: nothing is",
        "user session_id metadata store service_tier safety_identifier prompt_cache_key "
        "prompt_cache_options prompt_cache_retention include prediction",
    ),
    **_all(
        "it changes no answer",
        "stream_interval skip_clone skip_reading_prefix_cache output_text_buffer_length",
    ),
    **_all(
        "routes of models that pool serve it, and others do not read it",
        "activation data_1 data_2 dimensions embed_dtype encoding_format endianness input normalize queries "
        "query task text_1 text_2 top_n use_activation",
    ),
    **_only("texts filled up", "padding", "do_not_pad"),
    **_only("a cut at the other end", "truncation_side", "left"),
    **_only("a limit for each text", "max_tokens_per_doc max_tokens_per_query", use="truncate_prompt_tokens"),
    **_only("pairs in another form", "items", use="queries and documents"),
    **_only("raw scores", "softmax", True, use="use_activation"),
    **_only("more for the template", "instruction additional_data"),
    **_only("text behind the answer", "suffix"),
    **_only("code of the user's in each step", "logits_processors", use="logits_processors of the engine"),
    **_only("options of plugins", "vllm_xargs", use="extra_args"),
    **_only("embeddings as prompts", "prompt_embeds"),
    **_only("calls by an older form", "functions", use="tools"),
    **_only("calls by an older form", "function_call", "none", "auto", use="tool_choice"),
    **_only("answers other than text", "modalities", ["text"]),
    **_only("answers other than text", "audio"),
    **_only("searches in the web", "web_search_options"),
    **_only("images or sounds", "mm_processor_kwargs media_io_kwargs"),
    **_only("a watermark in the answers", "watermarking", False),
    **_only("a limit of reasoning", "thinking_token_budget", use="max_tokens"),
    **_only("reasoning taken out of the text", "include_reasoning", True),
    **_only("an end where the answer repeats itself", "repetition_detection"),
    **_only(
        "log-probabilities of chosen tokens",
        "logprob_token_ids",
        use="logprobs",
    ),
    **_only("log-probabilities in another shape", "flat_logprobs"),
    **_only("caches handed between engines", "kv_transfer_params ec_transfer_params"),
    **_only(
        "more outputs",
        "return_prompt_text return_assistant_tokens_mask enable_response_messages",
    ),
    **_only("a template from a client", "chat_template", use="--chat-template"),
    **_only("a conversation that is kept", "previous_input_messages", use="input, sent whole"),
    **_only("an adapter in another form", "is_3d_lora_weight"),
    **_all("an adapter is unloaded by its name", "lora_int_id"),
}

# What a beam search has not of `SamplingParams`.
BEAM: dict[str, Verdict] = {
    **REQUEST,
    **_only("a choice of tokens", "allowed_token_ids", is_strict=True),
    **_only("special tokens in the text", "skip_special_tokens"),
    **_only("ends in the text", "include_stop_str_in_output"),
}
