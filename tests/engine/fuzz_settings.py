"""Settings of the fuzzer of whole engines: options that meet in one engine, each with its reason to meet."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import StoredWeights, random_weights
from jaxpaged.tiers.rule import Rule
from tests import tiny, tiny_head, tiny_latents, tiny_lora, tiny_states

BLOCK_GIB = 2048 / 2**30  # of the tiny model's two layers

PRIORITY = {"scheduling_policy": "priority"}
# So few blocks that most workloads make requests give way to others.
FEW = {"num_blocks": 1 + 14, "max_model_len": 100}
TIGHT = tiny.SMALL | PRIORITY | FEW
SWAP = tiny.SWAP | PRIORITY | FEW


def _quantised(**options: Any) -> Driver:
    return tiny.driver(tiny.load_quantised, **options)


def _tiers(num_kept: int = 30, folder: Path | None = None, num_on_disk: int = 0) -> dict[str, Any]:
    """Return the options of an engine with room for so many blocks in host memory, and in a folder."""
    its: dict[str, Any] = {"kv_offloading_size": num_kept * BLOCK_GIB}
    if folder is not None:
        its["kv_offloading_backend"] = f"disk:{folder / 'blocks'}"
        its["kv_offloading_disk_size"] = num_on_disk * BLOCK_GIB
    return its


def _fetching(driver: Driver) -> Driver:
    """Let an engine fetch whatever it can."""
    driver.offloading.rule = Always()
    return driver


def _of_vocabulary(vocab_size: int, **options: Any) -> Driver:
    """Create an engine over a model with so many tokens, of which some are chosen at once."""
    return _of_config(dataclasses.replace(tiny.CONFIG, vocab_size=vocab_size), **options)


def _of_config(config: ModelConfig, **options: Any) -> Driver:
    """Create an engine over a model with random weights."""
    weights = random_weights(config, NAMES, 0)
    return tiny.driver(lambda form: Decoder(StoredWeights(config, NAMES, weights, form)), config, **options)


class Always(Rule):
    """Rule that always fetches, and waits for long."""

    def wait(self, compute_seconds: float | None) -> float:
        return 60.0

    def pays(self, compute_seconds: float | None, num_bytes: int, bytes_below: int) -> bool:
        return True


def _of_kinds(*kinds: LayerKind, draft: Draft | None = None, **options: Any) -> Driver:
    """Create an engine whose layers are of these kinds in turn, so that each kind has blocks of its own."""
    config = tiny.mixed(*kinds, num_layers=len(kinds))
    return tiny.driver(functools.partial(tiny.load, config=config), config, draft=draft, **options)


def _on_devices(size: int, *kinds: LayerKind, **options: Any) -> Driver:
    """Create an engine on so many devices, whose sums are those of four."""
    wide = dataclasses.replace(
        tiny.CONFIG, num_q_heads=8, num_kv_heads=4, intermediate_size=128, layers=kinds
    )
    return _of_config(wide, **options, tensor_parallel_size=size, tensor_parallel_sums=4)


# A model of other sizes, whose drafts are hardly ever right.
_OTHER = dataclasses.replace(
    tiny.CONFIG, hidden_size=16, num_q_heads=2, num_kv_heads=1, layers=tiny.CONFIG.layers[:1]
)
ANOTHER = Draft(_OTHER, functools.partial(tiny.load, config=_OTHER), cost=tiny.CHEAP)
ITSELF = Draft(tiny.CONFIG, tiny.load, cost=tiny.CHEAP)
BY_MODEL: dict[str, Any] = {
    "speculative_config": {"model": "tiny", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
}
BY_NGRAMS: dict[str, Any] = {"speculative_config": {"prompt_lookup_min": 1}}
BY_SUFFIXES: dict[str, Any] = {
    "speculative_config": {"method": "suffix", "suffix_decoding_max_cached_requests": 3}
}
TWO_KINDS, THREE_KINDS = {"num_blocks": 1 + 21}, {"num_blocks": 1 + 31, "max_num_batched_tokens": 4 + 32}
EIGHT_ROWS = {"max_num_seqs": 8, "num_blocks": 1 + 24, "max_num_batched_tokens": 8 + 64}
# Answers as trainers ask for them.
TOLD: dict[str, Any] = {"return_sampling_mask": True, "max_prompt_logprob_token_ids": 5}
FULL, WINDOW, CHUNK = LayerKind(), LayerKind(sliding_window=11), LayerKind(attention_chunk=20)
SETTINGS: dict[str, Callable[[Path], Driver]] = {
    "adapters": lambda folder: tiny_lora.driver(folder, **TIGHT),
    "one row, one adapter": lambda folder: tiny_lora.driver(
        folder, **TIGHT | {"max_num_seqs": 1, "max_loras": 1, "max_num_batched_tokens": 1 + 64}
    ),
    "adapters, drafts": lambda folder: tiny_lora.driver(
        folder, **TIGHT, speculative_config={"prompt_lookup_min": 1}
    ),
    "adapters, drafts by a head": lambda folder: tiny_lora.driver(
        folder, tiny_head.draft(), **TIGHT, **tiny_head.BY_HEAD
    ),
    "swap": lambda _: tiny.driver(**SWAP),
    # Of a size that no other has, for a program of its own: see the test.
    "swap, prefixes read once": lambda _: tiny.driver(
        **SWAP | {"max_model_len": 104, "keep_programs": False}
    ),
    "swap, drafts": lambda _: tiny.driver(**SWAP, speculative_config={"prompt_lookup_min": 1}),
    "swap, suffixes": lambda _: tiny.driver(**SWAP, speculative_config={"method": "suffix"}),
    "swap, drafts by itself": lambda _: tiny.driver(**SWAP, **BY_MODEL, draft=ITSELF),
    "swap, drafts by another": lambda _: tiny.driver(**SWAP, **BY_MODEL, draft=ANOTHER),
    "swap, drafts by a head": lambda _: tiny_head.driver(**SWAP),
    "swap, tiers": lambda _: _fetching(tiny.driver(**SWAP, **_tiers())),
    "quantised": lambda _: _quantised(**TIGHT),
    "int8 cache, swap": lambda _: tiny.driver(**SWAP, kv_cache_dtype="int8"),
    "fp8 cache, quantised": lambda _: _quantised(**TIGHT, kv_cache_dtype="fp8"),
    "no prefix cache": lambda _: tiny.driver(**TIGHT, enable_prefix_caching=False),
    "two kinds of layers, swap": lambda _: _of_kinds(FULL, WINDOW, **SWAP | {"num_blocks": 1 + 21}),
    "three kinds of layers": lambda _: _of_kinds(
        FULL, WINDOW, CHUNK, **TIGHT | {"num_blocks": 1 + 31, "max_num_batched_tokens": 4 + 32}
    ),
    "two kinds of layers, int8 cache, s3fifo": lambda _: _of_kinds(
        CHUNK,
        WINDOW,
        **TIGHT | {"num_blocks": 1 + 21, "max_num_batched_tokens": 4 + 32},
        kv_cache_dtype="int8",
        eviction_policy="s3fifo",
    ),
    "two kinds of layers, replicas": lambda _: _of_kinds(
        FULL, WINDOW, **SWAP | {"num_blocks": 1 + 21, "data_parallel_size": 2}
    ),
    "two kinds of layers, drafts, tiers": lambda _: _fetching(
        _of_kinds(FULL, WINDOW, **SWAP | TWO_KINDS | BY_NGRAMS, **_tiers(14))
    ),
    "three kinds of layers, suffixes, disk": lambda folder: _fetching(
        _of_kinds(FULL, WINDOW, CHUNK, **SWAP | THREE_KINDS | BY_SUFFIXES, **_tiers(8, folder, 20))
    ),
    "states": lambda _: tiny_states.driver(tiny_states.DELTA, **TIGHT),
    "states, swap": lambda _: tiny_states.driver(tiny_states.MAMBA, **SWAP),
    "states, swap, drafts": lambda _: tiny_states.driver(
        tiny_states.MAMBA, **SWAP, speculative_config={"prompt_lookup_min": 1}
    ),
    "states and windows, suffixes, disk": lambda folder: _fetching(
        tiny_states.driver(
            tiny_states.DELTA,
            *(tiny_states.STATE, tiny_states.FULL, tiny_states.WINDOW),
            **SWAP | TWO_KINDS | BY_SUFFIXES,
            **_tiers(8, folder, 20),
        )
    ),
    "states, layers of one part, swap, drafts": lambda _: tiny_states.driver(
        tiny_states.MAMBA, *tiny_states.ONE_PART, **SWAP, speculative_config={"prompt_lookup_min": 1}
    ),
    "states beside attention and windows, swap": lambda _: tiny_states.driver(
        tiny_states.MAMBA,
        *(tiny_states.BOTH, dataclasses.replace(tiny_states.WINDOW, has_state=True)),
        **SWAP | TWO_KINDS,
    ),
    "states on two devices, swap": lambda _: tiny_states.driver(
        tiny_states.DELTA, **SWAP, tensor_parallel_size=2
    ),
    "states alone": lambda _: tiny_states.driver(tiny_states.CONVOLUTION, tiny_states.STATE, **TIGHT),
    "states of channels, swap, drafts": lambda _: tiny_states.driver(
        tiny_states.MAMBA_1, **SWAP, speculative_config={"prompt_lookup_min": 1}
    ),
    "latents": lambda _: tiny_latents.driver(**TIGHT),
    "latents, swap, drafts": lambda _: tiny_latents.driver(
        **SWAP, speculative_config={"prompt_lookup_min": 1}
    ),
    "latents and windows, suffixes, disk": lambda folder: _fetching(
        tiny_latents.driver(
            *(tiny_latents.FULL, tiny_latents.WINDOW),
            **SWAP | TWO_KINDS | BY_SUFFIXES,
            **_tiers(8, folder, 20),
        )
    ),
    "latents, drafts by itself": lambda _: tiny_latents.driver(**SWAP | BY_MODEL, draft=tiny_latents.ITSELF),
    "two kinds of layers, drafts by a head": lambda _: _of_kinds(
        FULL, WINDOW, draft=tiny_head.draft(), **SWAP | TWO_KINDS | tiny_head.BY_HEAD
    ),
    "adapters, drafts, disk": lambda folder: _fetching(
        tiny_lora.driver(folder, **TIGHT | BY_NGRAMS, **_tiers(10, folder, 25))
    ),
    "swap, drafts by itself, disk": lambda folder: _fetching(
        tiny.driver(**SWAP | BY_MODEL, **_tiers(24, folder, 40), draft=ITSELF)
    ),
    "told, drafts": lambda _: tiny.driver(
        **SWAP | BY_NGRAMS | TOLD, logprobs_mode="processed_logits", decode_widths=(1, 2)
    ),
    "told, replays": lambda _: tiny.driver(
        **SWAP | TOLD, logprobs_mode="processed_logprobs", enable_trace_replay=True
    ),
    "512 tokens, drafts": lambda _: _of_vocabulary(
        512, **TIGHT | BY_NGRAMS | EIGHT_ROWS, decode_widths=(2,), logprobs_mode="processed_logprobs"
    ),
    "2003 tokens": lambda _: _of_vocabulary(2003, **TIGHT | EIGHT_ROWS, decode_widths=(2,)),
    "49152 tokens": lambda _: _of_vocabulary(49_152, **TIGHT | EIGHT_ROWS, decode_widths=(2,)),
    "groups, drafts": lambda _: tiny.driver(**SWAP | BY_NGRAMS, data_parallel_size=2),
    "groups, adapters, drafts by a head": lambda folder: tiny_lora.driver(
        folder, tiny_head.draft(), **TIGHT | tiny_head.BY_HEAD, data_parallel_size=2
    ),
    "groups, two kinds of layers, suffixes": lambda _: _of_kinds(
        FULL, WINDOW, **SWAP | TWO_KINDS | BY_SUFFIXES, data_parallel_size=2
    ),
    "groups": lambda _: tiny.driver(**TIGHT, data_parallel_size=2),
    "swapping groups": lambda _: tiny.driver(**SWAP, data_parallel_size=2),
    "four devices, drafts": lambda _: _on_devices(4, FULL, FULL, **SWAP | BY_NGRAMS),
    "two devices, two kinds of layers": lambda _: _on_devices(
        2, FULL, WINDOW, **TIGHT | {"num_blocks": 1 + 27}
    ),
}
# Settings whose requests another engine answers alone.
ALONE: dict[str, Callable[[Path], Driver]] = {
    "four devices, drafts": lambda _: _on_devices(1, FULL, FULL, **SWAP),
    "two devices, two kinds of layers": lambda _: _on_devices(
        4, FULL, WINDOW, **TIGHT | {"num_blocks": 1 + 27}
    ),
}
NUM_DEVICES = {
    name: 2 for name in SETTINGS if any(word in name for word in ("groups", "replicas", "two devices"))
}
NUM_DEVICES |= dict.fromkeys(ALONE, 4)
