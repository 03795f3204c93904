"""Llama small enough to compute without a cache in NumPy, and engines over it."""

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta, Request
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.models.config import LayerKind, ModelConfig, uniform
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.checkpoints import Tensors
from jaxpaged.models.quantised.codes import FLOAT8
from jaxpaged.models.quantised.on_load import OnLoad
from jaxpaged.models.ropes import Rope
from jaxpaged.models.weights import StoredWeights, by_role, random_weights
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.status import Status
from jaxpaged.step.config import DraftCost
from jaxpaged.step.state import EngineState
from reference import model as reference_model
from reference import sampler as reference_sampler

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=float(np.float32(1e-5)),  # as a GGUF file has it, so that engines of one have the same program
    layers=uniform(2, rope=Rope(theta=10000.0, dim=8)),
    max_model_len=128,
    tie_word_embeddings=True,
)

# A model that drafts is small, as a rule; here it is as large as the served one, and would not pay.
CHEAP = DraftCost(row=1, passes=1, tile=1)

# Few and small shapes, for quick compiling.
DEFAULTS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "block_size": 8,
    "num_blocks": 1 + 4 * 16,
    "max_num_batched_tokens": 4 + 128,
}
_request_ids = itertools.count(1)


@functools.cache
def weights(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    return random_weights(config, NAMES, seed)


@functools.cache
def reference_weights() -> dict[str, np.ndarray]:
    """Return the weights by their roles, as the oracle takes them."""
    return by_role(CONFIG, NAMES, weights())


@functools.cache
def reference_answer(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return the oracle's greedy answer."""
    return reference_model.generate(CONFIG, reference_weights(), list(prompt), max_tokens)


def reference_greedy(
    prompt: list[int],
    params: SamplingParams,
    automaton: reference_sampler.TokenAutomaton | None = None,
) -> list[int]:
    """Return the oracle's greedy answer under every option that changes logits, with no end token but the
    automaton's.
    """
    same = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
    rules = {name: getattr(params, name) for name in (*same, "allowed_token_ids", "stop_token_ids")}
    ends = () if automaton is None else automaton.end_tokens
    rules |= {"automaton": automaton, "stop_token_ids": (*(params.stop_token_ids or ()), *ends)}
    answer: list[int] = []
    while len(answer) < (params.max_tokens or CONFIG.max_model_len - len(prompt)):
        logits = reference_sampler.edited(reference_logits((*prompt, *answer))[-1], prompt, answer, **rules)
        answer.append(reference_sampler.first_likeliest(logits))
        if answer[-1] in rules["stop_token_ids"]:
            break
    return answer


def reference_logits(token_ids: tuple[int, ...]) -> np.ndarray:
    """Return the oracle's logits after each token: [num_tokens, vocab_size]."""
    return reference_model.logits(CONFIG, reference_weights(), list(token_ids))


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]


# A pool in which four rows begin together and cannot all grow: someone must give way.
SMALL = {"num_blocks": 1 + 16, "block_size": 8}
# Such a pool, and one on the host; steps of one tile, a length that is no multiple of anything, and room for
# structured outputs.
SWAP = SMALL | {
    "preemption_mode": "swap",
    "num_host_blocks": 12,
    "max_num_batched_tokens": 4 + 32,
    "max_model_len": 100,
    "structured_outputs_mib": 1,
}


@functools.cache
def quantised_weights() -> Tensors:
    """Return the model's weights as a file of compressed-tensors has them, each role in another form.

    They are in 4 bits with zero points and an order of inputs, in fp8 with a scale for each output, in bytes
    with zero points, and in 4 bits without.
    """
    rng = np.random.default_rng(0)
    tensors = dict(weights())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        num_outputs, num_inputs = tensors.pop(name).shape
        stem, scale = name.removesuffix(".weight"), np.float32(num_inputs**-0.5)

        def words(*shape: int) -> np.ndarray:
            return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

        if "q_proj" in stem or "k_proj" in stem or "v_proj" in stem:
            its = {
                "weight_packed": words(num_outputs, num_inputs // 8),
                "weight_scale": scale / 6 + np.zeros((num_outputs, 2), np.float16),
                "weight_zero_point": words(num_outputs // 8, 2),
                "weight_g_idx": rng.permutation(np.arange(num_inputs) % 2).astype(np.int32),
            }
        elif "o_proj" in stem:
            noise = rng.standard_normal((num_outputs, num_inputs), np.float32)
            its = {
                "weight": (100 * noise).astype(FLOAT8),
                "weight_scale": scale / 100 * rng.uniform(0.5, 1.5, (num_outputs, 1)).astype(np.float32),
            }
        elif "down_proj" in stem:
            its = {
                "weight_packed": words(num_outputs, num_inputs // 8),
                "weight_scale": scale / 5 + np.zeros((num_outputs, 3), np.float16),
            }
        else:
            its = {
                "weight": rng.integers(-128, 128, (num_outputs, num_inputs)).astype(np.int8),
                "weight_scale": scale / 70 + np.zeros((num_outputs, 1), np.float32),
                "weight_zero_point": rng.integers(-9, 9, (num_outputs, 1)).astype(np.int8),
            }
        tensors |= {f"{stem}.{ending}": tensor for ending, tensor in its.items()}
    groups = {"group_0": {"weights": {"num_bits": 4}}}
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return Tensors(tensors, said, CONFIG, NAMES)


def load_quantised(load_as: LoadAs) -> Decoder:
    tensors = quantised_weights()
    return Decoder(StoredWeights(CONFIG, NAMES, tensors, load_as, tensors.quantisation()))


def load(load_as: LoadAs, config: ModelConfig = CONFIG) -> Decoder:
    """Load the tiny model, or one that differs in layers."""
    quantisation = OnLoad(load_as.quantization) if load_as.quantization else None
    its = weights() if len(config.layers) == len(CONFIG.layers) else weights(config)
    return Decoder(StoredWeights(config, NAMES, its, load_as, quantisation))


def with_window(sliding_window: int | None) -> ModelConfig:
    layers = [dataclasses.replace(layer, sliding_window=sliding_window) for layer in CONFIG.layers]
    return dataclasses.replace(CONFIG, layers=tuple(layers))


def mixed(*kinds: LayerKind, num_layers: int = len(CONFIG.layers)) -> ModelConfig:
    """Return the tiny model with these bounds of attention, layer by layer in turn."""
    bounds = itertools.cycle((kind.sliding_window, kind.attention_chunk) for kind in kinds)
    layers = [
        dataclasses.replace(layer, sliding_window=window, attention_chunk=chunk)
        for layer, (window, chunk) in zip(
            uniform(num_layers, rope=CONFIG.layers[0].rope), bounds, strict=False
        )
    ]
    return dataclasses.replace(CONFIG, layers=tuple(layers))


def driver(
    load_model: Callable[[LoadAs], Decoder] = load,
    model_config: ModelConfig = CONFIG,
    *,
    draft: Draft | None = None,
    **options: Any,
) -> Driver:
    """Create a float32 driver over the tiny model, or another; options are those of `EngineConfig`.

    Drivers of the same sizes share one compiled loop: leave the defaults where a test does not care.
    """
    config = EngineConfig(**DEFAULTS | options)
    return Driver(config, model_config, load_model, adapter_names=NAMES, draft=draft)


def engine(model_config: ModelConfig = CONFIG, **options: Any) -> Engine:
    """Create an engine with a thread over the tiny model. The caller closes it."""
    return Engine(EngineConfig(**DEFAULTS | options), model_config, load, adapter_names=NAMES)


def replace(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Set a function in place of one of ours, as if it were ours: so kept programs are still used."""
    function.__module__ = owner.__module__ if isinstance(owner, type) else owner.__name__
    monkeypatch.setattr(owner, name, function)


def assert_nothing_is_held(driver: Driver) -> None:
    state = driver.state
    check_invariants(state.tables)
    assert int(state.status) == Status.OK
    assert not np.any(state.tables.seq_lens)
    assert int(state.tables.pool.num_free_in_all) == driver.stats.num_free_blocks == driver.stats.num_blocks
    if state.host is not None:
        check_invariants(state.host.tables)
        assert not np.any(state.host.tables.seq_lens)


def driver_of(engine: Engine) -> Driver:
    """Return the engine's driver, for tests that look into it or break it."""
    return engine._driver


def thread_of(engine: Engine) -> threading.Thread:
    """Return the engine's thread, which outlives a forgotten engine by its last turn."""
    return engine._worker._thread


def set_state(driver: Driver, state: EngineState) -> None:
    """Put a state in the place of the driver's."""
    driver.device._state = state


class Brake:
    """Limit on an engine: one step a turn, and as many turns as the test allows. So nothing races."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = threading.Semaphore(0)
        self._is_off = False
        driver = driver_of(engine)
        turn = driver.turn

        def slow_turn(max_steps: int = 1) -> list[Delta]:
            while max_steps and not (self._is_off or engine.stopped or self._turns.acquire(timeout=0.01)):
                pass
            return turn(max_steps=max_steps)

        monkeypatch.setattr(driver, "turn", slow_turn)

    def allow(self, turns: int) -> None:
        """Allow more turns. The tokens of a turn's step are delivered in the turn after it."""
        self._turns.release(turns)

    def off(self) -> None:
        self._is_off = True


def start[**P, T](call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call it in a thread that, should it hang, does not keep the program from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread does; a test that may hang sets itself a limit."""
    while not is_so():
        time.sleep(0.001)


def request(
    driver: Driver, request_id: int, prompt: list[int], params: SamplingParams, **options: Any
) -> Request:
    """Create a request with a number, through the door."""
    [request] = driver.door.admit(prompt, params, **options)
    return dataclasses.replace(request, request_id=request_id)


def numbered(requests: list[Request]) -> list[Request]:
    """Give requests the next numbers."""
    return [dataclasses.replace(request, request_id=next(_request_ids)) for request in requests]


def submit(
    driver: Driver, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[int]:
    """Queue the prompts, and return their request ids."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [next(_request_ids) for _ in prompts]
    for request_id, prompt, its in zip(ids, prompts, each, strict=True):
        driver.add(request(driver, request_id, prompt, its))
    return ids


def add(
    driver: Driver,
    first_id: int,
    prompts: list[list[int]],
    params: list[SamplingParams],
    priority: int = 0,
) -> list[Request]:
    """Queue all answers to the prompts with ids from `first_id` on, and return their requests."""
    made = [
        each
        for prompt, its in zip(prompts, params, strict=True)
        for each in driver.door.admit(prompt, its, priority=priority)
    ]
    requests = [dataclasses.replace(each, request_id=first_id + i) for i, each in enumerate(made)]
    for each in requests:
        driver.add(each)
    return requests


def generate(
    driver: Driver, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Return the answers' token ids, in the prompts' order."""
    ids = submit(driver, prompts, params)
    answers = drain(driver)
    return [answers[i].token_ids for i in ids]


def drain(driver: Driver, max_steps: int | None = None) -> dict[int, Delta]:
    """Run until there is nothing left to do, `max_steps` at a time, and return the answers by request."""
    deltas: dict[int, list[Delta]] = {}
    while driver.has_work:
        for delta in driver.turn(max_steps):
            deltas.setdefault(delta.request_id, []).append(delta)
    return {request_id: collect(its) for request_id, its in deltas.items()}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)
