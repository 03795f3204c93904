"""Contracts of the parts that users may write: layouts, policies, attention, samplers, logits processors,
kinds of layers, stores of blocks.

A part from outside needs nothing of ours but what stands here. `docs/research/contracts.md` says what may
change between releases. A part declares the version that it is written for as `contract`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.contracts.attentions import Attention, Support, attention
    from jaxpaged.contracts.block_stores import BlockKey, BlockStore, StoredBlock
    from jaxpaged.contracts.processors import Processor, RequestRows, processor
    from jaxpaged.contracts.samplers import Sampler, SamplingOptions, keys, sampler
    from jaxpaged.contracts.versions import SERVED
    from jaxpaged.memory.cache_specs import CacheSpec
    from jaxpaged.memory.eviction import policy
    from jaxpaged.memory.policies import Policy
    from jaxpaged.memory.ranked_queue import RankedQueue, Ranking
    from jaxpaged.sampling import likeliest
    from pallas_kernels.layouts import Dense, Layout, Location, PackedView, Pool, Sizes, View

__all__ = [
    "SERVED",
    "Attention",
    "BlockKey",
    "BlockStore",
    "CacheSpec",
    "Dense",
    "Layout",
    "Location",
    "PackedView",
    "Policy",
    "Pool",
    "Processor",
    "RankedQueue",
    "Ranking",
    "RequestRows",
    "Sampler",
    "SamplingOptions",
    "Sizes",
    "StoredBlock",
    "Support",
    "View",
    "attention",
    "keys",
    "likeliest",
    "policy",
    "processor",
    "sampler",
]

HOMES = {
    "SERVED": "jaxpaged.contracts.versions",
    **dict.fromkeys(("Attention", "Support", "attention"), "jaxpaged.contracts.attentions"),
    **dict.fromkeys(("BlockKey", "BlockStore", "StoredBlock"), "jaxpaged.contracts.block_stores"),
    **dict.fromkeys(("Sampler", "SamplingOptions", "keys", "sampler"), "jaxpaged.contracts.samplers"),
    **dict.fromkeys(("Processor", "RequestRows", "processor"), "jaxpaged.contracts.processors"),
    "CacheSpec": "jaxpaged.memory.cache_specs",
    "policy": "jaxpaged.memory.eviction",
    "Policy": "jaxpaged.memory.policies",
    **dict.fromkeys(("RankedQueue", "Ranking"), "jaxpaged.memory.ranked_queue"),
    "likeliest": "jaxpaged.sampling",
}


def __getattr__(name: str) -> Any:
    """Import a contract when it is asked for: parts of the package import each other's versions."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES.get(name, "pallas_kernels.layouts")), name)
