"""Dumps: they come back whole, and damaged or foreign files are refused."""

import dataclasses
import io
import json
import random
import sys
import zipfile

import jax
import numpy as np
import pytest

from jaxpaged import untrusted
from jaxpaged.checks import InputError
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.memory.policies import LRU_SPLIT
from jaxpaged.memory.prefix_cache import hash_block
from jaxpaged.research import replay
from jaxpaged.research.replay import __main__ as words
from jaxpaged.step.state import without_kv
from reference.engine_state import Request
from tests.replay.setting import SETTING, STEP_CONFIG, VOCAB_SIZE, assert_equal, line_of
from tests.step.lockstep import Setting


@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        Setting(
            "window",
            num_blocks=20,
            block_size=3,
            specs=(FULL, SlidingWindow(10)),
            reuse_answers=True,
            watermark_blocks=2,
            policy=LRU_SPLIT,
        ),
        Setting("no caching", num_blocks=9, prefix_caching=False),
    ],
    ids=lambda setting: setting.name,
)
def test_a_dump_comes_back_leaf_by_leaf(setting, tmp_path):
    state = setting.state()
    leaves, form = jax.tree.flatten(without_kv(state))
    rng = np.random.default_rng(0)
    noise = [
        leaf if isinstance(leaf, jax.ShapeDtypeStruct) else rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
        for leaf in leaves
    ]
    state = jax.tree.unflatten(form, noise)
    events = [
        replay.Event(0, request=line_of(Request(8, (1, 2, 3), 9, (5, 6)))),
        replay.Event(0, abort=3),
        replay.Event(4, request=line_of(Request(9, (4,), 2)), abort=8),
    ]
    config = dataclasses.replace(setting.config, attention="mosaic_gpu")
    replay.dump(
        state, tmp_path / "f", step_config=config, vocab_size=VOCAB_SIZE, events=events, answers={8: [5, 6]}
    )
    dump = replay.load(tmp_path / "f")
    assert_equal(dump.state, state)
    assert (dump.step_config, dump.vocab_size, dump.answers) == (config, VOCAB_SIZE, {8: [5, 6]})
    for got, want in zip(dump.events, events, strict=True):
        assert (got.num_steps, got.abort) == (want.num_steps, want.abort)
        assert (got.request is None) == (want.request is None)
        if want.request is not None:  # the tokens alone come back, not the places left over
            length = int(want.request.num_tokens[0])
            assert_equal(
                got.request, dataclasses.replace(want.request, token_ids=want.request.token_ids[:, :length])
            )


