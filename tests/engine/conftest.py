"""Engines for tests with threads."""

import time
from collections.abc import Iterator

import pytest

from jaxpaged.engine.engine import Engine
from tests import tiny
from tests.engine.limits import LIMIT_S


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with tiny.engine(**tiny.SMALL) as engine:
        yield engine
    tiny.assert_nothing_is_held(tiny.driver_of(engine))


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Make the engine that most tests share; each test leaves it without work and with all blocks free."""
    yield shared
    deadline = time.monotonic() + LIMIT_S
    while not shared.is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stats = shared.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture
def own() -> Iterator[Engine]:
    """Make an engine to break. Its loop is that of the shared engine, so nothing compiles."""
    with tiny.engine(**tiny.SMALL) as engine:
        yield engine
