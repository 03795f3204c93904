"""Whole engines under random workloads, in which everything meets everything: each answer must be that of the
request alone in the same engine, to the last bit.

    python -m tests.engine.fuzz --seconds 1200                    all settings in turns, seeds from 0 on
    python -m tests.engine.fuzz --setting adapters --seed 17      one workload

Settings of groups and replicas need two devices: set JAX_NUM_CPU_DEVICES=2. A workload follows from its
setting and seed alone; `test_fuzz.py` runs a few.
"""

import argparse
import dataclasses
import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta, Request
from jaxpaged.grammar import recursive
from jaxpaged.handover.blocks import Blocks
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.models.config import LayerKind
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.status import Status
from jaxpaged.step.state import MAX_STEPS, FinishReason
from jaxpaged.tiers.rule import Rule
from tests import tiny, tiny_grammars, tiny_head, tiny_lora, tiny_recursive

NUM_ASKS = 40  # different ones a setting; each is answered alone once
PRIORITY = {"scheduling_policy": "priority"}
TIGHT = tiny.SMALL | PRIORITY
SWAP = tiny.SWAP | PRIORITY


def _quantised(**options: Any) -> Driver:
    return tiny.driver(tiny.load_quantised, **options)


def _with_tiers() -> Driver:
    """Create an engine with room for 30 blocks in host memory, which fetches whatever it can."""
    driver = tiny.driver(**SWAP, kv_offloading_size=30 * 2048 / 2**30)
    driver.offloading.rule = Always()
    return driver


class Always(Rule):
    """Rule that always fetches, and waits for long."""

    def wait(self, compute_seconds: float | None) -> float:
        return 60.0

    def pays(self, compute_seconds: float | None, num_bytes: int, bytes_below: int) -> bool:
        return True


def _of_kinds(*kinds: LayerKind, **options: Any) -> Driver:
    """Create an engine whose layers are of these kinds in turn, so that each kind has blocks of its own."""
    config = tiny.mixed(*kinds, num_layers=len(kinds))
    return tiny.driver(functools.partial(tiny.load, config=config), config, **options)


# A model of other sizes, whose drafts are hardly ever right.
_OTHER = dataclasses.replace(
    tiny.CONFIG, hidden_size=16, num_q_heads=2, num_kv_heads=1, layers=tiny.CONFIG.layers[:1]
)
ANOTHER = Draft(_OTHER, functools.partial(tiny.load, config=_OTHER), cost=tiny.CHEAP)
ITSELF = Draft(tiny.CONFIG, tiny.load, cost=tiny.CHEAP)
BY_MODEL: dict[str, Any] = {
    "speculative_config": {"model": "tiny", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
}
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
    "swap, drafts": lambda _: tiny.driver(**SWAP, speculative_config={"prompt_lookup_min": 1}),
    "swap, suffixes": lambda _: tiny.driver(**SWAP, speculative_config={"method": "suffix"}),
    "swap, drafts by itself": lambda _: tiny.driver(**SWAP, **BY_MODEL, draft=ITSELF),
    "swap, drafts by another": lambda _: tiny.driver(**SWAP, **BY_MODEL, draft=ANOTHER),
    "swap, drafts by a head": lambda _: tiny_head.driver(**SWAP),
    "swap, tiers": lambda _: _with_tiers(),
    "quantised": lambda _: _quantised(**TIGHT),
    "int8 cache, swap": lambda _: tiny.driver(**SWAP, kv_cache_dtype="int8"),
    "fp8 cache, quantised": lambda _: _quantised(**TIGHT, kv_cache_dtype="fp8"),
    "no prefix cache": lambda _: tiny.driver(**TIGHT, enable_prefix_caching=False),
    "two kinds of layers, swap": lambda _: _of_kinds(FULL, WINDOW, **SWAP | {"num_blocks": 1 + 23}),
    "three kinds of layers": lambda _: _of_kinds(
        FULL, WINDOW, CHUNK, **TIGHT | {"num_blocks": 1 + 34, "max_num_batched_tokens": 4 + 32}
    ),
    "two kinds of layers, int8 cache, s3fifo": lambda _: _of_kinds(
        CHUNK,
        WINDOW,
        **TIGHT | {"num_blocks": 1 + 21, "max_num_batched_tokens": 4 + 32},
        kv_cache_dtype="int8",
        eviction_policy="s3fifo",
    ),
    "two kinds of layers, replicas": lambda _: _of_kinds(
        FULL, WINDOW, **SWAP | {"num_blocks": 1 + 23, "data_parallel_size": 2}
    ),
    "groups": lambda _: tiny.driver(**TIGHT, data_parallel_size=2),
    "swapping groups": lambda _: tiny.driver(**SWAP, data_parallel_size=2),
}
NUM_DEVICES = {"groups": 2, "swapping groups": 2, "two kinds of layers, replicas": 2}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt with what is wanted of it."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    salt: str | None
    seed: int | None  # of its adapter

    def requests(self, driver: Driver, folder: Path, priority: int = 0) -> list[Request]:
        options: dict[str, Any] = {"cache_salt": self.salt}
        if self.seed is not None:
            options["lora_request"] = tiny_lora.request(folder, self.seed)
        if isinstance(self.params, BeamSearchParams):
            return tiny.numbered(driver.door.admit_search(list(self.prompt), self.params, **options))
        return tiny.numbered(driver.door.admit(list(self.prompt), self.params, priority=priority, **options))


