"""Bugs of kinds that FlashInfer, vLLM and SGLang have had, each planted in small sound code of our own."""

from tests.verify.mutants import Mutant

SOUND = "tests/verify/mutants/sound"
FLASHINFER, VLLM, SGLANG = "flashinfer-ai/flashinfer", "vllm-project/vllm", "sgl-project/sglang"


def _attention(source: str, name: str, right: str, wrong: str, op: str = "paged_attention_v1") -> Mutant:
    function = {"paged_attention_v1": "paged_attention", "paged_attention_v2": "paged_attention_in_parts"}[op]
    return Mutant(name, SOUND, "attention.py", right, wrong, f"attention:{function}", op, source)


def _prompts(source: str, name: str, right: str, wrong: str) -> Mutant:
    op = "ragged_paged_attention"
    return Mutant(name, SOUND, "prompts.py", right, wrong, f"prompts:{op}", op, source)


def _cache(source: str, name: str, right: str, wrong: str, op: str) -> Mutant:
    return Mutant(name, SOUND, "cache.py", right, wrong, f"cache:{op}", op, source)


def _pool(source: str, name: str, right: str, wrong: str) -> Mutant:
    return Mutant(name, SOUND, "block_pool.py", right, wrong, "block_pool:BlockPool", "v1", source)


def _manager(source: str, name: str, file: str, right: str, wrong: str) -> Mutant:
    kind = file.partition("/")[0]
    path = {"v0": "block_manager:BlockSpaceManager", "v063": "block_manager:SelfAttnBlockSpaceManager"}[kind]
    return Mutant(name, "reference", file, right, wrong, f"{kind}.{path}", kind, source)


def _policy(source: str, name: str, right: str, wrong: str) -> Mutant:
    kind = "policy lru_split"  # whose oracle it must equal
    return Mutant(name, SOUND, "policies.py", right, wrong, "policies:SPLIT", kind, source)


def _layout(source: str, name: str, right: str, wrong: str) -> Mutant:
    return Mutant(name, SOUND, "layout.py", right, wrong, "layout:Scaled", "layout", source)


MASK = "s = np.where(seen, s, f32(-np.inf))\n"
CAP = "        s = s if soft_cap is None else f32(soft_cap) * np.tanh(s / f32(soft_cap))\n"
TABLE = "blocks = block_tables[row, : -(-length // block_size)]\n"
QUEUED = "self.free[block.block_id] = block"
COUNT_DOWN = "            block.ref_cnt -= 1\n"

