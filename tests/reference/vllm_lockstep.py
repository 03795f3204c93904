"""vLLM's own KV cache managers beside `reference.v1`, on random histories of several groups of layers.

    python tests/reference/vllm_lockstep.py vllm-0.33.0 --histories 2000 --plans 2000

The first argument is vLLM's unpacked source distribution; see `vllm_tests_on_reference.py` for what it needs.
One history is a random mix of layers, block sizes and options, and 60 random operations on one manager of
each kind. Both get vLLM's own requests, so that hashes agree. Hits, new blocks, tables, reference counts,
hashes and the order of free blocks must be equal after each operation. One plan is a random model, whose
groups must be equal.

Differences that `reference.v1` names are kept out: windows of one token, and the hash of a prompt's end
inside of a large block of full attention, which vLLM is told not to register. Two kinds of plans are only
counted. vLLM refuses some, as local layers that keep everything have several windows. It loses layers of
others.
"""

import argparse
import collections
import logging
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from reference.v1 import kv_cache_manager, planning, specs

NUM_OPERATIONS = 60
KINDS = ("full", "window", "chunked", "rswa")


def load(root: Path) -> SimpleNamespace:
    """Import vLLM's managers from its source distribution."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(root))
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_manager, kv_cache_planning, kv_cache_utils, single_type_kv_cache_manager
    from vllm.v1.request import Request

    single_type_kv_cache_manager.register_all_kvcache_specs(None)
    kv_cache_utils.init_none_hash(sha256)
    single_type_kv_cache_manager.FullAttentionManager._cache_partial_tail_block = lambda *_: None
    return SimpleNamespace(
        dtypes={"half": torch.float16, "float": torch.float32},
        interface=kv_cache_interface,
        manager=kv_cache_manager,
        planning=kv_cache_planning,
        utils=kv_cache_utils,
        Request=Request,
        SamplingParams=SamplingParams,
        sha256=sha256,
    )


def make_spec(module: Any, dtypes: dict[str, Any], kind: str, tokens: int, **fields: Any) -> Any:
    """Return a layer of `module`'s classes."""
    name, own = {
        "full": ("FullAttentionSpec", {}),
        "window": ("SlidingWindowSpec", {"sliding_window": tokens}),
        "chunked": ("ChunkedLocalAttentionSpec", {"attention_chunk_size": tokens}),
        "rswa": ("RSWASpec", {"rswa_window": tokens}),
    }[kind]
    dtype = dtypes[fields.pop("dtype", "half")]
    return getattr(module, name)(**{"num_kv_heads": 1, "head_size": 1, **fields}, **own, dtype=dtype)


OUR_DTYPES = {"half": "half", "float": "float"}


