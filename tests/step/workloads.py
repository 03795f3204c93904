"""Random workloads for the compiled step and its oracle side by side."""

import functools
import random
from typing import Any

from hypothesis import strategies as st

from reference import engine_state as reference
from tests.step.automata_of_tests import AUTOMATA, follows, forced
from tests.step.lockstep import STOP, Event, Request, Setting
from tests.step.sum_model import VOCAB, logprobs_of, next_token

RULES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1.5, "repetition_penalty": 2.0},
    {"repetition_penalty": 0.5, "frequency_penalty": 2.0, "presence_penalty": 0.25},
    {"min_tokens": 5, "presence_penalty": 1.0},
]


@st.composite
def workloads(draw: st.DrawFn, setting: Setting, *, priorities: bool = False) -> list[Event]:
    """Draw up to 24 prompts with up to 4 answers each over some 50 steps; many prompts begin alike."""
    state = random.getstate()  # beartype draws from it where types are checked, which hypothesis refuses
    arrival = 1
    events = []
    seen: list[tuple[int, ...]] = []
    bodies = [[draw(st.integers(0, VOCAB - 1)) for _ in range(8)] * 14 for _ in range(2)]
    for _ in range(draw(st.integers(1, 6))):
        requests = []
        for _ in range(draw(st.integers(1, 4))):
            prompt_len = draw(st.integers(1, setting.longest - 1))
            prompt = list(draw(st.sampled_from(bodies))[:prompt_len])
            if draw(st.booleans()):
                prompt[draw(st.integers(0, prompt_len - 1))] = draw(st.integers(0, VOCAB - 1))
            elif seen:  # go on with an earlier request's prompt, and its answer as far as there is room
                prompt = list(draw(st.sampled_from(seen)))
                while len(prompt) < prompt_len:
                    prompt.append(next_token(setting.reaches, prompt))
            prompt_len = len(prompt)
            seen.append(tuple(prompt))
            first = arrival
            priority = draw(st.integers(0, 2)) if priorities else 0
            salt = draw(st.sampled_from([0, 0, 0, 7]))
            most = draw(st.integers(prompt_len + 1, setting.longest))
            width = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
            if width and setting.has_room_for(width, prompt_len, most):
                search = reference.Search(
                    width,
                    draw(st.sampled_from([1.0, 0.0, -1.0, 2.0])),
                    functools.partial(logprobs_of, setting.reaches),
                )
                stop = draw(st.sampled_from([(), (STOP,), (STOP, 5)]))
                requests.append(Request(arrival, tuple(prompt), most, stop, priority, salt, search=search))
                arrival += 2 * width
                continue
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
                stop = draw(st.sampled_from([(), (), (STOP,)]))
                rules, rests, its_text = draw(st.sampled_from([{}, {}, *RULES])), None, None
                if setting.has_arena and (automaton := draw(st.sampled_from([None, *AUTOMATA]))):
                    rules = rules | {"automaton": automaton}
                    its_text = functools.partial(forced, automaton, prompt_len, setting.most_drafts)
                    if draw(st.booleans()):
                        rests = functools.partial(follows, automaton, prompt_len)
                its_next = functools.partial(
                    next_token,
                    setting.reaches,
                    prompt_len=prompt_len,
                    rules=rules | {"stop_token_ids": stop},
                )
                requests.append(
                    Request(
                        arrival=arrival,
                        prompt=tuple(prompt),
                        max_num_tokens=draw(st.integers(prompt_len + 1, setting.longest)),
                        stop_token_ids=stop,
                        next_token=its_next if rules else None,
                        next_draft=functools.partial(its_next, drafts=True) if rules else None,
                        rules=rules,
                        priority=priority,
                        salt=salt,
                        leader=None if arrival == first else first,
                        rests=rests,
                        forced=its_text,
                    )
                )
                arrival += 1
        events.append(Event(tuple(requests)))
        events += [Event()] * draw(st.integers(0, 8))
        if draw(st.booleans()):
            events.append(Event(abort=draw(st.integers(max(arrival - 6, 1), arrival - 1))))
    random.setstate(state)
    return events
