"""Whole engines under random workloads, in which everything meets everything: each answer must be that of the
request alone in the same engine, to the last bit.

    python -m tests.engine.fuzz --seconds 1200                    all settings, each for its share of the time
    python -m tests.engine.fuzz --setting adapters --seed 17      one workload
    python -m tests.engine.fuzz --scores                          answers, too, beside prompts that have them

It ends with how many runs made requests give way to others: half of them must.

Settings of groups and replicas need two devices: set JAX_NUM_CPU_DEVICES=2. A workload follows from its
setting and seed alone; `test_fuzz.py` runs a few.
"""

import argparse
import dataclasses
import gc
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta, Request
from jaxpaged.grammar import recursive
from jaxpaged.handover.blocks import Blocks
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.models.changes import named
from jaxpaged.models.families.deepseek import names_of_halves
from jaxpaged.models.weights import random_weights
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.status import Status
from jaxpaged.step.channels import CANDIDATES
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.state import FinishReason
from tests import tiny, tiny_grammars, tiny_lora, tiny_recursive
from tests.engine.fuzz_settings import ALONE, NUM_DEVICES, SETTINGS
from tests.tiny_states import NAMES

NUM_ASKS = 40  # different ones a setting; each is answered alone once for each set of weights


class Tokenizer:
    """Tokenizer whose texts are the ids of tokens, for `bad_words`."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(number) for number in text.split()]


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


def random_ask(
    rng: random.Random, seeds: Sequence[int], vocab_size: int, *, has_grammars: bool = False
) -> Ask:
    """Draw a request whose prompt may begin as others' do."""
    [shared] = tiny.prompts([rng.choice([0, 8, 24, 40])], seed=rng.randrange(2))
    own = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 7, 8, 20, 33]))]
    seed = rng.choice([None, *seeds]) if seeds else None
    salt = rng.choice([None, None, None, "x"])
    params: SamplingParams | BeamSearchParams
    grammar: dict[str, Any] = {}
    if has_grammars and rng.random() < 0.5:
        automaton, opens = tiny_grammars.asking(rng.randrange(6)), rng.choice([None, None, 7])
        where = {"after_token_id": opens, "reasoning_token_id": opens and rng.choice([None, 95])}
        followed = tiny_recursive.asking(rng.choice([*tiny_recursive.CASES]), **where)
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
    tokens = rng.sample(range(vocab_size), 30)
    params = SamplingParams(
        max_tokens=rng.choice([1, 5, 9, 20, 45, 45]),
        temperature=temperature,
        seed=rng.randrange(2**32),
        ignore_eos=rng.random() < 0.7,
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
        **some(0.2, bad_words=[f"{tokens[7]}", f"{tokens[8]} {tokens[9]}"]),
        **grammar,
    )
    return Ask((*shared, *own), params, salt, seed)


