"""Turns of constraints: by a model in plain Python, whoever comes when."""

import random

from jaxpaged.grammar.turns import LEVELS, Turn, Turns

QUANTUM = 0.01


class Case:
    """Constraints that take so many seconds each; a process that is given up begins again."""

    def __init__(self, asked):
        self.turns, self.now = Turns(), 0.0
        self.left = sorted(asked)  # when, client, seconds
        self.jobs, self.done = {}, {}

    def run(self):
        while self.left or len(self.turns):
            while self.left and (self.left[0][0] <= self.now or not len(self.turns)):
                when, client, seconds = self.left.pop(0)
                self.now = max(self.now, when)
                turn = Turn(set())
                self.jobs[turn] = when, client, seconds
                self.turns.add(turn, client)
            turn = self.turns.next()
            turn.has_process = True
            levels = [each.level for each in self.jobs if each.has_process]
            assert len(levels) == len({*levels}), "one process a level"
            when, client, seconds = self.jobs[turn]
            spent = min(QUANTUM, seconds - turn.seconds)
            self.now += spent
            is_done = turn.seconds + spent >= seconds - 1e-9
            if is_done:
                self.turns.leave(turn)
                del self.jobs[turn]
                self.done[when, client, seconds] = self.now - when
            else:
                self.turns.spend(turn, spent)
        return self.done


def test_a_small_one_never_waits_long_for_large_ones_of_others_or_of_its_client():
    large = [(i * 1e-3, "hostile", 5.0) for i in range(12)]
    for client in ("hostile", "other"):
        for when in (2.0, 7.3, 30.0):
            for seconds in (0.005, 0.04, 0.15):
                done = Case([*large, (when, client, seconds)]).run()
                took = done[when, client, seconds]
                # What has its process is let go on to the end of its level at most.
                its_own = (
                    2 * seconds + 4 * QUANTUM if seconds <= LEVELS[0] else 1.5 + (when < 7) * 12 * LEVELS[2]
                )
                assert took <= its_own, took
                if client == "other":
                    level = next(each for each in LEVELS if each >= seconds)
                    assert took <= 3 * seconds + 4 * QUANTUM + level, took


def test_clients_share_evenly_and_all_ends():
    rng = random.Random(0)
    for _ in range(20):
        asked = [(rng.random() * 3, rng.choice("abc"), rng.choice([0.01, 0.1, 0.5, 2.0])) for _ in range(25)]
        done = Case(asked).run()
        assert len(done) == len(asked)
        work = sum(seconds for _, _, seconds in asked)
        assert max(when + took for (when, _, _), took in done.items()) < 3 + 2.4 * work
    many, one = [(0.0, "a", 1.0 + i / 100) for i in range(20)], (0.0, "b", 1.0)
    done = Case([*many, one]).run()
    assert done[one] < sorted(done[each] for each in many)[3]


def test_a_client_who_leaves_is_asked_no_more_and_what_several_want_has_the_best_of_their_turns():
    turns, first, second = Turns(), Turn(set()), Turn(set())
    turns.add(first, "a")
    turns.add(second, "b")
    turns.spend(turns.next(), 1.0)
    assert turns.next() is second
    turns.add(first, "c")
    turns.spend(second, 0.5)
    assert turns.next() is first, "of a client that had nothing yet"
    turns.spend(first, 0.9)
    turns.leave(first, ["c"])
    assert turns.next() is second, "what others were charged for counts for them alone"
    turns.leave(second)
    assert turns.next() is first
    turns.leave(first, ["a"])
    assert turns.next() is None
