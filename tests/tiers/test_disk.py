"""Blocks in a directory: beside the oracle, shared, and with every fault that a disk may have."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from jaxpaged import disk_cache
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.contracts.block_stores import StoredBlock
from jaxpaged.tiers import block_files, disk, tiers
from jaxpaged.tiers.disk import DiskStore
from jaxpaged.untrusted import read_json
from tests.tiers.test_stores import SPACES, Clock, block, history, key_of

MUCH = 2**30


@pytest.fixture
def make(tmp_path):
    """Return what makes a store of so many bytes, in one directory; all are closed at the end."""
    made = []

    def store(capacity=MUCH, folder=tmp_path / "kept"):
        made.append(DiskStore(folder, capacity))
        return made[-1]

    yield store
    for each in made:
        each.close()


def files(store):
    return sorted(store.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_directory_is_in_lock_step_with_its_oracle(make, monkeypatch, keeps):
    monkeypatch.setattr(disk, "LEFT", 1.0)
    clock, count = Clock(), itertools.count()
    if keeps:  # beyond all times that the file system gives
        monkeypatch.setattr(time, "time_ns", lambda: (2**31 + clock()) * 10**9 + 1000 * next(count))

    def size_of(key, new):
        return len(block_files.written(key, new, b"secret"))

    capacity = 4 * size_of(key_of(1), block(1, 3))
    store = make(capacity)
    more = {"num_steps": 600, "clock": clock} if keeps else {"num_steps": 150}
    plain = history(store, capacity, settle=store.flush, size_of=size_of, **more)
    assert len(files(store)) == len(plain.entries) > 1
    assert store.num_bytes == sum(entry[1] for entry in plain.entries)


def test_what_is_kept_outlives_a_restart_and_others_respect_it(make, monkeypatch):
    monkeypatch.setattr(disk, "LEFT", 1.0)
    size = len(block_files.written(key_of(1), block(1, 3), b"secret"))
    first, other = make(6 * size + size // 2), make(6 * size + size // 2)
    for number in range(6):
        first.put(key_of(number), block(number, 3))
    first.keep([key_of(0), key_of(1), key_of(2)], 3600)
    first.flush()
    assert first.kept_bytes == 3 * size
    first.close()
    assert other.get(key_of(1)) is not None  # a use of now, which ends nothing
    for number in range(6, 12):
        other.put(key_of(number), block(number, 3))
        other.flush()
    assert [other.contains(key_of(number)) for number in range(6)] == [True] * 3 + [False] * 3
    again = make(6 * size + size // 2)
    again.keep([key_of(0), key_of(1), key_of(2)], 0)
    for number in range(12, 17):
        again.put(key_of(number), block(number, 3))
        again.flush()
    assert [again.contains(key_of(number)) for number in range(3)] == [True, False, False]
    again.keep([key_of(16)], 1e-6)
    again.flush()
    assert again.kept_bytes == 0, "its time is over"


@pytest.mark.parametrize("restarts", [False, True])
def test_all_that_is_kept_has_half_of_the_room_whoever_keeps_it(make, restarts):
    """Two engines in turns, or one that starts anew; then an engine with less room."""
    size = len(block_files.written(key_of(1), block(1, 3), b"secret"))
    capacity = 10 * size

    def kept():
        return sum(path.stat().st_size for path in files(store) if path.stat().st_mtime > time.time() + 60)

    store = make(capacity)
    other = None if restarts else make(capacity)
    for first in (0, 5):
        those = [key_of(number) for number in range(first, first + 5)]
        for number, key in enumerate(those):
            store.put(key, block(number, 3))
        store.keep(those[:3], 3600)
        store.flush()
        assert kept() == store.kept_bytes == (5 if first else 3) * size
        if restarts:
            store.close()
        store = other or make(capacity)
    for number in range(10, 30):
        store.put(key_of(number), block(number, 3))
        store.flush()
        assert store.contains(key_of(number)), "what comes anew has the other half"
    small = make(4 * size)
    small.flush()
    assert kept() == small.kept_bytes == 2 * size
    assert small.contains(key_of(0)), "a chain's beginning is kept longest"
    # Nobody can have asked for so long: another clock, or an earlier version.
    path = block_files.path_of(small.folder, key_of(29))
    os.utime(path, (time.time() + 1e9,) * 2)
    small.flush()
    small.flush()
    assert path.stat().st_mtime < time.time() + 60


def test_what_was_put_is_found_by_others_and_after_a_restart(make):
    rng = np.random.default_rng(0)
    arrays = {
        "k": rng.standard_normal((2, 3, 4), np.float32).astype(ml_dtypes.bfloat16),
        "scale": rng.standard_normal((2, 1), np.float32),
    }
    stored = StoredBlock((True, False, True), arrays)
    here = make()
    other = make()
    here.put(key_of(1), stored)
    assert not here.contains(key_of(2))
    here.flush()
    other.flush()
    for store in (here, other, make()):
        assert store.contains(key_of(1))
        found = store.get(key_of(1))
        assert found.present == stored.present
        for name, array in arrays.items():
            assert found.arrays[name].dtype == array.dtype
            assert found.arrays[name].tobytes() == array.tobytes()
            assert found.arrays[name].shape == array.shape
        assert store.get(key_of(2)) is None
    # Two engines put the same; one forgets a model, and the other misses.
    other.put(key_of(1), stored)
    other.flush()
    assert len(files(here)) == 1
    here.clear(SPACES[1])
    here.flush()
    assert other.get(key_of(1)) is None
    assert not other.contains(key_of(1))


@pytest.fixture
def warned(caplog):
    """Return the warnings about this directory since the last look."""

    def look():
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return found

    return look


def test_files_that_are_torn_or_foreign_are_skipped_with_one_line(make, warned, tmp_path):
    store, good, other = make(), key_of(1), key_of(3)
    for key in (good, other):
        store.put(key, block(7, 9))
    store.flush()
    other_file = block_files.path_of(store.folder, other)
    torn, content = other_file.read_bytes(), block_files.path_of(store.folder, good).read_bytes()
    foreign = make(folder=tmp_path / "another")
    foreign.put(other, block(7, 9))
    foreign.flush()
    [another] = files(foreign)
    length = 8 + int.from_bytes(torn[:8], "little")
    [(name, text)] = read_json(torn[8:length])["__metadata__"].items()
    tensors = load(torn)
    ours = [  # by their heads: counted, not used, and removed when they are old
        torn[:-1],
        torn[:length],
        torn[:-1] + bytes([torn[-1] ^ 1]),
        save(tensors | {"v": tensors["k"]}, metadata={name: text}),
    ]
    not_ours = [  # neither counted, used nor removed
        b"",
        torn[: length // 2],
        content,  # of another key
        another.read_bytes(),  # with another secret
        save(tensors),
        save(tensors, metadata={name: text.replace("true", "false")}),
        save(tensors, metadata={name: text.replace("uint8", "int8")}),
        save(tensors, metadata={name: "[]"}),
        save(tensors, metadata={"jaxpaged block, version 1": text}),
    ]
    for wrong in (*ours, *not_ours):
        other_file.write_bytes(wrong)
        os.utime(other_file, (0, 0))
        reader = make(len(content) + len(torn) // 2)  # room for one block
        if wrong in not_ours:
            [line] = warned()
            assert "has 1 files with names of blocks that are neither used nor removed" in line
        assert reader.contains(other) == (wrong in ours)
        assert [reader.get(other) for _ in range(3)] == [None] * 3
        assert not reader.contains(other)
        [line] = warned()
        assert line.startswith(f"{other_file} is skipped, for it is torn or somebody else's: ")
        reader.put(good, block(7, 9))
        reader.flush()
        assert reader.num_bytes == len(content)
        assert other_file.exists() == (wrong not in ours)
        assert int(reader.get(good).arrays["k"][0, 0]) == 7
    reader = make()
    reader.put(other, block(8))  # a good one takes its place
    reader.flush()
    assert int(reader.get(other).arrays["k"][0, 0]) == 8


def test_what_is_not_ours_is_neither_counted_nor_removed(make, tmp_path, monkeypatch):
    """Whatever it is called, wherever it lies, and however old it is; links are not followed."""
    size = len(block_files.written(key_of(1), block(1, 900), b"secret"))
    store = make(3 * size)
    store.put(key_of(1), block(1, 900))
    store.flush()
    [one] = files(store)
    elsewhere = tmp_path / "elsewhere" / "unfinished-model"
    elsewhere.mkdir(parents=True)
    weights = save({"w": np.zeros(size, np.float32)})
    foreign = [
        *(store.folder / name for name in ("model.safetensors", "a-model/model.safetensors", "notes.txt")),
        *(store.folder / name for name in ("unfinished-business", "0" * 64 + ".safetensors")),
        store.folder / ("0" * 16) / f"{'0' * 64}.safetensors",
        *(
            one.parent / name
            for name in ("0" * 64 + ".safetensors", "unfinished-thesis", "model.safetensors")
        ),
        one.parent / "deeper" / one.name,
        elsewhere / one.name,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(weights)
        os.utime(path, (0, 0))
    (store.folder / ("1" * 16)).symlink_to(elsewhere)
    (one.parent / f"{'2' * 64}.safetensors").symlink_to(one)
    again = make(3 * size)
    assert again.num_bytes == size
    for number in range(3, 13, 2):
        again.put(key_of(number), block(1, 900))
        again.flush()
    assert again.num_bytes <= 3 * size
    assert not one.exists()
    again.clear(SPACES[1])
    again.flush()
    assert again.num_bytes == 0
    assert [path for path in foreign if path.read_bytes() != weights] == []


def test_a_folder_of_somebodys_is_refused_unless_it_has_our_marker(make, tmp_path, monkeypatch):
    for number, name in enumerate(("model.safetensors", "a-model/config.json", ".hidden", "secret/x")):
        folder = tmp_path / str(number)
        (folder / name).parent.mkdir(parents=True)
        folder.chmod(0o700)
        (folder / name).write_bytes(b"x")
        match = rf"disk:{re.escape(str(folder))}' must be a new or empty folder, or one that has jaxpaged-bl"
        with pytest.raises(InputError, match=match if number < 3 else "cannot be used"):
            make(folder=folder)
        if number < 3:
            assert [path.name for path in folder.iterdir()] == [name.split("/")[0]]
    (tmp_path / "root" / "lost+found").mkdir(parents=True, mode=0o700)
    (tmp_path / "root").chmod(0o700)
    make(folder=tmp_path / "root")
    (tmp_path / "root" / "model.safetensors").write_bytes(b"x")
    make(folder=tmp_path / "root")
    # A folder of an earlier version has no marker.
    (tmp_path / "root" / "model.safetensors").unlink()
    (tmp_path / "root" / "jaxpaged-blocks.txt").unlink()
    make(folder=tmp_path / "root")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for asked in ("disk:", "disk: ", "disk:.", "disk:./"):
        with pytest.raises(InputError, match=r"^kv_offloading_backend='disk:[ ./]*' must be .*disk:DIR"):
            EngineConfig(kv_offloading_size=1, kv_offloading_backend=asked)
    with pytest.raises(InputError, match=r"='disk:~nobody-here/x' must be disk:DIR: .*home directory"):
        EngineConfig(kv_offloading_size=1, kv_offloading_backend="disk:~nobody-here/x")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = tiers.opened(1, "disk:~/kept", 1)
    made.close()
    assert (tmp_path / "home" / "kept").is_dir()
    assert not (tmp_path / "~").exists()
    with pytest.raises(InputError, match="^kv_offloading_backend='disk:' must be disk:DIR"):
        DiskStore(Path(), MUCH)
    with pytest.raises(InputError, match="cannot be used: .*null byte"):
        tiers.opened(1, "disk:a\0b", 1)
    assert [*(tmp_path / "empty").iterdir()] == []


def test_a_folder_that_others_may_write_to_is_refused(make, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(
        InputError, match=r"^kv_offloading_backend='disk:.*' must be a folder of one's own: it m"
    ):
        make(folder=folder)
    folder.chmod(0o700)
    make(folder=folder)
    secret = folder / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o640)
    with pytest.raises(InputError, match="secret must have mode 600"):
        make(folder=folder)
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(InputError, match="secret must have 32 bytes"):
        make(folder=folder)
    with pytest.raises(InputError, match="cannot be used"):
        make(folder=secret / "below")


def test_a_disk_that_is_full_gone_or_slow_costs_hits_alone(make, warned, monkeypatch):
    store = make()

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk_cache, "write_file", full)
        for number in range(1, 9, 2):
            store.put(key_of(number), block(number))
        store.flush()
        assert not store.contains(key_of(1))
    [line] = warned()
    assert "cannot be written to: [Errno 28] No space left on device" in line
    store.put(key_of(1), block(1))
    store.flush()
    assert store.get(key_of(1)) is not None
    # Too slow: what waits is bounded, and the rest is dropped.
    with monkeypatch.context() as patched:
        patched.setattr(disk, "MOST_WAITING_BYTES", 10)
        patched.setattr(disk_cache, "write_file", lambda path, content: time.sleep(0.05))
        began = time.monotonic()
        for number in range(11, 31, 2):
            store.put(key_of(number), block(number, 4))
        assert time.monotonic() - began < 0.05
    [line] = warned()
    assert "is too slow: blocks are not kept" in line
    store.flush()
    # Gone: nothing is made in its place.
    away = store.folder.rename(store.folder.with_name("away"))
    assert store.get(key_of(1)) is None
    store.put(key_of(3), block(3))
    store.flush()
    assert not store.folder.exists()
    assert not store.contains(key_of(3))
    assert any("is gone" in line for line in warned())
    away.rename(store.folder)
    store.flush()
    assert store.contains(key_of(1))


WRITER = """
import os, sys, time
from pathlib import Path
from jaxpaged.tiers.disk import DiskStore
from tests.tiers.test_stores import block, key_of

store = DiskStore(Path(sys.argv[1]), 2**30)
store.put(key_of(1), block(1, 1000))
store.flush()

def never(source, target):
    print("in the middle", flush=True)
    time.sleep(600)

os.replace = never
store.put(key_of(3), block(3, 1000))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_that_is_read(make, warned):
    store = make()
    command = [sys.executable, "-c", WRITER, str(store.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "in the middle\n"
        writer.send_signal(signal.SIGKILL)
    store.flush()
    assert int(store.get(key_of(1)).arrays["k"][0, 0]) == 1
    assert not store.contains(key_of(3))
    [left] = list(store.folder.rglob("unfinished-*"))
    store.put(key_of(3), block(3))
    store.flush()
    assert left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    store.flush()
    assert not left.exists()
    assert store.contains(key_of(3))
    assert not warned()