def as_trainers_ask(rng: random.Random, ask: Ask, driver: Driver) -> Ask:
    """Return the request, or as often one that asks what only some engines tell: candidates, a replay."""
    config, vocab_size = driver.config, driver.door.model_config.vocab_size
    if isinstance(ask.params, BeamSearchParams) or rng.random() < 0.5:
        return ask
    changes: dict[str, Any] = {}
    if config.max_prompt_logprob_token_ids and rng.random() < 0.6:
        first, num = rng.randrange(len(ask.prompt)), rng.randint(1, 4)
        lines = len(ask.prompt) - 1 - first
        each = [[rng.randrange(vocab_size) for _ in range(num)] for _ in range(lines)]
        changes |= {"prompt_logprob_start": first, "prompt_logprob_token_ids": each} if lines else {}
    if config.enable_trace_replay and rng.random() < 0.5:
        changes["trace_decode_token_ids"] = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
    return dataclasses.replace(ask, params=dataclasses.replace(ask.params, **changes))


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

    asks_of: a setting whose asks it has; None: its own. Where that can be, it has now these weights, now
    those.
    """

    def __init__(self, setting: str, folder: Path, asks_of: str | None = None) -> None:
        self.setting, self._folder, self.scores = setting, folder, False
        self.driver = driver = SETTINGS[setting](folder)
        self._answering_alone = ALONE[setting](folder) if setting in ALONE else driver
        has_grammars = driver.config.arena_words > 0 and recursive.is_installed()
        if has_grammars:
            tiny_recursive.with_languages(driver)
        ends = (tiny_recursive.END,) if has_grammars else ()
        model_config = dataclasses.replace(driver.door.model_config, eos_token_ids=(*ends, 5, 11, 40, 41))
        driver.door = dataclasses.replace(driver.door, model_config=model_config, tokenizer=Tokenizer())
        self.num_runs = self.num_preempted = self.num_changes = 0
        self._weights, self._takes_weights = 0, "quantised" not in setting and setting not in ALONE
        rng = random.Random(asks_of or setting)
        seeds = range(1 + driver.config.max_loras) if driver.config.enable_lora else ()
        self._asks: list[Ask] = []
        self._alone: dict[tuple[int, int], list[Delta]] = {}
        self._exported: Blocks | None = None
        while len(self._asks) < NUM_ASKS:
            ask = random_ask(rng, seeds, model_config.vocab_size, has_grammars=has_grammars)
            try:
                ask = as_trainers_ask(rng, ask, driver)
                ask.requests(driver, folder)
            except InputError:  # more beams than rows, or blocks, or room for masks
                continue
            self._asks.append(ask)

    def alone(self, number: int) -> list[Delta]:
        """Return the answer to the request of this number when nothing else runs."""
        found = self._alone.get((number, self._weights))
        if found is None:
            driver = self._answering_alone
            driver.door = self.driver.door
            requests = self._asks[number].requests(driver, self._folder)
            for request in requests:
                driver.add(request)
            answers = tiny.drain(driver)
            found = self._alone[number, self._weights] = [
                _bare(answers[request.request_id]) for request in requests
            ]
            if self.scores:
                self._assert_scored(self._asks[number], found)
        return found

    def _assert_scored(self, ask: Ask, answers: Sequence[Delta]) -> None:
        """Check that prompts which have the answers are told the same log-probabilities of their tokens."""
        config, params = self.driver.config, ask.params
        if isinstance(params, BeamSearchParams) or config.logprobs_mode != "raw_logprobs":
            return
        if params.structured_outputs is not None:  # an answer's scores are of the tokens that its mask allows
            return
        for answer in answers:
            if params.logprobs is None or not answer.token_ids:
                continue
            tokens = [*ask.prompt, *answer.token_ids]
            if len(tokens) >= self.driver.door.max_model_len:
                continue
            scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
            [request] = dataclasses.replace(ask, prompt=tuple(tokens), params=scoring).requests(
                self.driver, self._folder
            )
            self.driver.add(request)
            scores = tiny.drain(self.driver)[request.request_id].prompt_scores[len(ask.prompt) :]
            assert [each.logprob for each in scores] == [each.logprob for each in answer.scores], ask

    def run(self, seed: int) -> tuple[int, int]:
        """Run one workload and compare; how many answers were whole, and how many given up."""
        driver, rng = self.driver, random.Random(f"{self.setting} {seed}")
        before = driver.stats.num_preemptions
        if self._takes_weights and rng.random() < 0.3:
            self._weights = 1 - self._weights
            self._update()
        numbers = [rng.randrange(NUM_ASKS) for _ in range(rng.choice([16, 25, 40]))]
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
                if not gave_up and CANDIDATES.name in want.channels:
                    np.testing.assert_array_equal(*(each.channels[CANDIDATES.name] for each in (got, want)))
        self._assert_nothing_is_held()
        self.num_runs += 1
        self.num_preempted += driver.stats.num_preemptions > before
        return counts[0], counts[1]

    def _update(self) -> list[Delta]:
        """Put in the weights of now, which may be the engine's already. Blocks of others are not for it."""
        self._exported = None
        whole = self.driver.setup.whole
        names = NAMES if whole.latent is None else names_of_halves(whole)
        weights = random_weights(whole, names, (0, 7)[self._weights])
        return self.driver.lifecycle.update_weights(self.driver.lifecycle.read_names(named(weights)))

    def _change(self, rng: random.Random) -> list[Delta]:
        """Give memory back and take it again, or put in the same weights, whatever is under way.

        No beam search may have rows then.
        """
        driver = self.driver
        if any(entry.request.beams is not None for _, entry in driver.rows.taken()):
            return []
        self.num_changes += 1
        match rng.choice(["sleep", "sleep deep", "release", "update"]):
            case "release":
                deltas = driver.lifecycle.release_kv_cache()
                driver.lifecycle.wake_up(["kv_cache"])
            case "update" if self._takes_weights:
                deltas = self._update()
            case "sleep deep" if self._takes_weights:
                deltas = driver.lifecycle.sleep(2)
                deltas += self._update()
                driver.lifecycle.wake_up(["kv_cache"])
            case _:
                deltas = driver.lifecycle.sleep(1)
                driver.lifecycle.wake_up(rng.sample(["weights", "kv_cache"], 2))
        return deltas

    def _work(
        self, rng: random.Random, numbers: Sequence[int]
    ) -> tuple[list[list[Request]], dict[int, list[Delta]]]:
        """Let requests come, go, give way and be taken back, at random moments."""
        driver, asked, deltas = self.driver, [], {}
        coming = [*numbers]
        busy = rng.choice([0.2, 0.6, 1.0])
        changes = rng.choice([0, 0, 0.03])

        def told(more: Sequence[Delta]) -> None:
            for delta in more:
                deltas.setdefault(delta.request_id, []).append(delta)

        while coming or driver.has_work:
            while coming and (rng.random() < busy or not driver.has_work):
                ask = self._asks[coming.pop(0)]
                asked.append(ask.requests(driver, self._folder, rng.choice([0, 0, 1, -1])))
                for request in asked[-1]:
                    driver.add(request)
            is_fetching = driver.offloading is not None and driver.offloading.is_fetching
            if rng.random() < changes or (changes and is_fetching and rng.random() < 0.3):
                told(self._change(rng))
            if rng.random() < (0.3 if changes and is_fetching else 0.08):
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
        for service in driver.services:
            service.finish()
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
    its = {"request_id": 0, "num_hit_tokens": 0, "num_fetched_tokens": None, "weight_versions": ()}
    return dataclasses.replace(answer, **its)


