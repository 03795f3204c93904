"""vLLM's own tests of its KV cache managers, run on `reference.v1`.

    python tests/reference/vllm_tests_on_reference.py vllm-0.33.0

The argument is vLLM's unpacked source distribution; vLLM itself need not be built. The environment needs what
vLLM imports: torch for a CPU, the packages of its `requirements/common.txt`, and pytest.

vLLM's modules keep their requests, hashes, configurations and everything else. Their managers, pools and
specs are replaced by ours, and what is replaced raises an error when it is used. Classes here translate
arguments: one that ours leave out must have its neutral value.
"""

import dataclasses
import importlib
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from reference.v1 import block_pool, kv_cache_manager, kv_cache_utils, local_attention, single_type, specs

VERSION = "0.33.0"
FILES = ("test_single_type_kv_cache_manager.py", "test_prefix_caching.py")


def neutral(**arguments: tuple[Any, Any]) -> None:
    """Refuse arguments, given as (value, neutral value), that the oracle leaves out.

    Raises: NotImplementedError.
    """
    for name, (value, default) in arguments.items():
        if value != default:
            raise NotImplementedError(f"{name}={value} must be {default}: reference.v1 leaves it out")


class KVCacheBlock(kv_cache_utils.KVCacheBlock):
    """Our block with vLLM's method to give it a hash."""

    def set_block_hash(self, block_hash: Any, num_tokens: int | None = None) -> None:
        self.block_hash = block_hash


class BlockPool(block_pool.BlockPool):
    """Our pool, which frees as vLLM does since 0.24."""

    def __init__(self, *args: Any, num_hash_lookahead_tokens: int = 0, **kwargs: Any) -> None:
        neutral(num_hash_lookahead_tokens=(num_hash_lookahead_tokens, 0))
        super().__init__(*args, free_profile="split", **kwargs)
        for block in self.blocks:
            block.__class__ = KVCacheBlock


class Translated:
    """Our managers of single groups with vLLM's arguments."""

    def __init__(self, *args: Any, needs_kv_cache_zeroing: bool = False, **kwargs: Any) -> None:
        neutral(needs_kv_cache_zeroing=(needs_kv_cache_zeroing, False))
        super().__init__(*args, **kwargs)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        neutral(num_tokens_main_model=(num_tokens_main_model, num_tokens))
        return super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, apply_admission_cap
        )

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Any,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        neutral(num_external_computed_tokens=(num_external_computed_tokens, 0))
        self.allocate_new_computed_blocks(request_id, new_computed_blocks, num_local_computed_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> Any:
        neutral(num_tokens_main_model=(num_tokens_main_model, num_tokens))
        return super().allocate_new_blocks(request_id, num_tokens)

    @classmethod
    def reachable_block_mask(cls, *, kv_cache_spec: Any, dcp_world_size: int = 1, **kwargs: Any) -> Any:
        """Return the mask; of several ranks that share a block, each block has the tokens of all."""
        spec = dataclasses.replace(kv_cache_spec, block_size=kv_cache_spec.block_size * dcp_world_size)
        return super().reachable_block_mask(kv_cache_spec=spec, **kwargs)


class FullAttentionManager(Translated, single_type.FullAttentionManager):
    """Our manager of full attention."""


class RSWAManager(Translated, single_type.RSWAManager):
    """Our manager of prompts that stay."""


class SlidingWindowManager(Translated, local_attention.SlidingWindowManager):
    """Our manager of windows."""


class ChunkedLocalAttentionManager(Translated, local_attention.ChunkedLocalAttentionManager):
    """Our manager of chunks."""


class KVCacheManager(kv_cache_manager.KVCacheManager):
    """Our manager of all groups with vLLM's arguments."""

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        **left_out: int,
    ) -> None:
        worlds = {"dcp_world_size", "pcp_world_size"}
        neutral(log_stats=(log_stats, False))
        neutral(**{name: (value, int(name in worlds)) for name, value in left_out.items()})
        super().__init__(
            kv_cache_config,
            max_model_len,
            hash_block_size,
            enable_caching,
            scheduler_block_size=scheduler_block_size,
            max_in_flight_tokens=max_in_flight_tokens,
            use_eagle=use_eagle,
            enable_kv_cache_events=enable_kv_cache_events,
            free_profile="split",
        )

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        **options: Any,
    ) -> Any:
        neutral(num_external_computed_tokens=(num_external_computed_tokens, 0))
        return super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            **options,
        )

    def new_step_starts(self) -> None:
        """Do nothing: only recurrent states wait for a step's end."""