def random_ask(rng: random.Random, seeds: Sequence[int], *, has_grammars: bool = False) -> Ask:
    """Draw a request whose prompt may begin as others' do."""
    [shared] = tiny.prompts([rng.choice([0, 8, 24, 40])], seed=rng.randrange(2))
    own = [rng.randrange(tiny.CONFIG.vocab_size) for _ in range(rng.choice([1, 2, 7, 8, 20, 33]))]
    seed = rng.choice([None, *seeds]) if seeds else None
    salt = rng.choice([None, None, None, "x"])
    params: SamplingParams | BeamSearchParams
    grammar: dict[str, Any] = {}
    if has_grammars and rng.random() < 0.5:
        automaton, opens = tiny_grammars.asking(rng.randrange(6)), rng.choice([None, None, 7])
        followed = tiny_recursive.asking(rng.choice([*tiny_recursive.CASES]), after_token_id=opens)
        grammar = rng.choice([automaton, followed])
    if rng.random() < 0.12:
        params = BeamSearchParams(
            beam_width=rng.choice([1, 2, 3]),
            max_tokens=rng.randint(1, 10),
            ignore_eos=rng.random() < 0.5,
            length_penalty=rng.choice([0.0, 1.0, -0.5]),
            **grammar,
        )
        return Ask((*shared, *own), params, salt, seed)

    def some(chance: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < chance else {}

    temperature = rng.choice([0, 0, 0.8, 1.5])
    tokens = rng.sample(range(tiny.CONFIG.vocab_size), 30)
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 9, 20, 45]),
        temperature=temperature,
        seed=rng.randrange(2**32),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice([1, 1, 2, 4]) if temperature else 1,
        **some(0.2, top_k=7, top_p=0.9),
        **some(0.2, min_p=0.05),
        **some(0.25, presence_penalty=0.7, repetition_penalty=1.3),
        **some(0.15, frequency_penalty=-0.4),
        **some(0.3, stop_token_ids=tokens[:3]),
        **some(0.15, min_tokens=1),
        **some(0.15, logit_bias=dict.fromkeys(tokens[3:6], 2.5)),
        **some(0.1, allowed_token_ids=tokens[6:]),
        **some(0.4, logprobs=rng.randrange(4)),
        **some(0.2, prompt_logprobs=rng.randrange(3)),
        **grammar,
    )
    return Ask((*shared, *own), params, salt, seed)


