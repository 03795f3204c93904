"""Import paths of the tables: every name of vLLM's is there, and every old path warns and leads on."""

import importlib
import subprocess
import sys

import pytest

from jaxpaged.compat import OLD_PATHS, VLLM_PATHS, look_up

NAMES = [(path, name, location) for path, names in VLLM_PATHS.items() for name, location in names.items()]


@pytest.mark.parametrize(("path", "name", "location"), NAMES)
def test_a_path_of_vllms_has_the_object_itself(path, name, location):
    module = importlib.import_module(f"jaxpaged.{path}")
    assert getattr(module, name) is look_up(location, name)
    assert name in module.__all__
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from jaxpaged.{path} import no_such_name")


@pytest.mark.parametrize(("old", "new"), OLD_PATHS.items())
def test_an_old_path_warns_and_leads_to_the_new_module(old, new, monkeypatch):
    pytest.importorskip("ray" if old == "ray" else "jaxpaged")
    for name in [name for name in sys.modules if f"{name}.".startswith(f"jaxpaged.{old}.")]:
        monkeypatch.delitem(sys.modules, name)
    moved = importlib.import_module(f"jaxpaged.{new}")
    with pytest.warns(DeprecationWarning, match=f"jaxpaged.{old} has moved to jaxpaged.{new}"):
        shim = importlib.import_module(f"jaxpaged.{old}")
    [name, *_] = [name for name in vars(moved) if not name.startswith("__")] or ["__doc__"]
    assert name == "__doc__" or getattr(shim, name) is getattr(moved, name)


def test_a_module_that_is_nowhere_is_told_as_one():
    for path in ("jaxpaged.no_such_module", "jaxpaged.v1.no_such_module"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            importlib.import_module(path)


def test_an_old_path_runs_as_a_program():
    command = [sys.executable, "-W", "ignore", "-m", "jaxpaged.replay", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "state" in done.stdout
