"""Cost of adapters: 16 rows with four different ones, beside 16 rows without: `python -m benchmarks.lora`.

Three ways take turns, run by run: an engine without room for adapters, one with room that no request uses,
and the same one with an adapter for each row. Prompts are short, so nearly all is decoding. Standard output
is a JSON line for each dtype: tokens a second of each way, and its time as a multiple of the first one's, the
median over rounds.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from safetensors.numpy import save_file

from benchmarks import record
from jaxpaged import LLM, LoRARequest, SamplingParams
from jaxpaged.models import loading, lora

_MODEL = flags.DEFINE_string("model", "smollm2", "As for LLM.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "With commas between them.")
_ROWS = flags.DEFINE_integer("rows", 16, "Requests in a batch.", lower_bound=1)
_ADAPTERS = flags.DEFINE_integer("adapters", 4, "Different ones among them.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 16, "Of each.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 64, "Of each answer.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each way.", lower_bound=1)


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """Write an adapter of every product that may have one, of random numbers, as PEFT would save it."""
    opened, rng = loading.open_checkpoint(model), np.random.default_rng(seed)
    tensors = {}
    for room in lora.rooms(opened.config, opened.module_names).values():
        for module, width in zip(room.modules, room.widths, strict=True):
            for layer in range(opened.config.num_layers):
                name = f"base_model.model.{module.format(layer=layer)}"
                tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, room.in_features), np.float32)
                tensors[f"{name}.lora_B.weight"] = rng.standard_normal((width, rank), np.float32) * 1e-4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def compare(dtype: str, folder: Path) -> dict[str, object]:
    model, num_rows, num_adapters = _MODEL.value, _ROWS.value, _ADAPTERS.value
    sizes: dict[str, Any] = {"dtype": dtype, "max_num_seqs": num_rows, "max_model_len": 512}
    room: dict[str, Any] = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": _RANK.value}
    plain, roomy = LLM(model, **sizes), LLM(model, **sizes | room)
    each = []
    for i in range(num_adapters):
        path = write_adapter(folder / f"{dtype}{i}", model, _RANK.value, i)
        each.append(LoRARequest(f"adapter{i}", 1 + i, path))
    adapters = [each[row % num_adapters] for row in range(num_rows)]
    prompts = [[100 + row, 200, 300] for row in range(num_rows)]
    params = SamplingParams(max_tokens=_TOKENS.value, temperature=0, ignore_eos=True)
    ways: dict[str, Callable[[], object]] = {
        "without": lambda: plain.generate(prompts, params, use_tqdm=False),
        "room": lambda: roomy.generate(prompts, params, use_tqdm=False),
        "adapters": lambda: roomy.generate(prompts, params, lora_request=adapters, use_tqdm=False),
    }
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS.value):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    for llm in (plain, roomy):
        llm.engine.close()

    def times_of_without(name: str) -> float:
        pairs = zip(seconds[name], seconds["without"], strict=True)
        return round(statistics.median(its / base for its, base in pairs), 3)

    tokens = num_rows * _TOKENS.value
    return {
        "dtype": dtype,
        "rows": num_rows,
        "adapters": num_adapters,
        "rank": _RANK.value,
        "tokens_per_s": {name: round(tokens / min(its), 1) for name, its in seconds.items()},
        "time_for_without": {name: times_of_without(name) for name in ("room", "adapters")},
        "rounds": _ROUNDS.value,
    }


def main(argv: list[str]) -> None:
    record.start(argv)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in _DTYPES.value:
            line = compare(dtype, Path(folder)) | record.context("benchmarks.lora")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    app.run(main, sys.argv)
