"""Every annotated function that works on arrays checks its shapes and types while the tests run."""

import collections
import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from tests import typechecker

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Not what is there to meet wrong types and say so: the host side, and the public operations.
CHECKED = [
    "pallas_kernels.xla_tiles",
    "jaxpaged.memory",
    "jaxpaged.models",
    "jaxpaged.sampling",
    *(f"jaxpaged.engine.{module}" for module in ("admission", "beams", "loop", "plan", "scheduler")),
    *(f"jaxpaged.engine.{module}" for module in ("state", "step")),
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


# Of the kernel's usual 65,530 mappings of memory a process; a compiled loop takes over a thousand.
MANY_MAPPINGS = 30_000


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """A module's compiled programs go with it.

    Those that the next module needs too are read back from the disk. That `LLM` keeps whole programs there
    ends with the module, too.
    """
    yield
    import jax  # after the environment is set

    from jaxpaged import disk_cache

    jax.clear_caches()
    disk_cache.keep_in(None)


@pytest.fixture(autouse=True)
def few_mappings():
    """And earlier where a module has many of them: XLA's compiler crashes where memory cannot be mapped."""
    yield
    import jax

    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def unoptimized(few_programs):
    """For modules whose time goes into compiling, and in which no bits are compared."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def small_pieces(few_programs):
    """For modules with small tables: what is taken piece by piece takes many pieces there, too."""
    from jaxpaged.engine import admission
    from jaxpaged.memory import entries, prefix_cache

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
