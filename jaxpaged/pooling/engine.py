"""The engine of a pooling model: texts through the decoder in waves, as many as its cache holds at a time."""

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check, checked_int, is_int, shown
from jaxpaged.config import PREFILL_TILE, EngineConfig
from jaxpaged.engine import capacity
from jaxpaged.engine.setup import Setup
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.loading import Checkpoint
from jaxpaged.pooling import loop
from jaxpaged.pooling.head import Head, body
from jaxpaged.pooling.outputs import PoolingParams

ROW_TOKENS = 512  # of each row that may run, there is room in the cache, besides for one text of full length
# Options of engines that answer, which change what is computed and are not served here.
UNSERVED = {
    "tensor_parallel_size": 1, "data_parallel_size": 1, "num_processes": 1, "enable_lora": False,
    "calculate_kv_scales": False, "sampler": None, "layer_kind": None, "kv_offloading_size": None,
    "kv_events_config": None, "logits_processors": None,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Text:
    """One checked text: its token ids and its pooling options."""

    token_ids: np.ndarray  # int32
    params: PoolingParams
    wants_tokens: str | None = None  # "hidden" or "classes" of each token, in place of one vector


class PoolingEngine:
    """A model, its cache, and its head. Any thread may call; they take turns, a wave at a time.

    A text is computed in tiles of `PREFILL_TILE` tokens, in passes of a fixed number of tiles: so its numbers
    have the same bits whatever else is asked for with it.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, head: Head) -> None:
        for name, value in UNSERVED.items():
            given = getattr(config, name)
            check(name, given, f"{value!r} with runner='pooling'", given == value)
        checkpoint = body(checkpoint)
        self.config, self.model_config, self.head = config, checkpoint.config, head
        self.tokenizer = checkpoint.tokenizer
        # A text is computed once and forgotten: one table for all layers, which frees nothing on the way.
        setup = Setup(replace(config, disable_hybrid_kv_cache_manager=True), checkpoint.config)
        self.max_model_len, self._implementation = setup.max_model_len, setup.attention
        logging.info("attention: %s (%s)", setup.attention, setup.attention_reason)
        model = checkpoint.model(setup.load_as())
        self.num_blocks = _num_blocks(setup)
        self._cache: KVCache = model.create_cache(self.num_blocks, config.block_size, setup.layout)
        model.lm_head = None  # nobody asks for logits
        self._graphdef, self._params = nnx.split(model)
        self._num_tiles = setup.tiles_per_pass
        self._lock = threading.Lock()

    def admit(self, token_ids: Any, params: PoolingParams, *, wants_tokens: str | None = None) -> Text:
        """Check a text. Raises `InputError`."""
        check("pooling_params", params, "a PoolingParams", isinstance(params, PoolingParams))
        ids = np.asarray(token_ids)
        is_list = ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
        if not is_list or not all(is_int(token) for token in (token_ids[0], token_ids[-1])):
            raise InputError(f"prompt={shown(token_ids)} must be a list of token ids that is not empty")
        rule = f"a token id, an int in [0, {self.model_config.vocab_size})"
        for token in (int(ids.min()), int(ids.max())):
            checked_int("prompt token", token, rule, 0, self.model_config.vocab_size - 1)
        if (last := params.truncate_prompt_tokens) is not None:
            max_len_rule = f"at most max_model_len={self.max_model_len}"
            check("truncate_prompt_tokens", last, max_len_rule, last <= self.max_model_len)
            ids = ids[-(self.max_model_len if last < 0 else last) :]
        if len(ids) > self.max_model_len:
            raise InputError(
                f"the prompt has {len(ids)} tokens, must have at most max_model_len={self.max_model_len}; "
                "truncate_prompt_tokens would cut it"
            )
        self._check_dimensions(params.dimensions)
        return Text(ids.astype(np.int32), params, wants_tokens)

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        sizes, hidden = self.head.dimensions, self.model_config.hidden_size
        rule = (
            f"None or at most {hidden}"
            if sizes is None
            else f"None or one of {[*sizes, hidden]}, that it is for"
        )
        ok = dimensions == hidden or (dimensions < hidden if sizes is None else dimensions in sizes)
        check("dimensions", dimensions, rule, ok)

    def run(self, texts: Sequence[Text]) -> Iterator[np.ndarray]:
        """Yield the result of each text in order, float32: a vector [dimensions], class scores [num_classes],
        or one of these for each token.
        """
        for wave in self.waves(texts):
            with self._lock:
                vectors = self._compute(wave)
            yield from map(self._finish, wave, vectors)

    def waves(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """Yield as many texts at a time as there are rows and blocks for."""
        wave: list[Text] = []
        num_free = self.num_blocks - 1
        for text in texts:
            need = cdiv(len(text.token_ids), self.config.block_size)
            if len(wave) == self.config.max_num_seqs or need > num_free:
                yield wave
                wave, num_free = [], self.num_blocks - 1
            wave.append(text)
            num_free -= need
        if wave:
            yield wave

    def _compute(self, wave: Sequence[Text]) -> list[np.ndarray]:
        """Return each text's sum of hidden states, or all of them where they are wanted."""
        num_rows, size = self.config.max_num_seqs, self.config.block_size
        tables = np.zeros((num_rows, cdiv(self.max_model_len, size)), np.int32)
        first_free = 1  # block 0 is the null block
        for row, text in enumerate(wave):
            need = cdiv(len(text.token_ids), size)
            tables[row, :need] = np.arange(first_free, first_free + need)
            first_free += need
        tiles = [
            (row, start)
            for row, text in enumerate(wave)
            for start in range(0, len(text.token_ids), PREFILL_TILE)
        ]
        wants_all = any(text.wants_tokens is not None for text in wave)
        sums: Any = jnp.zeros((num_rows, self.model_config.hidden_size), jnp.float32)
        hidden: list[list[np.ndarray]] = [[] for _ in wave]
        for begin in range(0, len(tiles), self._num_tiles):
            some = tiles[begin : begin + self._num_tiles]
            self._cache, sums, all_ = loop.add_pass(
                *(self._graphdef, self._params, self._cache, sums, self._pass(wave, some, tables)),
                implementation=self._implementation,
                wants_all=wants_all,
            )
            for (row, _), vector in zip(some, () if all_ is None else np.asarray(all_), strict=False):
                hidden[row].append(vector)
        vectors = np.asarray(jax.device_get(sums))
        return [
            vectors[row] if text.wants_tokens is None else np.concatenate(hidden[row])[: len(text.token_ids)]
            for row, text in enumerate(wave)
        ]

    def _pass(self, wave: Sequence[Text], some: Sequence[tuple[int, int]], tables: Any) -> loop.Tiles:
        """Return the arrays of one pass over these tiles, each a row and its first position."""
        shape = self._num_tiles, PREFILL_TILE
        token_ids: Any = np.zeros(shape, np.int32)
        weights: Any = np.zeros(shape, np.float32)
        tiles: Any = np.zeros((3, self._num_tiles), np.int32)
        rows, starts, ends = tiles
        for i, (row, start) in enumerate(some):
            ids = wave[row].token_ids
            rows[i], starts[i], ends[i] = row, start, min(start + PREFILL_TILE, len(ids))
            token_ids[i, : ends[i] - start] = ids[start : ends[i]]
            weights[i, : ends[i] - start] = self._weights(len(ids))[start : ends[i]]
        return loop.Tiles(
            token_ids=token_ids,
            weights=weights,
            rows=rows,
            starts=starts,
            ends=ends,
            block_tables=tables,
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019 - an engine lives as long as its process, or nearly so
    def _weights(self, num_tokens: int) -> np.ndarray:
        """Return how much each token's hidden state counts in a text's vector: float32 [num_tokens]."""
        weights = np.zeros(num_tokens, np.float32)
        if self.head.method == "MEAN":
            weights[:] = 1 / num_tokens
        else:
            weights[0 if self.head.method == "CLS" else -1] = 1
        return weights

    def _finish(self, text: Text, vector: np.ndarray) -> np.ndarray:
        """Return the head's output for a text's pooled vector, or for the hidden states of its tokens."""
        head, activates = self.head, text.params.use_activation
        if head.classifier is not None and text.wants_tokens != "hidden":
            logits = vector @ head.classifier.T
            return logits if activates is False else _chances(logits, head.activation)
        vector = vector[..., : text.params.dimensions]
        if head.normalise if activates is None else activates:
            vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
        return vector.astype(np.float32)


def _chances(logits: np.ndarray, activation: str) -> np.ndarray:
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if activation == "softmax":
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    return logits


def _num_blocks(setup: Setup) -> int:
    """Return the blocks of the cache: room for one text of full length, and for a few tokens of each row.

    Raises `InputError` if memory, or `num_blocks`, leaves no room for a text of full length.
    """
    config, max_model_len = setup.config, setup.max_model_len
    least = 1 + cdiv(max_model_len, config.block_size)
    max_blocks = capacity.cache_size(setup).num_blocks
    if max_blocks < least:
        room = (max_blocks - 1) * config.block_size
        raise InputError(
            f"max_model_len={max_model_len} must be at most {room}, the tokens that {max_blocks} blocks hold"
        )
    wanted = 1 + cdiv(config.max_num_seqs * ROW_TOKENS, config.block_size)
    return max_blocks if config.num_blocks is not None else min(max_blocks, max(least, wanted))