class Dice:
    """Random limits of a run, in place of `engine.run_length.RunLengthController`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @property
    def max_steps(self) -> int:
        return self._rng.choice([1, 1, 2, 3, 5, 9, MAX_STEPS])

    max_steps_while_others_wait = max_steps_while_nobody_reads = max_steps
    seconds_per_pass = None  # was never measured

    @property
    def max_passes(self) -> int:
        return self._rng.choice([1, 2, 5, 1000])

    def note(self, *_: object) -> None:
        pass


class Fuzz:
    """One engine of a setting, and what each of its asks is answered alone.

    asks_of: a setting whose asks it has; None: its own.
    """

    def __init__(self, setting: str, folder: Path, asks_of: str | None = None) -> None:
        self.setting, self._folder = setting, folder
        self.driver = driver = SETTINGS[setting](folder)
        has_grammars = driver.config.arena_words > 0 and recursive.is_installed()
        if has_grammars:
            tiny_recursive.with_languages(driver)
        ends = (tiny_recursive.END,) if has_grammars else ()
        model_config = dataclasses.replace(driver.door.model_config, eos_token_ids=(*ends, 5, 11, 40, 41))
        driver.door = dataclasses.replace(driver.door, model_config=model_config)
        rng = random.Random(asks_of or setting)
        seeds = range(1 + driver.config.max_loras) if driver.config.enable_lora else ()
        self._asks: list[Ask] = []
        self._alone: list[list[Delta] | None] = [None] * NUM_ASKS
        self._exported: Blocks | None = None
        while len(self._asks) < NUM_ASKS:
            ask = random_ask(rng, seeds, has_grammars=has_grammars)
            try:
                ask.requests(driver, folder)
            except InputError:  # more beams than rows, or blocks, or room for masks
                continue
            self._asks.append(ask)

    def alone(self, number: int) -> list[Delta]:
        """Return the answer to the request of this number when nothing else runs."""
        found = self._alone[number]
        if found is None:
            requests = self._asks[number].requests(self.driver, self._folder)
            for request in requests:
                self.driver.add(request)
            answers = tiny.drain(self.driver)
            found = self._alone[number] = [_bare(answers[request.request_id]) for request in requests]
        return found

    def run(self, seed: int) -> tuple[int, int]:
        """Run one workload and compare; how many answers were whole, and how many given up."""
        driver, rng = self.driver, random.Random(f"{self.setting} {seed}")
        numbers = [rng.randrange(NUM_ASKS) for _ in range(rng.choice([5, 12, 25]))]
        wanted = [self.alone(number) for number in numbers]
        if rng.random() < 0.5:
            assert driver.reset_prefix_cache()
            self._adopt(rng)
        pace, driver.run_length = driver.run_length, Dice(rng)  # type: ignore[assignment]
        try:
            asked, deltas = self._work(rng, numbers)
        finally:
            driver.run_length = pace
        counts = [0, 0]
        for number, requests, its in zip(numbers, asked, wanted, strict=True):
            for request, want in zip(requests, its, strict=True):
                got = _bare(collect(deltas[request.request_id]))
                gave_up = got.finish_reason is FinishReason.ABORT
                counts[gave_up] += 1
                if gave_up and request.beams is None:  # a beam's row holds now this, now that
                    want = dataclasses.replace(got, token_ids=want.token_ids[: len(got.token_ids)])
                elif gave_up:
                    want = got
                assert got == want, (self._asks[number], request.request_id, got, want)
        self._assert_nothing_is_held()
        return counts[0], counts[1]

    def _work(
        self, rng: random.Random, numbers: Sequence[int]
    ) -> tuple[list[list[Request]], dict[int, list[Delta]]]:
        """Let requests come, go, give way and be taken back, at random moments."""
        driver, asked, deltas = self.driver, [], {}
        coming = [*numbers]
        busy = rng.choice([0.1, 0.5, 1.0])

        def told(more: Sequence[Delta]) -> None:
            for delta in more:
                deltas.setdefault(delta.request_id, []).append(delta)

        while coming or driver.has_work:
            while coming and (rng.random() < busy or not driver.has_work):
                ask = self._asks[coming.pop(0)]
                asked.append(ask.requests(driver, self._folder, rng.choice([0, 0, 1, -1])))
                for request in asked[-1]:
                    driver.add(request)
            if rng.random() < 0.08:
                told(driver.abort([request.request_id for request in self._some_of(rng, asked)]))
            if rng.random() < 0.08:  # as for more urgent ones, who then could not have the rows
                rows = [row for _, row in driver.rows.waiting()]
                rows += [row for row, place in driver.rows.taken() if _may_be_recalled(place)]
                driver.recall(rng.sample(sorted({*rows}), min(len({*rows}), rng.randint(1, 3))))
            if rng.random() < 0.03:
                self._adopt(rng)
            told(driver.turn())
        return asked, deltas

    def _adopt(self, rng: random.Random) -> None:
        """Export what can be found of a prompt, and adopt what was exported before."""
        if self.driver.config.data_parallel_size > 1 or not self.driver.config.enable_prefix_caching:
            return
        ask = rng.choice(self._asks)
        if self._exported is not None and self._exported.num_blocks:
            self.driver.exchange.adopt_blocks(self._exported)
        self._exported = self.driver.exchange.export_blocks(np.array(ask.prompt, np.int32), ask.salt)

    def _some_of(self, rng: random.Random, asked: Sequence[list[Request]]) -> list[Request]:
        """Choose one request, or all of a prompt: a beam search ends whole."""
        if not asked:
            return []
        requests = rng.choice(asked)
        whole = requests[0].beams is not None or rng.random() < 0.5
        return requests if whole else [rng.choice(requests)]

    def _assert_nothing_is_held(self) -> None:
        driver = self.driver
        if driver.config.data_parallel_size == 1:
            tiny.assert_nothing_is_held(driver)
            return
        assert not any(driver.rows.taken())
        assert np.all(np.asarray(driver.state.status) == Status.OK)
        for group in range(driver.config.data_parallel_size):
            tables = jax.tree.map(lambda x, group=group: np.asarray(x)[group], driver.state.tables)
            check_invariants(tables)
            assert not np.any(tables.seq_lens)
        assert driver.stats.num_free_blocks == driver.stats.num_blocks


def _may_be_recalled(place: Any) -> bool:
    return not place.is_aborted and place.request.beams is None


def _bare(answer: Delta) -> Delta:
    """Return the part of an answer that must be the same in any company."""
    return dataclasses.replace(answer, request_id=0, num_hit_tokens=0, num_fetched_tokens=None)


def settings(devices: int) -> Iterator[str]:
    return (name for name in SETTINGS if NUM_DEVICES.get(name, 1) <= devices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0, help="for so long; without it one workload each")
    parser.add_argument("--setting", choices=SETTINGS, help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    args = parser.parse_args()
    names = [args.setting] if args.setting else list(settings(jax.device_count()))
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        fuzzes = {}
        for seed in itertools.count(args.seed):
            for name in names:
                if name not in fuzzes:
                    fuzzes[name] = Fuzz(name, Path(folder))
                try:
                    whole, given_up = fuzzes[name].run(seed)
                except BaseException:
                    print(f"failed: --setting {name!r} --seed {seed}", flush=True)
                    raise
                print(f"{name}, seed {seed}: {whole} answers, {given_up} given up", flush=True)
            if time.monotonic() >= end:
                return


if __name__ == "__main__":
    main()
