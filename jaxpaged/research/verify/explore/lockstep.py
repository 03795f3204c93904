"""The oracle in lock-step: each edge of a walk, made by `reference.engine`, leads to the walk's state."""

import copy

from jaxpaged.config import PREFILL_TILE
from jaxpaged.research.verify.explore.canonical import Key, Names
from jaxpaged.research.verify.explore.walk import ARRIVE, STEP, Event, Finding, Walk
from jaxpaged.research.verify.explore.worlds import World, next_token
from jaxpaged.research.verify.oracles import engine_state as reference
from jaxpaged.research.verify.oracles.engine import Engine
from jaxpaged.research.verify.oracles.speculation import Lookup
from jaxpaged.step.state import Phase

PHASES = {
    reference.Phase.WAITING: Phase.WAITING,
    reference.Phase.RUNNING: Phase.RUNNING,
    reference.Phase.SWAPPED: Phase.SWAPPED,
    reference.Phase.FINISHED: Phase.FINISHED,
}


def compare(walk: Walk) -> int:
    """Let the oracle make every edge. Return how many it made; the first that differs is the finding.

    Depth first along the walk's tree, so that few copies of the oracle live at a time.
    """
    children: list[list[int]] = [[] for _ in walk.edges]
    for state, (before, _) in enumerate(walk.came_from):
        if state:
            children[before].append(state)
    todo, num_compared = [(0, oracle_of(walk.world))], 0
    while todo:
        state, engine = todo.pop()
        new = {walk.came_from[child][1]: child for child in children[state]}
        for event, target in walk.edges[state].items():
            after = copy.deepcopy(engine)
            happen(after, walk.world, event)
            num_compared += 1
            if seen_by(after) != walk.seen[target]:
                what = f"the oracle comes to {seen_by(after)}, the step to {walk.seen[target]}"
                walk.finding = Finding(what, [*walk.path(state), event])
                return num_compared
            if event in new:
                todo.append((target, after))
    return num_compared


def oracle_of(world: World) -> Engine:
    """Build the oracle of a world before its first event."""
    config = reference.EngineConfig(
        max_num_seqs=world.max_num_seqs,
        num_rows=len(world.asks),
        num_tiles=1,
        tile_len=PREFILL_TILE,
        block_size=world.block_size,
        num_blocks=world.num_blocks + 1,
        max_blocks_per_seq=-(-world.max_model_len // world.block_size),
        num_host_blocks=world.num_host_blocks and world.num_host_blocks + 1,
        prefix_caching=world.prefix_caching,
        preemption_mode="swap" if world.num_host_blocks else "recompute",
        lookup=Lookup(world.most_drafts, 1, 1) if world.most_drafts else None,
    )
    return Engine(config, next_token)


def happen(engine: Engine, world: World, event: Event) -> None:
    """Let an event happen to the oracle."""
    kind, row = event
    if kind == STEP:
        engine.step()
    elif kind == ARRIVE:
        ask = world.asks[row]
        arrival = (engine.last_arrival or 0) + 1
        request = reference.Request(
            arrival, ask.prompt, ask.max_num_tokens, priority=ask.priority, salt=ask.salt
        )
        engine.submit(request, row)
    else:
        held = engine.rows[row]
        if held is not None:
            engine.abort(held.request.arrival)


def seen_by(engine: Engine) -> Key:
    """Return the state of the oracle in the form of `canonical.seen`."""
    names = Names({0: 0})
    rows: list[tuple[int, ...]] = []
    for row in engine.rows:
        phase = Phase.EMPTY if row is None else PHASES[row.phase]
        if row is None or phase == Phase.FINISHED:
            rows.append((int(phase),))
            continue
        line = [block.block_id for block in row.blocks] if phase == Phase.RUNNING else []
        rows.append((int(phase), row.num_tokens, row.computed, *map(names.of, line)))
    free = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    return (*rows, tuple(map(names.of, free)))
