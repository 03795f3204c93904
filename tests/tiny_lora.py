"""Adapters for the tiny model as PEFT saves them, and as the oracle takes them."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxpaged.config import EngineConfig
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import by_role
from reference import lora as reference_lora
from reference import model as reference_model
from tests import tiny
from tests.tiny_gguf import write_gguf

HIDDEN, HEADS, KV, MLP = 32, 48, 16, 48
# By module: the role, its first output there, inputs, outputs.
MODULES = {
    "self_attn.q_proj": ("qkv", 0, HIDDEN, HEADS),
    "self_attn.k_proj": ("qkv", HEADS, HIDDEN, KV),
    "self_attn.v_proj": ("qkv", HEADS + KV, HIDDEN, KV),
    "self_attn.o_proj": ("o", 0, HEADS, HIDDEN),
    "mlp.gate_proj": ("gate_up", 0, HIDDEN, MLP),
    "mlp.up_proj": ("gate_up", MLP, HIDDEN, MLP),
    "mlp.down_proj": ("down", 0, MLP, HIDDEN),
}
RANK, ALPHA = 5, 10
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "structured_outputs_mib": 1}


@functools.cache
def tensors(seed: int) -> dict[str, np.ndarray]:
    """Return an adapter's tensors by name. Odd seeds leave out some modules, which are then unchanged."""
    rng, found = np.random.default_rng(1000 + seed), {}
    for layer in range(tiny.CONFIG.num_layers):
        for module, (_, _, inputs, outputs) in MODULES.items():
            if seed % 2 and module.endswith(("k_proj", "up_proj")):
                continue
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = rng.standard_normal((RANK, inputs), np.float32) * inputs**-0.5
            found[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, RANK), np.float32) * 0.3
    return found


def write(folder: Path, seed: int = 0, changed: Mapping[str, Any] | None = None, **said: Any) -> Path:
    """Write the adapter of a seed as a directory, and return its path.

    `changed` replaces tensors, or leaves out those that are None; `said` replaces entries of its config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | said))
    all_ = tensors(seed) | dict(changed or {})
    save_file({name: x for name, x in all_.items() if x is not None}, folder / "adapter_model.safetensors")
    return folder


def request(folder: Path, seed: int) -> LoRARequest:
    """Return a request for the adapter of a seed, which is written if it is not there."""
    path = folder / f"adapter{seed}"
    return LoRARequest(f"adapter{seed}", 1 + seed, path if path.exists() else write(path, seed))


@functools.cache
def merged(seed: int, weights_seed: int = 0) -> dict[str, np.ndarray]:
    """Merge the adapter of a seed into the oracle's weights, which are of a seed, too."""
    updates: dict[str, list[reference_lora.Update]] = {}
    for name, a in tensors(seed).items():
        if name.endswith("lora_A.weight"):
            _, _, _, _, layer, module = name.removesuffix(".lora_A.weight").split(".", 5)
            role, first, *_ = MODULES[module]
            b = tensors(seed)[name.replace("lora_A", "lora_B")]
            its = updates.setdefault(f"layers.{layer}.{role}.weight", [])
            its.append(reference_lora.Update(first, a, b, ALPHA / RANK))
    weights = by_role(tiny.CONFIG, NAMES, tiny.weights(seed=weights_seed))
    return reference_lora.merged(weights, updates)


def reference_answer(seed: int | None, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the oracle's greedy answer with an adapter, or without."""
    weights = tiny.reference_weights() if seed is None else merged(seed)
    return reference_model.generate(tiny.CONFIG, weights, prompt, max_tokens)


def assert_answers_are_the_oracles(
    driver: Driver, folder: Path, lengths: list[int], seeds: list[int | None]
) -> None:
    """Answer prompts with the adapters of these seeds, or none, in one batch; compare with the oracle."""
    prompts, ids = tiny.prompts(lengths), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        adapter = None if seed is None else request(folder, seed)
        [each] = tiny.numbered(driver.door.admit(prompt, tiny.greedy(8), lora_request=adapter))
        driver.add(each)
        ids.append(each.request_id)
    answers = tiny.drain(driver)
    for request_id, prompt, seed in zip(ids, prompts, seeds, strict=True):
        assert answers[request_id].token_ids == reference_answer(seed, prompt, 8), seed


def driver(folder: Path, draft: Draft | None = None, **options: Any) -> Driver:
    """Create a driver like `tiny.driver` with three adapter slots, whose program the server's tests share."""
    file = folder / "tiny.gguf"
    opened = loading.open_checkpoint(file if file.exists() else write_gguf(file))
    config = EngineConfig(**tiny.DEFAULTS | LORA | options)
    names = opened.module_names
    return Driver(config, opened.config, opened.model, adapter_names=names, draft=draft)