@dataclasses.dataclass(frozen=True)
class MLAAttentionSpec(specs.FullAttentionSpec):
    """Latent attention, which a block table cannot tell from full attention."""

    tokens_per_state: int = dataclasses.field(default=1, kw_only=True)


# What replaces what.
REPLACED: dict[str, dict[str, Any]] = {
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": specs.FullAttentionSpec,
        "MLAAttentionSpec": MLAAttentionSpec,
        "RSWASpec": specs.RSWASpec,
        "SlidingWindowSpec": specs.SlidingWindowSpec,
        "ChunkedLocalAttentionSpec": specs.ChunkedLocalAttentionSpec,
    },
    "vllm.v1.core.kv_cache_utils": {
        "KVCacheBlock": KVCacheBlock,
        "FreeKVCacheBlockQueue": kv_cache_utils.FreeKVCacheBlockQueue,
    },
    "vllm.v1.core.block_pool": {
        "BlockPool": BlockPool,
        "BlockHashToBlockMap": block_pool.BlockHashToBlockMap,
    },
    "vllm.v1.core.single_type_kv_cache_manager": {
        "FullAttentionManager": FullAttentionManager,
        "RSWAManager": RSWAManager,
        "SlidingWindowManager": SlidingWindowManager,
        "ChunkedLocalAttentionManager": ChunkedLocalAttentionManager,
    },
    "vllm.v1.core.kv_cache_coordinator": {"KVCacheCoordinator": None},
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager": KVCacheManager,
        "KVCacheBlocks": kv_cache_manager.KVCacheBlocks,
    },
}


def replace_classes() -> None:
    """Put our classes in the place of vLLM's, and let vLLM's raise an error when one is made."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"vLLM's own {type(self).__name__} is used")

    modules = {name: importlib.import_module(name) for name in REPLACED}
    for module_name, classes in REPLACED.items():
        for name, ours in classes.items():
            theirs = getattr(modules[module_name], name)
            theirs.__init__ = refuse
            if ours is not None:
                setattr(modules[module_name], name, ours)


# Tests of what `reference.v1` leaves out, by a part of the name.
LEFT_OUT = {
    "mamba|lookahead_checkpoint": "recurrent states",
    "hisparse|host|device_eviction_keeps": "pages in host memory",
    "external|two_phase|connector": "blocks loaded from elsewhere",
    "lookahead|eagle_identical_prompt_hit.True": "hashes that look ahead",
    "event|null_parent_block_hash|session_id": "fields of events",
    "zeroing|circular_buffer": "rings of one block, and blocks to be zeroed",
    "dcp_geometry": "context parallelism",
    "stats_disabled": "statistics",
    "positive_retention_rejects": "another sentence for the same error",
}


class Selection:
    """A plugin of pytest that leaves out tests, and says how many and why."""

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left_out = Counter()
        kept = []
        for item in items:
            why = next((why for part, why in LEFT_OUT.items() if re.search(part, item.name)), None)
            if why is None:
                kept.append(item)
            else:
                left_out[why] += 1
        for why, number in left_out.items():
            print(f"left out: {number} tests of {why}")
        print(f"left: {len(kept)} of {len(items)} tests")
        items[:] = kept


def main() -> int:
    """Run the tests. Returns pytest's exit code."""
    root = Path(sys.argv[1]).resolve()
    if root.name != f"vllm-{VERSION}" or not (root / "tests").is_dir():
        sys.exit(f"{root} must be vLLM's source distribution, unpacked as vllm-{VERSION}")
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(root))
    replace_classes()
    import pytest

    files = [str(root / "tests" / "v1" / "core" / name) for name in FILES]
    options = ["-q", "--noconftest", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={root}"]
    return int(pytest.main([*files, *options, *sys.argv[2:]], plugins=[Selection()]))


if __name__ == "__main__":
    sys.exit(main())
