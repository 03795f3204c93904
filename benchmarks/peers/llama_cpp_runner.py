"""Times llama.cpp through the C interface of llama-cpp-python: one stream or many, greedy.

Every step is one `llama_decode`: the next token of each running request, and the whole prompts of those just
let in. A request that is done leaves its place to the next one waiting. The best token is found with NumPy.
The GGUF file must hold weights of the dtype asked for: see export_gguf.py. The cache is float32 for float32,
and float16, llama.cpp's own choice, for all else.
"""

import ctypes
import os
from dataclasses import dataclass, field

import harness  # type: ignore[import-not-found]  # the file beside this one
import numpy as np

# `general.file_type` of a GGUF file, and ggml's numbers for the cache's types: F32, and F16 for its speed.
_FILE_TYPES = {"float32": "0", "bfloat16": "32", "q4_0": "2", "q4_1": "3", "q8_0": "7"}
_FLOAT32, _FLOAT16 = 0, 1


@dataclass
class _Running:
    """A request in place `seq_id`: the tokens to feed next, and those generated so far."""

    index: int
    seq_id: int
    feed: list[int]
    max_tokens: int
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)


def main() -> None:
    """Load the model and measure it."""
    options = harness.start("Time llama.cpp on a workload.")

    import llama_cpp  # type: ignore[import-not-found]

    model = llama_cpp.llama_model_load_from_file(
        os.fsencode(options.model), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"--model {options.model} must be a GGUF file llama.cpp can load")
    file_type = ctypes.create_string_buffer(16)
    llama_cpp.llama_model_meta_val_str(model, b"general.file_type", file_type, len(file_type))
    if file_type.value.decode() != _FILE_TYPES[options.dtype]:
        raise SystemExit(
            f"--model {options.model} has general.file_type {file_type.value.decode()}, "
            f"which must be {_FILE_TYPES[options.dtype]} for {options.dtype}: make it with export_gguf.py"
        )
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    longest_prompt = max(len(request.prompt_token_ids) for request in options.requests)
    max_step_tokens = options.max_num_seqs * longest_prompt
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.max_num_seqs * (-(-options.max_model_len // 256) * 256)
    params.n_seq_max = options.max_num_seqs
    params.n_batch = max(512, max_step_tokens)
    params.n_threads = params.n_threads_batch = harness.NUM_THREADS
    params.type_k = params.type_v = _FLOAT32 if options.dtype == "float32" else _FLOAT16
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp made no context: see its message above")
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(max_step_tokens, 0, 1)

    def step(running: list[_Running]) -> None:
        """Feed every request's tokens, and give each its next one."""
        batch.n_tokens = 0
        last = []  # where in the batch each request's last token is
        for request in running:
            for token_id in request.feed:
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token_id, request.num_cached
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, request.seq_id
                batch.logits[i] = 0
                batch.n_tokens += 1
                request.num_cached += 1
            last.append(batch.n_tokens - 1)
            batch.logits[last[-1]] = 1
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        for request, i in zip(running, last, strict=True):
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab_size,))
            request.feed = [int(logits.argmax())]
            request.token_ids += request.feed

    def generate(requests: list[harness.Request]) -> list[list[int]]:
        token_ids: list[list[int]] = [[]] * len(requests)
        waiting = list(enumerate(requests))[::-1]
        places = list(range(options.max_num_seqs))
        running: list[_Running] = []
        while waiting or running:
            while waiting and places:
                index, request = waiting.pop()
                running.append(_Running(index, places.pop(0), request.prompt_token_ids, request.max_tokens))
            running.sort(key=lambda request: request.seq_id)  # llama.cpp batches neighbouring places only
            step(running)
            for request in [r for r in running if len(r.token_ids) == r.max_tokens]:
                llama_cpp.llama_memory_seq_rm(memory, request.seq_id, -1, -1)
                token_ids[request.index] = request.token_ids
                places.append(request.seq_id)
                running.remove(request)
        return token_ids

    harness.measure("llama.cpp", llama_cpp.__version__, options, generate)


if __name__ == "__main__":
    main()