class History:
    """One manager of each kind, and the requests that both have."""

    def __init__(self, vllm: SimpleNamespace, rng: random.Random) -> None:
        self.vllm, self.rng = vllm, rng
        base = rng.choice([1, 2, 4])
        same_size = rng.random() < 0.5
        kinds = KINDS if same_size else tuple(kind for kind in KINDS if kind != "chunked")
        distinct = [
            {
                "kind": rng.choice(kinds),
                "tokens": rng.randint(2, 24),
                "block_size": base * (1 if same_size else rng.choice([1, 1, 2, 3, 4])),
            }
            for _ in range(rng.randint(1, 3))
        ]
        self.layers = [rng.choice(distinct) for _ in range(rng.randint(1, 5))]
        caching = rng.random() < 0.85
        self.eagle = rng.random() < 0.3 and all(layer["kind"] != "chunked" for layer in self.layers)
        eagle_groups = [self.eagle and rng.random() < 0.4 for _ in self.layers]
        sizes = [layer["block_size"] for layer in self.layers]
        groups = [
            kv_cache_group(specs, OUR_DTYPES, *pair) for pair in zip(self.layers, eagle_groups, strict=True)
        ]
        self.scheduler_block_size, self.hash_block_size = planning.resolve_block_sizes(groups)
        interval = rng.choice([None, 0, self.scheduler_block_size * rng.randint(1, 3)])
        if interval and all(layer["kind"] != "window" for layer in self.layers):
            interval = None
        num_blocks = rng.randint(4, 24) * len(self.layers)
        options = {
            "max_model_len": rng.choice([40, 200]),
            "enable_caching": caching,
            "use_eagle": self.eagle,
            "max_in_flight_tokens": rng.choice([None, 8]),
        }
        self.ours = kv_cache_manager.KVCacheManager(
            specs.KVCacheConfig(num_blocks, [], groups, interval), free_profile="split", **options
        )
        theirs = [
            kv_cache_group(vllm.interface, vllm.dtypes, *pair)
            for pair in zip(self.layers, eagle_groups, strict=True)
        ]
        self.theirs = vllm.manager.KVCacheManager(
            vllm.interface.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=theirs,
                prefix_cache_retention_interval=interval,
            ),
            scheduler_block_size=self.scheduler_block_size,
            hash_block_size=self.hash_block_size,
            **options,
        )
        self.requests: list[Any] = []
        self.count = 0
        self.seen: collections.Counter[str] = collections.Counter()
        self.seen[f"{len(groups)} groups"] += 1
        self.seen["several block sizes"] += len(set(sizes)) > 1
        self.seen["eagle"] += self.eagle
        self.seen["without caching"] += not caching
        self.seen["retention interval"] += interval is not None
        self.seen["chunks"] += any(layer["kind"] == "chunked" for layer in self.layers)

    def both(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call a method of both managers. An error must be of both."""
        results = []
        for manager in (self.ours, self.theirs):
            try:
                results.append(getattr(manager, name)(*args, **kwargs))
            except (AssertionError, ValueError) as error:
                results.append(type(error))
        return results[0], results[1]

    def allocate(self, request: Any, num_tokens: int, hits: tuple[Any, Any, int] | None = None) -> bool:
        """Give the request room for tokens. Returns whether there was any."""
        rng = self.rng
        options = {
            "num_lookahead_tokens": rng.choice([0, 0, 0, 3]),
            "delay_cache_blocks": rng.random() < 0.1,
            "full_sequence_must_fit": rng.random() < 0.3,
            "reserved_blocks": rng.choice([0, 0, 0, 2]),
        }
        new = []
        for manager, blocks in zip((self.ours, self.theirs), hits or (None, None), strict=False):
            num_hit_tokens = hits[2] if hits else 0
            new.append(manager.allocate_slots(request, num_tokens, num_hit_tokens, blocks, **options))
        ours, theirs = (None if blocks is None else blocks.get_block_ids() for blocks in new)
        assert ours == theirs, f"new blocks are {ours}, vLLM's {theirs}"
        self.seen["refused"] += ours is None
        return ours is not None

    def admit(self) -> None:
        rng = self.rng
        head = [(i * 7 + rng.randrange(2) * 1000) % 50 for i in range(rng.choice([0, 8, 24]))]
        tokens = [*head, *(rng.randrange(2) for _ in range(rng.randint(1, 24)))]
        if self.requests and rng.random() < 0.5:
            known = rng.choice(self.requests).prompt_token_ids
            tokens = [*known[: rng.randint(1, len(known))], *tokens[: rng.randint(0, 4)]]
        params = self.vllm.SamplingParams(max_tokens=1 << 20, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=-1)
        hasher = self.vllm.utils.get_request_block_hasher(self.hash_block_size, self.vllm.sha256, 0)
        self.count += 1
        request = self.vllm.Request(
            request_id=str(self.count),
            prompt_token_ids=tokens[:38],
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        self.start(request)

    def start(self, request: Any) -> None:
        """Look up a new or preempted request, and give it room for some of its tokens."""
        ours, theirs = self.both("get_computed_blocks", request)
        found = [(blocks.get_block_ids(), *rest) for blocks, *rest in (ours, theirs)]
        assert found[0] == found[1], f"hits are {found[0]}, vLLM's {found[1]}"
        num_hit_tokens, junction = ours[1:]
        self.seen["hits"] += num_hit_tokens > 0
        self.seen["junctions"] += junction > 0
        if junction and self.rng.random() < 0.7:
            request.shared_prefix_boundary = junction
        left = request.num_tokens - num_hit_tokens
        num_tokens = left if self.rng.random() < 0.6 else self.rng.randint(1, left)
        if self.allocate(request, num_tokens, (ours[0], theirs[0], num_hit_tokens)):
            request.num_computed_tokens = num_hit_tokens + num_tokens
            self.requests.append(request)

    def grow(self) -> None:
        request = self.rng.choice(self.requests)
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens >= self.ours.max_model_len:
                return
            request.append_output_token_ids(self.rng.randrange(2))
        request.num_in_flight_tokens = self.rng.choice([0, 0, 0, min(5, request.num_computed_tokens)])
        num_tokens = self.rng.randint(1, request.num_tokens - request.num_computed_tokens)
        if self.allocate(request, num_tokens):
            request.num_computed_tokens += num_tokens

    def stop(self) -> None:
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        self.both("free", request)
        if self.rng.random() < 0.4:  # preempted
            request.num_computed_tokens = request.num_in_flight_tokens = 0
            self.start(request)

    def cache(self) -> None:
        request = self.rng.choice(self.requests)
        ours, theirs = self.both(
            "cache_blocks", request, min(request.num_computed_tokens, request.num_tokens)
        )
        assert ours == theirs, f"{ours=}, {theirs=}"

    def evict(self) -> None:
        block_id = self.rng.randrange(len(self.ours.block_pool.blocks))
        self.both("evict_blocks", {block_id})

    def reset(self) -> None:
        ours, theirs = self.both("reset_prefix_cache")
        assert ours == theirs, f"{ours=}, {theirs=}"

    def compare(self) -> None:
        for request in self.requests:
            ours, theirs = self.both("get_block_ids", request.request_id)
            assert ours == theirs, f"the table of {request.request_id} is {ours}, vLLM's {theirs}"
        pools = (self.ours.block_pool, self.theirs.block_pool)
        for name, get in {
            "reference counts": lambda pool: [block.ref_cnt for block in pool.blocks[1:]],
            "hashes": lambda pool: [block.block_hash for block in pool.blocks],
            "free blocks": lambda pool: [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            "contents": lambda pool: {*pool.cached_block_hash_to_block._cache},
        }.items():
            ours, theirs = map(get, pools)
            assert ours == theirs, f"{name} are {ours}, vLLM's {theirs}"

    def run(self) -> None:
        for _ in range(NUM_OPERATIONS):
            operations = [self.admit, self.admit, self.evict]
            if self.requests:
                operations += [self.grow] * 6 + [self.stop] * 2 + [self.cache]
            if self.rng.random() < 0.03:
                operations = [self.reset]
            operation = self.rng.choice(operations)
            operation()
            self.compare()


def kv_cache_group(module: Any, dtypes: dict[str, Any], layer: dict[str, Any], is_eagle_group: bool) -> Any:
    spec = make_spec(module, dtypes, **layer)
    return module.KVCacheGroupSpec([str(id(layer))], spec, is_eagle_group=is_eagle_group)


def plan(vllm: SimpleNamespace, rng: random.Random, seen: collections.Counter[str]) -> None:
    """Compare the groups of a random model, their sizes and the most that a request holds."""
    distinct = [
        {
            "kind": rng.choice(KINDS[:3]),
            "tokens": rng.choice([8, 16]),
            "block_size": 16,
            "num_kv_heads": rng.choice([1, 1, 1, 2]),
            "head_size": rng.choice([64, 64, 64, 96, 128]),
            "dtype": rng.choice(["half", "half", "float"]),
        }
        for _ in range(rng.randint(1, 4))
    ]
    layers = [rng.choice(distinct) for _ in range(rng.randint(1, 12))]
    disable, pack = rng.random() < 0.2, rng.random() < 0.4
    layout = SimpleNamespace(is_block_outermost=pack)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disable),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    results = []
    for module, dtypes, call in (
        (specs, OUR_DTYPES, lambda found: planning.get_kv_cache_groups(found, disable, pack)),
        (vllm.interface, vllm.dtypes, lambda found: vllm.planning.get_kv_cache_groups(config, found)),
    ):
        try:
            groups = call({str(i): make_spec(module, dtypes, **layer) for i, layer in enumerate(layers)})
            if sum(len(group.layer_names) for group in groups) < len(layers):
                raise StopIteration  # as where no layer is left for a group
        except StopIteration:
            assert module is not specs, f"{layers} loses layers"
            seen["plans of which vLLM loses layers"] += 1
            return
        except ValueError as error:
            if "same window size" in str(error):
                seen["plans with several windows, refused by vLLM"] += 1
                return
            results.append(ValueError)
            continue
        described = []
        for group in groups:
            spec = group.kv_cache_spec
            first = getattr(spec, "first_spec", spec)
            cap = getattr(first, "max_admission_blocks_per_request", None)
            described.append(
                (
                    group.layer_names,
                    type(spec).__name__,
                    type(first).__name__,
                    spec.block_size,
                    spec.page_size_bytes,
                    cap(40, 1000) if cap and "Full" not in type(first).__name__ else None,
                )
            )
        results.append(described)
    assert results[0] == results[1], f"{layers}\n{disable=} {pack=}\nours: {results[0]}\nvLLM: {results[1]}"
    seen[f"{len(results[0])} groups planned" if results[0] is not ValueError else "plans refused"] += 1


def main() -> None:
    """Run histories and plans, and print what they met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    vllm = load(arguments.root.resolve())
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        history = History(vllm, random.Random(seed))
        try:
            history.run()
        except AssertionError as error:
            sys.exit(f"history {seed} of {history.layers}, eagle={history.eagle}: {error}")
        seen += history.seen
    for seed in range(arguments.seed, arguments.seed + arguments.plans):
        plan(vllm, random.Random(seed), seen)
    print(f"equal: {arguments.histories} histories of {NUM_OPERATIONS} operations, {arguments.plans} plans")
    print(", ".join(f"{name}: {number}" for name, number in sorted(seen.items())))


if __name__ == "__main__":
    main()
