"""Hooks and fixtures of all tests. Annotated functions of arrays check shapes and types while they run."""

import collections
import gc
import itertools
import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from tests import typechecker

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Compiling takes most of a run's time. The fixture `optimized` compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The host's side and the public operations are left out: they must meet wrong types and say so.
CHECKED = [
    "pallas_kernels.xla.tiled_attention",
    "jaxpaged.memory",
    "jaxpaged.models",
    "jaxpaged.parallel",
    "jaxpaged.sampling",
    "jaxpaged.sampling_filters",
    "jaxpaged.step",
]
install_import_hook(CHECKED, f"{typechecker.__name__}.check")


def pytest_terminal_summary(terminalreporter):
    """List what was skipped, and why, by file."""
    groups = collections.Counter(
        (report.nodeid.split("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", ())
    )
    for (file, reason), count in sorted(groups.items()):
        terminalreporter.write_line(f"skipped {count} in {file}: {reason}")
    if terminalreporter.config.option.markexpr == "not slow and not nightly":
        terminalreporter.write_line(
            "left out, for make test-all: tests marked slow; for make test-nightly: more of their settings"
        )


# Folders whose tests run last: clusters whose processes compile what is kept by then, and fuzzers, tests of
# ten seconds each, which idle workers take from busy ones.
LAST = {"batch": 1, "fuzz": 2}


def pytest_collection_modifyitems(items):
    """Put the folders of `LAST` behind all others."""
    items.sort(key=lambda item: LAST.get(item.path.parent.name, 0))


# Linux usually allows a process 65,530 mappings of memory; a compiled loop takes over a thousand.
MANY_MAPPINGS = 30_000
counted = itertools.count(1)


@pytest.fixture(autouse=True)
def few_mappings():
    """Drop compiled programs when there are many: XLA crashes if it cannot map memory for another.

    Programs that took long to compile are read back from the disk. Counting takes up to 40 ms, so only every
    sixteenth test does it.
    """
    yield
    import jax  # after the environment is set

    mappings = Path("/proc/self/maps")
    if next(counted) % 16 or not mappings.exists():
        return
    if mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def kept_programs():
    """Share compiled programs among all modules and processes, such as the loop of engines of one size."""
    import jax

    from jaxpaged import disk_cache

    disk_cache.keep_in(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    # Writing and reading one takes a few ms. An engine with a server's options sets another limit.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)


@pytest.fixture(scope="module")
def own_programs():
    """Clear JAX's caches before and after a module that compiles with other settings than the rest."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def optimized(own_programs):
    """Compile a module's programs with all optimizations, as users have them."""
    import jax

    former = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", former)


@pytest.fixture(scope="module")
def small_chunks(own_programs):
    """Process tables in chunks of 3, so that small tables take several chunks, too."""
    from jaxpaged.memory import entries, prefix_cache
    from jaxpaged.step import admission

    with pytest.MonkeyPatch.context() as patch:
        for module in (entries, prefix_cache, admission):
            patch.setattr(module, "CHUNK", 3)
        yield


@pytest.fixture
def brake(monkeypatch):
    """Return a function that makes a `tiny.Brake` for an engine. Brakes are off again when the test ends."""
    from tests import tiny  # not before the hook is there

    brakes = []

    def hold(engine):
        brakes.append(tiny.Brake(engine, monkeypatch))
        return brakes[-1]

    yield hold
    for each in brakes:
        each.off()
