"""Learner: an engine's model for a training loop."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.setup import Setup
from jaxpaged.lora import LoRARequest
from jaxpaged.models import lora
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.names import Names
from jaxpaged.research.learn import loop, plain
from jaxpaged.research.learn.loop import Adapter, Program


class Learner:
    """Log-probabilities of given tokens, differentiable by the model's weights.

    Their values have the bits of an engine of the same options, as `LLM.score` gives them: they are computed
    in its own tiles, passes and kernels. docs/guides/rollouts.md says where sampled tokens have the same
    ones. Their gradients are those of the same arithmetic in
    plain XLA, computed anew. Weights are a state as `LLM.weights` is.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, names: Names) -> None:
        """Make a learner for an engine's options. Raises `InputError` for what has no gradient."""
        setup = Setup(dataclasses.replace(config, disable_hybrid_kv_cache_manager=True), model_config)
        for name, value in (("tensor_parallel_size", 1), ("data_parallel_size", 1), ("quantization", None)):
            given = getattr(config, name)
            check(name, given, f"{value!r} for a learner", given == value)
        if setup.layout.shared(1):
            raise InputError(f"kv_layout={setup.layout} must have no scales of its own for a learner")
        check("layer_kind", config.layer_kind, "None for a learner", config.layer_kind is None)
        self._setup, self._names = setup, names
        self.max_model_len = setup.max_model_len
        self._programs: dict[bool, Program] = {}

    def log_probs(
        self, params: nnx.State, tokens: Any, lengths: Any, adapter: Adapter | None = None
    ) -> Float[Array, "batch length_minus_1"]:
        """Return the log-probability of each token behind the first, float32: 0 beyond a sequence's end.

        May be differentiated by `params` and `adapter`, inside `jax.jit` or outside.

        params: weights of the form of `LLM.weights`.
        tokens: [batch, length] int32, padded at their ends with any token id.
        lengths: [batch] int32, the tokens of each sequence; 0 for none.
        adapter: adapter that all sequences have, from `adapter`; None: the model alone.

        Raises `InputError` for other shapes.
        """
        tokens, lengths = jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or tokens.shape[0] == 0:
            raise InputError(
                f"tokens of shape {tokens.shape} with lengths of shape {lengths.shape} must be "
                "[batch, length] and [batch]"
            )
        rule = f"in [2, max_model_len={self.max_model_len}]"
        check("length", tokens.shape[1], rule, 2 <= tokens.shape[1] <= self.max_model_len)
        return loop.differentiable(self._program(adapter is not None), params, adapter, tokens, lengths)

    def adapter(self, path: str | os.PathLike[str]) -> Adapter:
        """Read an adapter from PEFT's files: by role, a and b of all layers, packed as the engine has them.

        Raises `InputError` if it is not for the model.
        """
        rank = self._setup.config.max_lora_rank
        request = LoRARequest("learner", 1, str(path))
        arrays = lora.read(request, self._setup.whole, self._names, rank, self._setup.dtype)
        return jax.tree.map(jnp.asarray, arrays)

    def _program(self, adapted: bool) -> Program:
        """Return the static arguments of the programs, with room for an adapter or without."""
        if adapted not in self._programs:
            self._programs[adapted] = self._made(adapted)
        return self._programs[adapted]

    def _made(self, adapted: bool) -> Program:
        setup = self._setup
        model = abstract(setup.whole, setup.load_as(), self._names)
        _check_form(model)
        twin = plain.twin(setup.whole, setup.load_as())
        shapes = tuple(nnx.to_flat_state(nnx.state(twin)))
        roles = []
        if adapted:
            for each in (model, twin):
                lora.make_room(each, self._names, 1, setup.config.max_lora_rank)
            adapter_params = nnx.to_flat_state(nnx.state(twin, AdapterParam))
            places = {path[-2]: path for path, _ in adapter_params}
            for role, room in lora.rooms(setup.whole, self._names).items():
                module = "up" if role == "gate_up" else role
                roles.append((role, places[module], room.widths))
        return Program(
            layout=setup.layout,
            implementation=setup.attention,
            block_size=setup.config.block_size,
            table_width=cdiv(setup.max_model_len, setup.config.block_size),
            tiles_per_pass=setup.tiles_per_pass,
            model=nnx.graphdef(model),
            plain=nnx.graphdef(twin),
            shapes=shapes,
            roles=tuple(roles),
        )


def _check_form(model: Decoder) -> None:
    """Refuse weights that are packed for a GPU, which the plain decoder cannot read."""
    if "mosaic_gpu" in (model.form.own, model.form.stacked):
        raise InputError("loops over packed weights must not be there for a learner on a GPU")


def padded(sequences: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences of token ids as `Learner.log_probs` takes them: padded tokens, and lengths."""
    lengths = np.array([len(each) for each in sequences], np.int32)
    tokens = np.zeros((len(sequences), max(2, int(lengths.max(initial=0)))), np.int32)
    for row, each in zip(tokens, sequences, strict=True):
        row[: len(each)] = each
    return tokens, lengths
