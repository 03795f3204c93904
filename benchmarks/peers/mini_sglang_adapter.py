"""Scheduler, page table and radix cache of mini-sglang behind the contract of `jaxpaged verify engine`.

    git clone https://github.com/sgl-project/mini-sglang && pip install torch
    export MINI_SGLANG=mini-sglang
    jaxpaged verify engine benchmarks.peers.mini_sglang_adapter:MiniSGLang --tolerance 0

Their cache, prefill and decode managers run as they are; the loop is that of their `Scheduler.normal_loop`,
on a CPU, and only the model is another, which reads the slots that the page table names.
"""

import importlib
import os
import sys
import types
from typing import Any

from benchmarks.peers.slots_model import VOCAB, Slots
from jaxpaged.research.verify.engines.contract import Answer, Ask

PAGE, PAGES, BUDGET, ROWS = int(os.environ.get("BLOCK_SIZE", "4")), 64, 16, 4
LONGEST = PAGE * PAGES  # as their `Engine.max_seq_len` has it


class Registry(dict[str, Any]):
    """Functions by name, as `minisgl.utils.Registry` keeps them."""

    def __init__(self, name: str) -> None:
        super().__init__()

    def register(self, name: str) -> Any:
        """Return a decorator."""
        return lambda function: self.setdefault(name, function)


