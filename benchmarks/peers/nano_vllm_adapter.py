"""Scheduler and block manager of nano-vllm behind the contract of `jaxpaged verify engine`.

    git clone https://github.com/GeeeekExplorer/nano-vllm && pip install xxhash
    NANO_VLLM=nano-vllm jaxpaged verify engine benchmarks.peers.nano_vllm_adapter:NanoVLLM --tolerance 0

Their three files run as they are; only the model is another, which reads the slots that a block table names.
"""

import importlib
import os
import sys
import types
from typing import Any

from benchmarks.peers.slots_model import VOCAB, Slots
from jaxpaged.research.verify.engines.contract import Answer, Ask

SIZE, BLOCKS, BUDGET, ROWS = int(os.environ.get("BLOCK_SIZE", "4")), 48, 16, 4


def theirs() -> tuple[Any, Any, Any]:
    """Import scheduler, sequence and sampling parameters without what needs a GPU."""
    root = os.path.join(os.environ["NANO_VLLM"], "nanovllm")
    for name, path in (("nanovllm", root), ("nanovllm.engine", os.path.join(root, "engine"))):
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    config = types.ModuleType("nanovllm.config")
    config.Config = object  # type: ignore[attr-defined]
    sys.modules["nanovllm.config"] = config
    names = "engine.scheduler", "engine.sequence", "sampling_params"
    scheduler, sequence, params = (importlib.import_module(f"nanovllm.{name}") for name in names)
    sequence.Sequence.block_size = SIZE
    return scheduler.Scheduler, sequence.Sequence, params.SamplingParams


class NanoVLLM:
    """Adapter: no salts, no adapters, no aborts, as nano-vllm has none."""

    token_ids = range(1, VOCAB + 1)
    block_size, num_blocks = SIZE, BLOCKS

    def __init__(self) -> None:
        self.scheduler_of, self.sequence, self.params = theirs()
        self.reset()

    def reset(self) -> None:
        """Start with an empty cache."""
        config = types.SimpleNamespace(
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            eos=-1,
            kvcache_block_size=SIZE,
            num_kvcache_blocks=BLOCKS,
        )
        self.scheduler, self.slots = self.scheduler_of(config), Slots(SIZE * BLOCKS)

    def gauges(self) -> dict[str, float]:
        """Return blocks in use."""
        return {"used": len(self.scheduler.block_manager.used_block_ids)}

    def ask(self, asks: list[Ask]) -> list[Answer]:
        """Answer requests together, by the loop of nano-vllm's engine."""
        rows = [
            self.sequence(
                list(ask.prompt), self.params(temperature=1.0, max_tokens=ask.max_tokens, ignore_eos=True)
            )
            for ask in asks
        ]
        logprobs: dict[int, list[float]] = {row.seq_id: [] for row in rows}
        cached: dict[int, int] = {}
        for row in rows:
            self.scheduler.add(row)
        while not self.scheduler.is_finished():
            scheduled, is_prefill = self.scheduler.schedule()
            tokens = []
            for row in scheduled:
                first = row.num_cached_tokens if is_prefill else len(row) - 1
                last = first + row.num_scheduled_tokens
                cached.setdefault(row.seq_id, first)
                places = [row.block_table[i // SIZE] * SIZE + i % SIZE for i in range(last)]
                for i in range(first, last):
                    self.slots.write(places[i], row[i], i)
                token, logprob = self.slots.next_token(places)
                tokens.append(token)
                if not is_prefill or last == len(row):
                    logprobs[row.seq_id].append(logprob)
            self.scheduler.postprocess(scheduled, tokens, is_prefill)
        return [
            Answer(
                (tuple(row.completion_token_ids),),
                (tuple(logprobs[row.seq_id]),),
                cached=cached[row.seq_id],
                num_prompt=row.num_prompt_tokens,
            )
            for row in rows
        ]