KERNELS = [
    _attention(f"{FLASHINFER}#350", "a cap behind the mask", MASK, MASK + CAP),
    _attention(f"{SGLANG}#33987", "a cap taken and not applied", "if soft_cap is not None", "if False"),
    _attention(f"{FLASHINFER}#942", "zero times what is stale", "np.where(live[:, None, None], v, 0)", "v"),
    _attention(f"{FLASHINFER}#3716", "unread lanes in the sum", "broadcast_to(live,", "broadcast_to(True,"),
    _attention(
        f"{FLASHINFER}#4347",
        "large blocks read to half",
        "(x[blocks].reshape",
        "(x[blocks][:, np.arange(block_size) % 128].reshape",
    ),
    _attention(
        "vllm-project/flash-attention#42",
        "the table read in whole tiles",
        "-(-length // block_size)]",
        "-(-length // (4 * block_size)) * 4]",
    ),
    _attention(
        f"{FLASHINFER}#3106",
        "short rows are not paged",
        TABLE,
        f"{TABLE[:-1]} if length >= 16 else np.arange(-(-length // block_size))\n",
    ),
    _attention(
        f"{FLASHINFER}#2896",
        "groups of a power of two",
        "head // group_size",
        "head >> (group_size - 1).bit_length()",
    ),
    _attention(
        f"{VLLM}#42580",
        "float8 keys without their scale",
        "if k_scale is not None:",
        "if k_scale is not None and k_cache.dtype == np.int8:",
    ),
    _attention(
        f"{SGLANG}#26852", "values by the scale of keys", "v * np.reshape(v_scale", "v * np.reshape(k_scale"
    ),
    _attention(
        f"{VLLM}#47188",
        "empty partitions are merged",
        "np.where(np.isfinite(top), top, 0)",
        "top",
        "paged_attention_v2",
    ),
    _attention(
        f"{SGLANG}#2479",
        "the last, shorter split left out",
        "range(0, s.shape[1], size)",
        "range(0, max(s.shape[1] // size, 1) * size, size)",
        "paged_attention_v2",
    ),
    _prompts(
        f"{SGLANG}#1107",
        "a window of one more",
        "upto, None, **options)",
        'upto, None, **options | {"sliding_window": options.get("sliding_window", 998) + 1})',
    ),
    _prompts(
        f"{VLLM}#36580", "a chunk counted from the front", "length - (end - 1 - token)", "token - first + 1"
    ),
    _cache(
        f"{FLASHINFER}#4051",
        "nothing merged with nothing",
        "np.where(np.isfinite(largest), largest, 0)",
        "largest",
        "merge",
    ),
    _cache(
        f"{VLLM}#35125",
        "heads taken for tokens",
        "shape[2 if heads_first else 1]",
        "shape[1]",
        "reshape_and_cache",
    ),
    _cache(
        f"{VLLM}#50085",
        "scales in another order",
        "np.reshape(scale, (-1, 1))",
        "np.reshape(scale, (-1, 1))[::-1]",
        "reshape_and_cache",
    ),
    _cache(
        f"{VLLM}#17362",
        "keys copied alone",
        "[cache[origin] for cache in caches]",
        "[caches[0][origin], *caches[1:]]",
        "copy_blocks",
    ),
]
POOLS = [
    _pool(f"{VLLM}#44237", "a hash outlives its content", "            block.block_hash = None\n", ""),
    _pool(
        f"{VLLM}#4764",
        "the evicted is still found",
        "            self.forget(block)\n            block.ref",
        "            block.ref",
    ),
    _pool(
        "sgl-project/mini-sglang#52",
        "the last of a hit is not locked",
        "def touch(self, blocks):\n        for block in blocks:",
        "def touch(self, blocks):\n        for block in blocks[:-1]:",
    ),
    _pool(
        f"{SGLANG}#12224",
        "a double free is ignored",
        "if block.is_null:\n                continue",
        "if block.is_null or block.ref_cnt == 0:\n                continue",
    ),
    _pool(
        f"{SGLANG}#13501",
        "a double free is clamped",
        COUNT_DOWN,
        "            block.ref_cnt = max(block.ref_cnt - 1, 0)\n",
    ),
    _pool(
        f"{SGLANG}#35270",
        "shared blocks counted twice",
        "return len(self.free)\n",
        "return len(self.blocks) - 1 - sum(block.ref_cnt for block in self.blocks)\n",
    ),
    _pool(
        f"{VLLM}#51482",
        "uncached blocks freed to the head",
        QUEUED,
        f"{QUEUED}\n                self.free.move_to_end(block.block_id, last=self.enable_caching)",
    ),
    _pool(
        f"{VLLM}#48532",
        "freed in the other order",
        "for block in ordered_blocks:",
        "for block in reversed(list(ordered_blocks)):",
    ),
    _manager(
        f"{VLLM}#8824",
        "swapped in without room to go on",
        "v0/block_manager.py",
        "num_required_blocks += seq_group.num_seqs(status=SequenceStatus.SWAPPED)",
        "pass",
    ),
    _manager(
        f"{VLLM}#20425",
        "a prompt's tokens not counted",
        "v063/block_table.py",
        "self.num_tokens = len(token_ids)\n",
        "pass\n",
    ),
]
POLICIES = [
    _policy(
        f"{VLLM}#51787",
        "beginnings are evicted before ends",
        "to_tail, last_block_first=True",
        "to_tail, last_block_first=False",
    ),
    _policy(
        f"{VLLM}#51482",
        "what has no content waits longest",
        "Sweep(to_head, content",
        "Sweep(to_tail, content",
    ),
]
LAYOUTS = [
    _layout(f"{VLLM}#49716", "scales in other blocks", "units.at[block, which", "units.at[block ^ 1, which"),
    _layout(f"{VLLM}#15603", "values over keys", "numbers.at[block, which", "numbers.at[block, 0"),
]