def fast_compare_key(a: Any, b: Any) -> int:
    """Return how many tokens two keys have in common: what their C++ function of this name returns."""
    length = min(len(a), len(b))
    differ = (a[:length] != b[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


def theirs() -> types.SimpleNamespace:
    """Import their managers without what needs a GPU."""
    root = os.path.join(os.environ["MINI_SGLANG"], "python", "minisgl")
    for name in ("", ".scheduler", ".kvcache"):
        module = types.ModuleType(f"minisgl{name}")
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[f"minisgl{name}"] = module
    utils, kernel = types.ModuleType("minisgl.utils"), types.ModuleType("minisgl.kernel")
    vars(utils).update(
        align_down=lambda a, b: a // b * b,
        div_ceil=lambda a, b: -(-a // b),
        init_logger=lambda name: None,
        Registry=Registry,
    )
    vars(kernel).update(fast_compare_key=fast_compare_key)
    sys.modules |= {"minisgl.utils": utils, "minisgl.kernel": kernel}
    core = importlib.import_module("minisgl.core")
    core.set_global_ctx(core.Context(PAGE))
    base, radix = (importlib.import_module(f"minisgl.kvcache.{name}") for name in ("base", "radix_cache"))
    kvcache: Any = sys.modules["minisgl.kvcache"]
    kvcache.BaseCacheHandle, kvcache.MatchResult = base.BaseCacheHandle, base.MatchResult
    kvcache.create_prefix_cache = lambda device, type: radix.RadixPrefixCache(device=device)
    found = {
        name: importlib.import_module(f"minisgl.scheduler.{name}")
        for name in ("cache", "prefill", "decode", "table", "utils")
    }
    return types.SimpleNamespace(core=core, **found)


class MiniSGLang:
    """Adapter: aborts, no salts and no adapters."""

    token_ids = range(1, VOCAB + 1)
    block_size, num_blocks = PAGE, PAGES
    serves = frozenset({"abort"})

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        # Pinned memory needs a GPU.
        torch.Tensor.pin_memory = lambda self, *args: self
        self.torch, self.theirs = torch, theirs()
        empty = torch.empty
        # Their cache file alone sees a torch whose `empty` pins nothing.
        self.theirs.cache.torch = types.SimpleNamespace(
            **vars(torch) | {"empty": lambda *args, pin_memory=False, **more: empty(*args, **more)}
        )
        self.uid = 0
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache."""
        page_table = self.torch.zeros((ROWS, LONGEST), dtype=self.torch.int32)
        them = self.theirs
        self.cache = them.cache.CacheManager(PAGES, PAGE, page_table, "radix")
        self.table = them.table.TableManager(ROWS, page_table)
        self.decode = them.decode.DecodeManager(PAGE)
        self.prefill = them.prefill.PrefillManager(self.cache, self.table, self.decode)
        self.slots = Slots(PAGES * PAGE)

    def gauges(self) -> dict[str, float]:
        """Return what is held: tokens that are protected, and rows; and pages that nobody has."""
        info, free = self.cache.prefix_cache.size_info, len(self.cache.free_slots)
        lost = PAGES - free - (info.evictable_size + info.protected_size) // PAGE
        return {
            "protected": info.protected_size,
            "rows": ROWS - self.table.available_size,
            "lost pages": lost,
        }

    def ask(self, asks: list[Ask]) -> list[Answer]:
        """Answer requests together, by their `normal_loop`."""
        first = self.uid
        self.uid += len(asks)
        tokens: dict[int, list[int]] = {first + i: [] for i in range(len(asks))}
        logprobs: dict[int, list[float]] = {uid: [] for uid in tokens}
        cached: dict[int, int] = {}
        for uid, ask in zip(tokens, asks, strict=True):
            prompt = self.torch.tensor(ask.prompt, dtype=self.torch.int32)
            room = LONGEST - len(prompt)
            if room <= 0:  # their `_process_one_msg` drops it
                continue
            params = self.theirs.core.SamplingParams(ignore_eos=True, max_tokens=min(ask.max_tokens, room))
            self.prefill.add_one_req(types.SimpleNamespace(uid=uid, input_ids=prompt, sampling_params=params))
        leaving = {first + i: ask.abort_after for i, ask in enumerate(asks) if ask.abort_after is not None}
        while self.prefill.runnable or self.decode.runnable:
            for uid, after in list(leaving.items()):
                if len(tokens[uid]) >= after and (after or uid in cached):
                    del leaving[uid]
                    gone = self.prefill.abort_req(uid) or self.decode.abort_req(uid)
                    if gone is not None:
                        self._free(gone)
            batch = self.prefill.schedule_next_batch(BUDGET) or self.decode.schedule_next_batch()
            if batch is None:
                if self.prefill.runnable or self.decode.runnable:
                    raise RuntimeError("requests wait, and no batch is made of them")
                break
            self._run(batch, tokens, logprobs, cached)
        return [
            Answer((), error="dropped")
            if len(ask.prompt) >= LONGEST
            else Answer(
                (tuple(tokens[uid]),),
                (tuple(logprobs[uid]),),
                cached=cached.get(uid, 0),
                num_prompt=len(ask.prompt),
            )
            for uid, ask in zip(tokens, asks, strict=True)
        ]

    def _run(self, batch: Any, tokens: Any, logprobs: Any, cached: dict[int, int]) -> None:
        self.cache.allocate_paged(batch.reqs)
        following = []
        for req in batch.reqs:
            cached.setdefault(req.uid, req.cached_len)
            line = self.table.page_table[req.table_idx].tolist()
            for at in range(req.cached_len, req.device_len):
                self.slots.write(line[at], int(req.input_ids[at]), at)
        for req in batch.reqs:
            line = self.table.page_table[req.table_idx].tolist()
            following.append(self.slots.next_token(line[: req.device_len]))
            req.complete_one()
        self.decode.filter_reqs(batch.reqs)
        with self.cache.lazy_free_region():
            for req, (token, logprob) in zip(batch.reqs, following, strict=True):
                if isinstance(req, self.theirs.prefill.ChunkedReq):
                    continue
                req.append_host(self.torch.tensor([token], dtype=self.torch.int32))
                tokens[req.uid].append(token)
                logprobs[req.uid].append(logprob)
                if not req.can_decode:
                    self.decode.remove_req(req)
                    self._free(req)
                elif batch.is_prefill:
                    self.cache.cache_req(req, finished=False)

    def _free(self, req: Any) -> None:
        self.table.free(req.table_idx)
        self.cache.cache_req(req, finished=True)
