"""Times llama.cpp through the C interface of llama-cpp-python: one stream or many, greedy.

Every step is one `llama_decode`: the next token of each running request, and the whole prompts of those just
let in. A request that is done leaves its place to the next one waiting. With `--draft` a second model
drafts, and each step computes the drafts, too. The best token is found with NumPy.
The GGUF file must hold weights of the dtype asked for: see export_gguf.py. The cache is float32 for float32,
and float16, llama.cpp's own choice, for all else.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import harness  # type: ignore[import-not-found]  # the file beside this one
import numpy as np

# `general.file_type` of a GGUF file, and ggml's numbers for the cache's types: F32, and F16 for its speed.
_FILE_TYPES = {"float32": "0", "bfloat16": "32", "q4_0": "2", "q4_1": "3", "q8_0": "7"}
_FLOAT32, _FLOAT16 = 0, 1


@dataclass
class _Running:
    """A request in place `seq_id`: its tokens so far, the prompt's first, and how many are in each cache."""

    index: int
    seq_id: int
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    num_cached: int = 0
    num_drafted_on: int = 0  # tokens in the cache of the model that drafts

    @property
    def num_left(self) -> int:
        return self.prompt_len + self.max_tokens - len(self.tokens)


@dataclass
class _Feed:
    """Tokens of a request to be computed from `position` on; the next token behind the last `num_wanted`."""

    seq_id: int
    position: int
    tokens: list[int]
    num_wanted: int = 1


class _Engine:
    """One model with its cache."""

    def __init__(self, options: harness.Options, path: Path, file_type: str, cache_type: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self.lib = llama_cpp
        model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise SystemExit(f"{path} must be a GGUF file llama.cpp can load")
        found = ctypes.create_string_buffer(16)
        llama_cpp.llama_model_meta_val_str(model, b"general.file_type", found, len(found))
        if file_type and found.value.decode() != file_type:
            raise SystemExit(
                f"--model {path} has general.file_type {found.value.decode()}, which must be {file_type} for "
                f"{options.dtype}: make it with export_gguf.py"
            )
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        longest_prompt = max(len(request.prompt_token_ids) for request in options.requests)
        most = options.max_num_seqs * (max(longest_prompt, 1) + harness.NUM_DRAFTS)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.max_num_seqs * (-(-(options.max_model_len + harness.NUM_DRAFTS) // 256) * 256)
        params.n_seq_max = options.max_num_seqs
        params.n_batch = max(512, most)
        params.n_threads = params.n_threads_batch = harness.NUM_THREADS
        params.type_k = params.type_v = cache_type
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise SystemExit("llama.cpp made no context: see its message above")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def compute(self, feeds: list[_Feed]) -> list[list[int]]:
        """Compute all tokens in one `llama_decode`, and return the likeliest next tokens."""
        batch = self.batch
        batch.n_tokens = 0
        for feed in feeds:
            for place, token_id in enumerate(feed.tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token_id, feed.position + place
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, feed.seq_id
                batch.logits[i] = place >= len(feed.tokens) - feed.num_wanted
                batch.n_tokens += 1
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        wanted = iter([i for i in range(batch.n_tokens) if batch.logits[i]])
        return [[self._likeliest(next(wanted)) for _ in range(feed.num_wanted)] for feed in feeds]

    def _likeliest(self, i: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def keep(self, seq_id: int, num_tokens: int) -> None:
        """Forget all but a request's first tokens."""
        self.lib.llama_memory_seq_rm(self.memory, seq_id, num_tokens, -1)


def main() -> None:
    """Load the model and measure it."""
    draft = f"draft by {harness.DRAFT} in the model's folder, up to {harness.NUM_DRAFTS} tokens at a time"
    options = harness.start("Time llama.cpp on a workload.", {"--draft": draft})
    cache_type = _FLOAT32 if options.dtype == "float32" else _FLOAT16
    engine = _Engine(options, options.model, _FILE_TYPES[options.dtype], cache_type)
    drafter = None
    if options.extra.draft:
        drafter = _Engine(options, options.model.parent / harness.DRAFT, "", cache_type)
    counts = [0, 0]

    def drafts_of(running: list[_Running]) -> list[list[int]]:
        """Return the drafts of each request, as many as there may be."""
        drafts: list[list[int]] = [[] for _ in running]
        while drafter is not None:
            left = [
                (request, its)
                for request, its in zip(running, drafts, strict=True)
                if len(its) < min(harness.NUM_DRAFTS, request.num_left - 1)
            ]
            if not left:
                break
            feeds = [
                _Feed(
                    request.seq_id, request.num_drafted_on, (request.tokens + its)[request.num_drafted_on :]
                )
                for request, its in left
            ]
            for (request, its), feed, [token] in zip(left, feeds, drafter.compute(feeds), strict=True):
                request.num_drafted_on += len(feed.tokens)
                its.append(token)
        return drafts

    def step(running: list[_Running]) -> None:
        """Give every request its next token, and those that were drafted before it."""
        drafts = drafts_of(running)
        feeds = [
            _Feed(
                request.seq_id, request.num_cached, request.tokens[request.num_cached :] + its, 1 + len(its)
            )
            for request, its in zip(running, drafts, strict=True)
        ]
        for request, its, tokens in zip(running, drafts, engine.compute(feeds), strict=True):
            pairs = enumerate(zip(its, tokens, strict=False))
            num_right = next((k for k, (drafted, token) in pairs if drafted != token), len(its))
            request.num_cached = len(request.tokens) + num_right
            request.tokens += tokens[: num_right + 1]
            counts[0] += len(its)
            counts[1] += num_right
            if drafter is not None:
                request.num_drafted_on = min(request.num_drafted_on, request.num_cached)
                engine.keep(request.seq_id, request.num_cached)
                drafter.keep(request.seq_id, request.num_drafted_on)

    def generate(requests: list[harness.Request]) -> list[list[int]]:
        token_ids: list[list[int]] = [[]] * len(requests)
        waiting = list(enumerate(requests))[::-1]
        places = list(range(options.max_num_seqs))
        running: list[_Running] = []
        while waiting or running:
            while waiting and places:
                index, request = waiting.pop()
                prompt = request.prompt_token_ids
                running.append(_Running(index, places.pop(0), [*prompt], len(prompt), request.max_tokens))
            running.sort(key=lambda request: request.seq_id)  # llama.cpp batches neighbouring places only
            step(running)
            for request in [r for r in running if r.num_left == 0]:
                for each in (engine, drafter):
                    if each is not None:
                        each.keep(request.seq_id, 0)
                token_ids[request.index] = request.tokens[request.prompt_len :]
                places.append(request.seq_id)
                running.remove(request)
        return token_ids

    its_counts = None if drafter is None else lambda: (counts[0], counts[1])
    harness.measure("llama.cpp", engine.lib.__version__, options, generate, counts=its_counts)


if __name__ == "__main__":
    main()
