"""Length of a run before the host looks again, in steps and not in seconds."""

import dataclasses

import pytest

from jaxpaged.engine.run_length import SECONDS_PER_RUN, RunLengthController
from jaxpaged.step.config import MAX_STEPS
from tests import tiny

SECOND = SECONDS_PER_RUN  # of these tests: as long as a run should take


def test_what_was_never_measured_is_done_once_a_run():
    pace = RunLengthController()
    assert (pace.max_steps, pace.max_passes) == (1, 1)
    pace.note(8, 0, SECOND)
    assert (pace.max_steps, pace.max_passes) == (8, 1)


def test_steps_and_passes_over_prompts_are_reckoned_apart():
    pace = RunLengthController()
    pace.note(10, 0, SECOND)
    pace.note(1, 4, 8.1 * SECOND)  # a step of a long prompt
    assert (pace.max_steps, pace.max_passes) == (10, 1)
    assert pace.max_steps_while_others_wait == 2, "shorter, for those who wait for its end"
    assert pace.seconds_per_pass == pytest.approx(2 * SECOND)
    pace.note(1, 4, 0.88 * SECOND)  # passes that cost less than a run may
    assert (pace.max_steps, pace.max_passes) == (10, 5)
    pace.note(30, 1, 3.1 * SECOND)  # mostly steps: nothing is learnt of the pass
    assert (pace.max_steps, pace.max_passes) == (10, 5)
    pace.note(32, 0, 0)
    assert (pace.max_steps, pace.max_passes) == (MAX_STEPS, 5)
    pace.note(0, 0, 60 * SECOND)  # made no step
    assert (pace.max_steps, pace.max_passes) == (MAX_STEPS, 5)


@pytest.mark.parametrize("mixed", [(1, 4), (4, 2), (20, 20)])
def test_the_first_run_may_be_of_both_kinds_and_a_slow_one_is_forgotten(mixed):
    """Nothing is ever thought to take longer than all of a run that had it in it."""
    steps, passes = mixed
    pace = RunLengthController()
    pace.note(steps, passes, SECOND)
    assert pace.seconds_per_step <= SECOND / steps
    assert SECOND / passes / 2 <= pace.seconds_per_pass <= SECOND / passes
    pace.note(1, 0, 1000 * SECOND)  # the machine stood still
    pace.note(1, 1, 1000 * SECOND)
    pace.note(10, 0, 0.9 * SECOND)
    pace.note(1, 1, 0.28 * SECOND)
    assert (pace.max_steps, pace.max_passes) == (11, 5)


class Known(RunLengthController):
    def note(self, num_steps, num_passes, seconds):
        """Learn nothing."""


@pytest.mark.parametrize(
    ("seconds_per_pass", "runs"),
    [(None, [(1, 1)] * 3), (SECOND / 2, [(2, 2), (20, 1)]), (SECOND / 9, [(20, 3)])],
)
def test_a_run_ends_with_the_step_in_which_so_many_passes_are_made_over_prompts(seconds_per_pass, runs):
    """A prompt of three tiles, each a step's, comes while another request decodes, 20 steps a run."""
    driver = tiny.driver(**tiny.SWAP)
    driver.run_length = Known(SECOND / 20.5, seconds_per_pass)
    asked = [(tiny.prompts([3])[0], 70), (tiny.prompts([70], seed=1)[0], 2)]
    ids, made = [], []
    while driver.has_work or not ids:
        if len(ids) < 2 and driver.stats.num_new_tokens >= 20 * len(ids):
            prompt, max_tokens = asked[len(ids)]
            ids += tiny.submit(driver, [prompt], tiny.greedy(max_tokens))
        before = driver.stats
        driver.turn()
        after = driver.stats
        made.append((after.num_steps - before.num_steps, after.num_prompt_passes - before.num_prompt_passes))
    assert [run for run in made if run[1]][1:] == runs
    assert driver.stats.num_new_tokens == 72


@pytest.mark.parametrize(
    ("whole", "stop", "steps"),
    [((True, True), (), 17), ((True, False), (), 3), ((True, True), ("x",), 3)],
)
def test_runs_are_longer_while_nobody_looks_at_tokens_as_they_come(whole, stop, steps):
    """The host looks for a stop string in each token, so that few are computed behind one."""
    driver = tiny.driver(**tiny.SMALL)
    driver.run_length = Known(SECOND / 3.5, SECOND / 100)
    for prompt, is_whole in zip(tiny.prompts([3, 5]), whole, strict=True):
        [request] = tiny.numbered(driver.door.admit(prompt, tiny.greedy(40)))
        params = dataclasses.replace(request.params, stop=stop)
        driver.add(dataclasses.replace(request, params=params, is_read_whole=is_whole))
    made = []
    while driver.has_work:
        before = driver.stats.num_steps
        driver.turn()
        made.append(driver.stats.num_steps - before)
    assert max(made) == steps


def test_the_first_run_after_an_idle_time_is_measured_without_it(monkeypatch):
    """The first answer after a quiet hour would otherwise come in runs of one step."""
    driver = tiny.driver(**tiny.SMALL)
    tiny.generate(driver, [[1, 2]], tiny.greedy(90))
    assert driver.run_length.seconds_per_step < 60
    driver._last_read -= 3600
    noted = []
    monkeypatch.setattr(driver.run_length, "note", lambda *run: noted.append(run))
    tiny.submit(driver, [[3, 4]], tiny.greedy(9))
    tiny.drain(driver, max_steps=2)
    assert [run[:2] for run in noted] == [(2, 1), (2, 0), (2, 0), (2, 0), (1, 0)]
    assert all(0 < seconds < 60 for _, _, seconds in noted)
