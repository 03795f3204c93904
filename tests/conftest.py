"""Every annotated function that works on arrays checks its shapes and types while the tests run."""

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
# Most of a run's time goes into compiling: it is kept short, but where `optimized` says otherwise.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Not what is there to meet wrong types and say so: the host side, and the public operations.
CHECKED = [
    "pallas_kernels.xla.tiled_attention",
    "jaxpaged.memory",
    "jaxpaged.models",
    "jaxpaged.parallel",
    "jaxpaged.sampling",
    "jaxpaged.step",
]
install_import_hook(CHECKED, f"{typechecker.__name__}.check")


def pytest_terminal_summary(terminalreporter):
    """What was skipped, and why, by file: nothing goes unguarded unseen."""
    groups = collections.Counter(
        (report.nodeid.split("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", ())
    )
    for (file, reason), count in sorted(groups.items()):
        terminalreporter.write_line(f"skipped {count} in {file}: {reason}")
    if terminalreporter.config.option.markexpr == "not slow":
        terminalreporter.write_line("left out, for make test-all: tests marked slow")


def pytest_collection_modifyitems(items):
    """Put the fuzzers last: tests of ten seconds each, which idle workers take from busy ones."""
    items.sort(key=lambda item: item.path.parent.name == "fuzz")


# Of the kernel's usual 65,530 mappings of memory a process; a compiled loop takes over a thousand.
MANY_MAPPINGS = 30_000
counted = itertools.count(1)


@pytest.fixture(autouse=True)
def few_mappings():
    """Where there are many compiled programs they go: XLA crashes where it cannot map memory for one more.

    Those that take long to compile are read back from the disk. To count takes up to 40 ms, so not each time.
    """
    yield
    import jax  # after the environment is set

    mappings = Path("/proc/self/maps")
    if next(counted) % 8 or not mappings.exists():
        return
    if mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def kept_programs():
    """All modules and processes share what is compiled: loops of engines of the same sizes, and the rest."""
    import jax

    from jaxpaged import disk_cache

    disk_cache.keep_in(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))
    # To write and read one takes a few ms. An engine with a server's options says otherwise.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)


@pytest.fixture(scope="module")
def own_programs():
    """For modules that compile otherwise than the others: they share no programs with them."""
    import jax

    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def optimized(own_programs):
    """For modules that need programs as users have them."""
    import jax

    former = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", former)


@pytest.fixture(scope="module")
def small_pieces(own_programs):
    """For modules with small tables: what is taken piece by piece takes many pieces there, too."""
    from jaxpaged.memory import entries, prefix_cache
    from jaxpaged.step import admission

    with pytest.MonkeyPatch.context() as patch:
        for module in (entries, prefix_cache, admission):
            patch.setattr(module, "PIECE", 3)
        yield


@pytest.fixture
def brake(monkeypatch):
    """Call it with an engine for a `tiny.Brake`, which is off again when the test ends."""
    from tests import tiny  # not before the hook is there

    brakes = []

    def hold(engine):
        brakes.append(tiny.Brake(engine, monkeypatch))
        return brakes[-1]

    yield hold
    for each in brakes:
        each.off()
