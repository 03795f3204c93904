"""Models kept on disk: mapped by the next who asks, built anew where anything about them has changed."""

import json
import logging
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged import disk_cache
from jaxpaged.models import loading
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.files import kept, safetensors_files
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights

GOLDEN = Path(__file__).parents[1] / "goldens" / "mha_biased"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "kept")
    monkeypatch.setattr(kept, "SMALLEST", 0)
    return tmp_path / "kept"


@pytest.fixture
def path(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


@pytest.fixture
def load(path, monkeypatch):
    """Open the model as a new process would. Return whether its weights were read."""
    read = safetensors_files.load

    def loaded(dtype="float32", quantization=None, **options):
        reads = []

        def noted(path):
            reads.append(path)
            return read(path)

        noted.__module__ = safetensors_files.__name__  # else it is seen that a function of ours is replaced
        monkeypatch.setattr(safetensors_files, "load", noted)
        model = loading.open_checkpoint(path).model(LoadAs(jnp.dtype(dtype), quantization, **options))
        kept.wait()
        return model, bool(reads)

    return loaded


def built_from(path, dtype="float32", quantization=None):
    checkpoint = loading.open_checkpoint(path)
    tensors, quantisation = safetensors_files.load(path), checkpoint.quantisation(quantization)
    return Decoder(
        StoredWeights(checkpoint.config, checkpoint.names, tensors, LoadAs(jnp.dtype(dtype)), quantisation)
    )


def assert_equal(model, other):
    assert jax.tree.structure(model) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    "how", [("float32",), ("bfloat16",), pytest.param(("bfloat16", "int4"), marks=pytest.mark.slow)]
)
def test_the_second_to_ask_gets_the_same_arrays_from_disk(folder, load, path, how):
    built, was_read = load(*how)
    mapped, was_read_again = load(*how)
    assert (was_read, was_read_again) == (True, False)
    assert_equal(mapped, built)
    assert_equal(mapped, built_from(path, *how))
    assert [path.suffix for path in folder.iterdir()] == [".model"]


def test_a_loop_over_layers_is_another_model_where_it_is_another_form(folder, load):
    load()
    loops = form_of(jnp.dtype("float32")).loops
    assert [load(loop_over_layers=asked)[1] for asked in (loops, not loops)] == [False, True]


def test_other_weights_are_another_model(folder, load, path):
    load()
    file = path / "model.safetensors"
    save_file({name: 2 * weight for name, weight in safetensors_files.load(path).items()}, file)
    model, was_read = load()
    assert was_read
    assert_equal(model, built_from(path))
    assert load("bfloat16")[1]
    assert load("bfloat16", "int8")[1]


def test_a_damaged_copy_is_made_anew(folder, load, caplog):
    built, _ = load()
    [copy] = folder.iterdir()
    about = json.dumps(json.loads((copy / kept.ABOUT).read_text()) | {"key": "another's"})
    for damage in (
        lambda: (copy / "0.npy").unlink(),
        lambda: (copy / kept.ABOUT).write_text("[]"),
        lambda: (copy / kept.ABOUT).write_text(about),
    ):
        damage()
        with caplog.at_level(logging.WARNING):
            model, was_read = load()
        assert was_read
        assert f"the model kept in {copy} cannot be used" in caplog.text
        assert_equal(model, built)
        assert not load()[1]
        caplog.clear()


def test_a_copy_that_others_could_have_written_is_not_mapped(folder, load, caplog):
    load()
    [copy] = folder.iterdir()
    copy.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert load()[1]
    assert f"{copy} is not used: it may be written by others" in caplog.text
    assert not load()[1]


def test_what_cannot_or_should_not_be_kept_is_built_each_time(folder, load, monkeypatch, caplog):
    monkeypatch.setattr(kept, "LARGEST", 1)
    load()
    assert load()[1]
    assert not folder.exists()
    monkeypatch.setattr(kept, "LARGEST", 2**31)
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert load()[1]
    assert "the model cannot be kept in" in caplog.text


def test_the_models_used_longest_ago_go(folder, load, monkeypatch):
    monkeypatch.setattr(kept, "MOST_MODELS", 1)
    load("float32")
    [copy] = folder.iterdir()
    os.utime(copy, (1, 1))
    foreign = [
        folder / name for name in ("resnet.model", "0" * 32 + ".model")
    ]  # of whoever has the folder, too
    for other in foreign:
        other.mkdir()
        (other / "about.json").write_text('{"key": "11"}')
        os.utime(other, (0, 0))
    load("bfloat16")
    assert not copy.exists()
    assert all((other / "about.json").is_file() for other in foreign)
    assert load("float32")[1]
