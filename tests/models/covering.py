"""Choice of the stored models that together show every value of decoders' descriptions.

Families add mostly names and how configs are read, which the NumPy model shows. Programs differ by
the description alone, and each takes a second to compile: only these models are compiled in each run.
"""

import dataclasses
import json
from pathlib import Path

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.families import from_hf

# Sizes, and what no pass reads.
IGNORED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_q_heads", "num_kv_heads", "head_dim"),
    *("max_model_len", "eos_token_ids", "norm_eps", "num_experts", "num_chosen", "layers", "experts"),
    # Of models with states, whose programs take long to compile: `make test-all` has all of these.
    *("latent_size", "normed_residual", "factors"),
}


def traits(config: ModelConfig) -> set[tuple[str, object]]:
    """Return what the description says: words and flags as they are, numbers as given or not."""
    found: set[tuple[str, object]] = set()
    for part in filter(None, (config, config.experts)):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in IGNORED:
                said = value if isinstance(value, bool | str) else value != field.default
                found.add((field.name, said))
    ropes = {kind.rope for kind in config.layers}
    found |= {("scaling", type(rope.scaling)) for rope in ropes if rope is not None}
    found |= {("turned", rope is not None and rope.dim == config.head_dim) for rope in ropes}
    windows = {kind.sliding_window for kind in config.layers}
    found |= {("chunks", any(kind.attention_chunk for kind in config.layers))}
    found |= {("temperature", kind.temperature and kind.temperature.offset) for kind in config.layers}
    found |= {("different parts are turned", len({rope.dim for rope in ropes if rope is not None}) > 1)}
    found |= {("experts", config.experts is not None), ("ropes", len(ropes)), ("windows", len(windows))}
    return found | {("window", windows != {None}), ("norm", (config.norm, config.norm_offset))}


def covering(names: list[str], folder: Path) -> list[str]:
    """Return some of the models, in their order, that have all traits of all: first the one with most."""
    configs = {name: json.loads((folder / name / "config.json").read_text()) for name in names}
    left = {name: traits(from_hf(said)) for name, said in configs.items()}
    chosen, missing = set(), set().union(*left.values())
    while missing:
        best = max(names, key=lambda name: len(left[name] & missing))
        chosen.add(best)
        missing -= left[best]
    return [name for name in names if name in chosen]
