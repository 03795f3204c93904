"""Tiers of blocks that vLLM's `kv_transfer_config` asks for, by the names of the engine's own options."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, check, is_int, shown
from jaxpaged.vllm_names.judge import check_keys, fields_of
from jaxpaged.vllm_names.table import CONNECTORS, KV_TRANSFER

NAME = "kv_transfer_config"
RULE = f"None or an object with keys of {', '.join(KV_TRANSFER)}"
GIB = 1 << 30
HOST_SIZE = 1.0  # GiB of host memory above a directory


def tiers_of(value: object) -> dict[str, Any]:
    """Return the options of `EngineConfig` for a value of `kv_transfer_config`; none without a connector.

    `OffloadingConnector` with `cpu_bytes_to_use` is a tier of host memory. `ExampleConnector` with
    `shared_storage_path` is one on disk. Raises `InputError` for other connectors, and for keys of theirs
    that are not served.
    """
    fields = fields_of(NAME, value, RULE)
    check_keys(NAME, fields, KV_TRANSFER)
    if not (connector := fields.get("kv_connector")):
        return {}
    extra = fields.get("kv_connector_extra_config") or {}
    check(f"{NAME}: kv_connector_extra_config", extra, "an object", isinstance(extra, Mapping))
    check_keys(f"{NAME}: kv_connector_extra_config", extra, CONNECTORS)
    if connector in ("ExampleConnector", "SharedStorageConnector"):
        folder = extra.get("shared_storage_path", "/tmp")
        check("shared_storage_path", folder, "a directory", isinstance(folder, str) and folder != "")
        return {"kv_offloading_size": HOST_SIZE, "kv_offloading_backend": f"disk:{folder}"}
    size: Any = extra.get("cpu_bytes_to_use")
    if not is_int(size) or size <= 0:
        raise InputError(
            f"{NAME}: cpu_bytes_to_use={shown(size)} must be a positive int for {connector}; "
            "use kv_offloading_size, in GiB"
        )
    return {"kv_offloading_size": size / GIB}
