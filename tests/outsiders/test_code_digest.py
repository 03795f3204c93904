"""Kept programs and parts from outside: one that was made for another function is never run."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import disk_cache
from jaxpaged.code_digest import digest_of
from jaxpaged.engine import programs
from tests.outsiders import attention, layout, policy, sampler

SOURCE = """
import jax.numpy as jnp

FACTOR = 2.0
TABLE = {"a": [1, 2]}


def helper(x):
    return x * FACTOR


def part(x):
    return helper(x) + 1
"""


def module_of(source, name="somebodys"):
    module = types.ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    return module


def test_equal_code_has_equal_digests_and_other_code_has_others():
    digests = [
        digest_of(module_of(source).part)
        for source in (
            SOURCE,
            SOURCE,
            SOURCE.replace("+ 1", "+ 2"),
            SOURCE.replace("FACTOR = 2.0", "FACTOR = 3.0"),  # a constant of the module
            SOURCE.replace("x * FACTOR", "x - FACTOR"),  # a function that it calls
        )
    ]
    assert None not in digests
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    unused = digest_of(module_of(SOURCE.replace("[1, 2]", "[3]")).part)
    assert unused == digests[0], "what a function cannot reach is not part of it"


def test_a_function_replaced_at_run_time_changes_the_digest():
    module = module_of(SOURCE)
    before = digest_of(module.part)
    module.helper = lambda x: x
    assert digest_of(module.part) not in (before, None)
    patched = module_of(SOURCE)
    patched.FACTOR = 5.0
    assert digest_of(patched.part) not in (before, None)


def test_closures_partials_arrays_and_objects_count():
    def made(value):
        return lambda x: x + value

    class Box:
        def __init__(self, value):
            self.value = value

        def __call__(self, x):
            return x + self.value

    pairs = [
        (made(1), made(2)),
        (functools.partial(made, 1), functools.partial(made, 2)),
        (made(np.arange(3)), made(np.arange(1, 4))),
        (made(jnp.float32(1)), made(jnp.float32(2))),
        (Box(1), Box(2)),
        (jax.jit(made(1)), jax.jit(made(2))),
        (made({"a": (1, None)}), made({"a": (1, True)})),
    ]
    for one, other in pairs:
        assert None not in (digest_of(one), digest_of(other)), one
        assert digest_of(one) != digest_of(other), one


def test_what_cannot_be_described_has_no_digest():
    def imports_late(x):
        import somebodys_other  # type: ignore[import-not-found]

        return somebodys_other.f(x)

    assert digest_of(imports_late) is None
    assert digest_of(open) is not None  # Python's own
    assert digest_of(functools.partial(print, iter([1]))) is None


def test_parts_of_each_kind_can_be_described():
    parts = [
        attention.BOTH, attention.ragged, attention.by_callback, layout.ColumnsOfK(), layout.SixBits(),
        policy.FOUND_LAST, sampler.with_noise,
    ]  # fmt: skip
    digests = [digest_of(part) for part in parts]
    assert None not in digests
    assert len(set(digests)) == len(parts)


def test_a_kept_program_is_not_run_for_another_part(tmp_path, monkeypatch):
    """The name, the arrays and the rest of the key are alike: only the code differs."""
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "programs")
    x, results = np.arange(4, dtype=np.float32), []
    for source in (SOURCE, SOURCE.replace("+ 1", "+ 7"), SOURCE):
        monkeypatch.setattr(programs, "_loaded", {})
        part = module_of(source).part
        program = programs.kept(
            lambda part=part: jax.jit(part).lower(x), made_from=("part", part, digest_of(part)),
            arrays=(x,), result=0,
        )  # fmt: skip
        results.append(np.asarray(program(jnp.asarray(x))).tolist())
    assert results[0] == results[2] == (2 * x + 1).tolist()
    assert results[1] == (2 * x + 7).tolist()
    assert len(list((tmp_path / "programs").glob("*.program"))) == 2


def test_a_program_with_a_callback_is_not_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "programs")
    monkeypatch.setattr(programs, "_loaded", {})
    x = np.arange(4, dtype=np.float32)

    def doubled(x):
        return jax.pure_callback(lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program = programs.kept(lambda: jax.jit(doubled).lower(x), "doubled", (x,), 0, may_call_back=True)
    np.testing.assert_array_equal(program(jnp.asarray(x)), 2 * x)
    assert not list((tmp_path / "programs").glob("*"))
    assert "cannot be kept" not in caplog.text  # nothing has been tried