def settings(devices: int) -> Iterator[str]:
    return (name for name in SETTINGS if NUM_DEVICES.get(name, 1) <= devices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0, help="for so long; without it one workload each")
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="only this one, or these")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--scores", action="store_true", help="compare answers with prompts that have them")
    args = parser.parse_args()
    names = args.setting or list(settings(jax.device_count()))
    end = time.monotonic() + args.seconds
    runs, preempted, changes = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(names):
            its_folder = Path(folder) / str(i)
            its_folder.mkdir()
            fuzz, its_end = Fuzz(name, its_folder), time.monotonic()
            fuzz.scores = args.scores
            its_end += (end - its_end) / (len(names) - i)
            for seed in itertools.count(args.seed):
                try:
                    whole, given_up = fuzz.run(seed)
                except BaseException:
                    print(f"failed: --setting {name!r} --seed {seed}", flush=True)
                    raise
                print(f"{name}, seed {seed}: {whole} answers, {given_up} given up", flush=True)
                if time.monotonic() >= its_end:
                    break
            runs, preempted = runs + fuzz.num_runs, preempted + fuzz.num_preempted
            changes += fuzz.num_changes
            print(
                f"{runs} runs, {preempted} with preemptions, {changes} sleeps and updates in them", flush=True
            )
            # The programs of all settings have more mappings of memory than a process may have.
            del fuzz
            gc.collect()
            jax.clear_caches()
        assert runs < 20 or 2 * preempted >= runs, "requests must give way in half of the runs at least"


if __name__ == "__main__":
    main()
