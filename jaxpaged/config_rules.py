"""Rules that an engine's options keep together; each message names the value and the rule."""

from typing import Any

from jaxpaged.checks import check
from jaxpaged.speculation import GRAMMAR


def check_together(config: Any) -> None:
    """Raise `InputError` if options of an `EngineConfig`, each good by itself, do not go together."""
    _check_caching(config)
    drafts, mib = config.speculative_config, config.structured_outputs_mib
    is_replayed = config.enable_trace_replay
    check("speculative_config", drafts, "None with enable_trace_replay", drafts is None or not is_replayed)
    has_automata = bool(mib) or drafts is None or drafts.method != GRAMMAR
    check("structured_outputs_mib", mib, f"at least 1 for drafts by method={GRAMMAR!r}", has_automata)


def _check_caching(config: Any) -> None:
    caches = config.enable_prefix_caching
    check(
        "reuse_answers",
        config.reuse_answers,
        "False without enable_prefix_caching",
        caches or not config.reuse_answers,
    )
    if (size := config.kv_offloading_size) is not None:
        is_one = config.num_processes == config.data_parallel_size == 1 and not config.calculate_kv_scales
        rule = "None with several processes or replicas, measured scales, or without enable_prefix_caching"
        check("kv_offloading_size", size, rule, is_one and caches)
    events_config = config.kv_events_config
    check(
        "kv_events_config",
        events_config,
        "None without enable_prefix_caching",
        events_config is None or caches,
    )


def check_processes(config: Any) -> None:
    """Raise `InputError` unless an `EngineConfig` says where its processes connect and what they share."""
    count, address = config.num_processes, config.distributed_init
    if count == 1:
        check("distributed_init", address, "None unless num_processes is more than 1", address is None)
        return
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    is_address = bool(host) and port.isascii() and port.isdigit()
    check("distributed_init", address, "HOST:PORT of process 0", is_address)
    rule, size = f"a multiple of num_processes={count}", config.tensor_parallel_size
    check("tensor_parallel_size", size, rule, size % count == 0)
    replicas, rule = config.data_parallel_size, "1 with several processes: start an engine for each replica"
    check("data_parallel_size", replicas, rule, replicas == 1)
