"""Small engines for the tests of the oracle, and checks of their state."""

from typing import Any

from reference.engine import Engine, ids
from reference.engine_blocks import cdiv
from reference.engine_state import EngineConfig, NextToken, Phase, Request, Row, Step
from reference.invariants import check_block_pool


def count_up(tokens: list[int]) -> int:
    """Return an answer that is easily foreseen: 100, 101, ..."""
    return max(tokens[-1] + 1, 100)


def make(next_token: NextToken = count_up, **options: Any) -> Engine:
    """Return an engine: blocks of 2 positions, tiles of 4, two tiles a step, four rows of which two run."""
    sizes = {
        "max_num_seqs": 2,
        "num_rows": 4,
        "num_tiles": 2,
        "tile_len": 4,
        "block_size": 2,
        "num_blocks": 20,
        "max_blocks_per_seq": 16,
    }
    return Engine(EngineConfig(**{**sizes, **options}), next_token)


def phases(engine: Engine) -> list[str | None]:
    return [None if row is None else row.phase.value for row in engine.rows]


def computed(engine: Engine) -> list[int]:
    return [0 if row is None else row.computed for row in engine.rows]


def tokens(engine: Engine, row: int) -> list[int]:
    found = engine.rows[row]
    assert found is not None
    return found.tokens


def check(engine: Engine) -> None:
    """Check that no block is lost, and that rows without blocks hold none."""
    rows = [row for row in engine.rows if row is not None]
    on_host = [row for row in rows if row.phase is Phase.SWAPPED]
    check_block_pool(engine.pool, [line for row in rows if row not in on_host for line in row.lines])
    check_block_pool(engine.host_pool, [line for row in on_host for line in row.lines])
    for row in rows:
        if row.phase in (Phase.WAITING, Phase.FINISHED):
            assert (row.lines, row.computed) == (engine.blocks.no_blocks, 0)
        else:
            num_blocks = cdiv(row.computed, engine.config.block_size)
            assert [*map(len, row.lines)] == [num_blocks] * len(engine.config.reaches)


def run(engine: Engine, max_steps: int = 100) -> list[Step]:
    """Run steps until all requests have finished."""
    steps = []
    while any(phase not in (None, "finished") for phase in phases(engine)):
        assert len(steps) < max_steps, f"after {max_steps} steps: {phases(engine)}"
        steps.append(engine.step())
        check(engine)
    return steps


def lookup(engine: Engine, prompt: list[int]) -> list[int]:
    """Return the blocks that a request would hit, without running it."""
    _, blocks = engine.blocks.lookup(Row(0, Request(0, prompt, 99), prompt))
    return ids(blocks[0])