def test_a_hash_function_of_ones_own_is_refused(tmp_path):
    state = SETTING.state()
    cache = dataclasses.replace(state.tables.pool.prefix_cache, hash_fn=lambda *args: hash_block(*args))
    pool = dataclasses.replace(state.tables.pool, prefix_cache=cache)
    state = dataclasses.replace(state, tables=dataclasses.replace(state.tables, pool=pool))
    with pytest.raises(InputError, match="hash_fn=.* must be prefix_cache.hash_block"):
        replay.dump(state, tmp_path / "f", step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return the bytes of a dump."""
    path = tmp_path_factory.mktemp("replay") / "dump"
    replay.dump(SETTING.state(), path, step_config=STEP_CONFIG, vocab_size=VOCAB_SIZE)
    return path.read_bytes()


def rewritten(file: bytes, **entries: np.ndarray | None) -> bytes:
    """Return the dump with entries replaced, or left out where None."""
    arrays = dict(np.load(io.BytesIO(file))) | {
        name.replace("__", "."): value for name, value in entries.items()
    }
    out = io.BytesIO()
    np.savez(out, **{name: value for name, value in arrays.items() if value is not None})
    return out.getvalue()


def with_header(file: bytes, *keys: str, value: object) -> bytes:
    """Return the dump with one value of its header replaced."""
    header = json.loads(str(np.load(io.BytesIO(file))["header"]))
    part = header
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return rewritten(file, header=np.array(json.dumps(header)))


def with_array_header(file: bytes, header: str) -> bytes:
    """Return the dump with another .npy header for its status."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename == "state.status.npy":
                data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
            new.writestr(member.filename, data)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    np.save(out, value)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: b"", "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: b"a line of text", "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: saved(np.arange(3)), "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: saved(np.array([{}])), "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: file[: len(file) // 2], "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: file[:-1], "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: rewritten(file, header=None), "must be a file that jaxpaged's replay wrote, undamaged"),
        (lambda file: rewritten(file, header=np.array("{}")), "must be a file that jaxpaged's replay"),
        (lambda file: rewritten(file, state__rows__phase=None), "must be a file that jaxpaged's replay"),
        (lambda file: rewritten(file, state__status=np.zeros(2, np.int32)), "must be a file that jaxpaged"),
        (lambda file: rewritten(file, state__status=np.zeros((), np.int64)), "must be a file that jaxpaged"),
        (lambda file: rewritten(file, header=np.array("[" * 10**6)), "JSON must have at most 32 lists"),
        (lambda file: with_header(file, "sizes", "num_rows", value=10**12), "num_rows, max_model_len="),
        (lambda file: with_header(file, "vocab_size", value=10**12), "vocab_size=1000000000000 must be"),
        (lambda file: with_header(file, "num_requests", value=10**9), "must be a file that jaxpaged"),
        (lambda file: with_header(file, "kv", "dtype", value="m8[s/0]"), "dtype='m8[s/0]' must be one of"),
        (
            lambda file: with_header(file, "kv", "layout", "kv_layout", value="evil_layout:Layout"),
            "its layout 'evil_layout:Layout' is not one of ours: name it with --layout",
        ),
        (
            lambda f: with_array_header(f, "{'descr': 'm8[s/0]', 'fortran_order': False, 'shape': ()}"),
            "an array's type is 'm8[s/0]', must be a number or text",
        ),
        (
            lambda f: with_array_header(f, "{'descr': '<i8', 'fortran_order': False, 'shape': (10**15,)}"),
            "must be a file that jaxpaged's replay wrote|the archive cannot be read",
        ),
        (
            lambda f: with_array_header(f, "{'descr': '<i8', 'fortran_order': False, 'shape': (2000, 2000)}"),
            "does not have 8 bytes",
        ),
        (
            lambda file: rewritten(file, header=np.array('{"version": 1}')),
            "version=1 must be 7, the one that this jaxpaged reads",
        ),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(change, message, file, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(change(file))
    with pytest.raises(InputError) as error:
        replay.load(path)
    assert any(each in str(error.value) for each in message.split("|")), str(error.value)
    assert str(error.value).startswith(f"dump '{path}'")
    assert "\n" not in str(error.value)
    assert "evil_layout" not in sys.modules


def test_an_archive_is_unpacked_up_to_a_limit(tmp_path):
    """Zeros of a thousand times the file's size."""
    np.savez_compressed(tmp_path / "bomb", zeros=np.zeros(2**24, np.int8))
    assert (tmp_path / "bomb.npz").stat().st_size < 2**15
    with pytest.raises(InputError, match=r"have 16777\d+ bytes, must have at most 1048576$"):
        untrusted.read_npz(tmp_path / "bomb.npz", max_bytes=2**20)


def test_whatever_byte_is_wrong_a_dump_is_refused_or_whole(file, tmp_path):
    """Some bytes of an .npz mean nothing; what is read is never anything but what was written."""
    rng = random.Random(0)
    whole = without_kv(SETTING.state())
    num_refused = 0
    for _ in range(40):
        damaged = bytearray(file)
        damaged[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
        (tmp_path / "file").write_bytes(damaged)
        try:
            dump = replay.load(tmp_path / "file")
        except InputError:
            num_refused += 1
        else:
            assert_equal(dump.state, whole)
            assert dump.step_config == STEP_CONFIG
    assert num_refused > 20


def test_a_missing_file_is_told(tmp_path, capsys):
    assert words.main([str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"jaxpaged: dump '{tmp_path / 'none'}' cannot be read: No such file or directory\n"
