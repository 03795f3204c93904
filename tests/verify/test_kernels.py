"""Verifying kernels: what is right passes, what is wrong is found and made small."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.research.verify import (
    NotServed,
    Terms,
    WrongResult,
    cases_of,
    check,
    frameworks,
    verify_kernel,
)
from jaxpaged.research.verify.cases.decode import DecodeCase, case
from jaxpaged.research.verify.cases.frame import call_of
from pallas_kernels import ops
from tests.verify.mutants import Mutant, planted
from tests.verify.mutants.kernels import MUTANTS
from tests.verify.mutants.kernels import SOUND as SOUND_FOLDER
from tests.verify.mutants.sound import attention, cache, prompts

SOUND = {
    "paged_attention_v1": attention.paged_attention,
    "paged_attention_v2": attention.paged_attention_in_parts,
    "ragged_paged_attention": prompts.ragged_paged_attention,
    "reshape_and_cache": cache.reshape_and_cache,
    "copy_blocks": cache.copy_blocks,
    "swap_blocks": cache.swap_blocks,
    "merge": cache.merge,
}


@pytest.mark.parametrize("op", SOUND)
def test_what_is_right_passes_every_case(op: str) -> None:
    report = verify_kernel(SOUND[op], op)
    assert report.ok, report
    assert len(report.passed) == len(cases_of(op)), report
    assert report.worst < 0.7, "who is right stays well below what is allowed"


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_bug_is_found_and_its_case_made_small(mutant: Mutant, tmp_path: Path) -> None:
    with planted(mutant, tmp_path) as function:
        report = verify_kernel(function, mutant.what, save=tmp_path)
        assert report.wrong, report
        with pytest.raises((WrongResult, IndexError)):
            exec(report.snippet, {})
    smallest = report.smallest
    assert isinstance(smallest.is_sound, bool)
    assert getattr(smallest, "head_dim", 1) <= 16
    assert sum(getattr(smallest, "seq_lens", ())) <= 40
    with np.load(report.saved) as file:
        about = json.loads(str(file["about"]))
        assert about["op"] == mutant.what
        assert all(file[name].dtype.kind != "V" for name in file), "a file that anybody can read"
        assert call_of(smallest) == about["case"]
        if "IndexError" not in report.sentence:
            got, want = (
                [file[f"{side}_{i}"] for i in (0, 1) if f"{side}_{i}" in file] for side in ("got", "want")
            )
            assert not all(map(functools.partial(np.allclose, rtol=1e-5), got, want))


@pytest.mark.parametrize("size", [128, 256, 512, 1024])
def test_a_last_partition_that_is_not_rescaled_is_found(size: int, tmp_path: Path) -> None:
    """A function has partitions of its own in v1, and is told their size in v2."""
    right = "rescale = np.exp(largest - finite)"
    wrong = f"{right} if s.shape[1] - first >= size else np.ones_like(largest)"
    mutant = Mutant("not rescaled", SOUND_FOLDER, "attention.py", right, wrong, "attention:attend", "")
    with planted(mutant, tmp_path) as attend:

        def fixed(q: Any, k: Any, v: Any, tables: Any, lens: Any, **options: Any) -> Any:
            return attend(q, k, v, tables, lens, size, **options)

        def told(
            q: Any, k: Any, v: Any, tables: Any, lens: Any, *, partition_size: Any, **options: Any
        ) -> Any:
            return attend(q, k, v, tables, lens, partition_size, **options)

        for function, op, name in (
            (fixed, "paged_attention_v1", "rising_512"),
            (told, "paged_attention_v2", f"rising_{size}"),
        ):
            with pytest.raises(WrongResult, match=rf"{name}: row \d, head \d, element \d+ is"):
                check(function, op, case(name))


def test_only_what_a_function_serves_is_asked_of_it() -> None:
    def plain(q: Any, k: Any, v: Any, tables: Any, seq_lens: Any, *, scale: Any = None) -> Any:
        if q.shape[2] > 128:
            raise NotImplementedError("head_dim must be at most 128\nor else")
        return attention.paged_attention(q, k, v, tables, seq_lens, scale=scale)

    terms = Terms(
        only={"dtype": ("bfloat16", "float32"), "cache_dtype": ("bfloat16",)}, without=frozenset({"scale"})
    )
    report = verify_kernel(plain, "paged_attention_v1", terms)
    assert report.ok, report
    why = {str(o.case): o.not_served for o in report.not_served}
    assert why["scale"] == "scale"
    assert why["sinks"] == "no parameter sinks"
    assert why["head_dim_256"] == "head_dim must be at most 128"
    assert why["float16"] == "dtype=float16"
    assert why["int8_per_head"] == "cache_dtype=int8"
    assert why["head_major"] == "no parameter kv_layout"
    assert {str(o.case) for o in report.passed} >= {"one_token", "mqa", "thousands", "only_padding"}
    assert "not served (no parameter sinks): sinks" in str(report)

    nothing = verify_kernel(plain, "paged_attention_v1", cases=[case("sinks")])
    assert not nothing.ok
    assert "nothing was verified" in str(nothing)


def test_what_a_function_must_not_do() -> None:
    one = case("one_token")

    def writes(q: Any, k: Any, v: Any, tables: Any, seq_lens: Any) -> Any:
        out = attention.paged_attention(q, k, v, tables, seq_lens)
        k[0] = 0
        return out

    for function, message in (
        (writes, "one_token: the function has changed its argument 1"),
        (lambda *arrays: arrays[0][0], r"the answer has shape \(4, 64\) and must have \(1, 4, 64\)"),
        (lambda *arrays: None, "the function gives nothing back"),
        (lambda *arrays: arrays[0] * np.nan, "one_token: row 0, head 0, element 0 is nan and must be"),
    ):
        with pytest.raises(WrongResult, match=message):
            check(function, "paged_attention_v1", one)


def test_terms_spare_a_function_what_it_does_not_stand() -> None:
    """One that reads whole tables, and multiplies what it must not see by zero."""

    def reads_all(q: Any, k: Any, v: Any, tables: Any, seq_lens: Any) -> Any:
        tokens = [x[tables].reshape(len(q), -1, *x.shape[2:]).astype(np.float32) for x in (k, v)]
        k, v = (np.repeat(x, q.shape[1] // x.shape[2], axis=2) for x in tokens)
        s = np.einsum("shd,sthd->sht", q.astype(np.float32), k) * q.shape[2] ** -0.5
        s = np.where(np.arange(k.shape[1]) < seq_lens[:, None, None], s, -1e30)
        weights = np.exp(s - s.max(axis=2, keepdims=True)) * (seq_lens[:, None, None] > 0)
        return np.einsum("sht,sthd->shd", weights, v) / np.maximum(weights.sum(2), 1e-30)[..., None]

    around = case("around_a_block")
    check(reads_all, "paged_attention_v1", around, Terms(stale="zero", padding="null"))
    with pytest.raises(WrongResult, match="is nan and must be .*; slots that may not .* with stale='zero'"):
        check(reads_all, "paged_attention_v1", around, Terms(padding="null"))
    with pytest.raises(IndexError):
        check(reads_all, "paged_attention_v1", around, Terms(stale="zero"))


def test_an_array_of_any_framework_comes_back() -> None:
    class OnlyDlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    want = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(frameworks.to_numpy(OnlyDlpack(want)), want)
    small = frameworks.to("jax")(want.astype(jnp.bfloat16))
    assert frameworks.to_numpy(small).dtype == jnp.bfloat16
    check(ops.copy_blocks, "copy_blocks", cases_of("copy_blocks")[4], Terms(arrays="jax"))


def test_shrinking_stops_in_time_and_gives_back_what_fails_only_by_chance() -> None:
    calls = []

    def broken_at_first(*arrays: Any) -> Any:
        calls.append(arrays[0].shape)
        return arrays[0] * (0 if len(calls) == 1 else np.nan)

    given = case("around_a_tile")
    report = verify_kernel(broken_at_first, "paged_attention_v1", cases=[given], shrink_seconds=0)
    assert report.smallest == given
    assert len(calls) == 4, "the case, and the sentence about it, each with zeros in unread slots, too"
    once = DecodeCase("once", seq_lens=(3, 70))
    assert verify_kernel(lambda *a: a[0] * np.nan, "paged_attention_v1", cases=[once]).smallest == (
        dataclasses.replace(
            once, name="smallest", seq_lens=(0,), num_q_heads=1, num_kv_heads=1, head_dim=8, block_size=1,
            dtype="float32", partition_size=16,
        )
    )  # fmt: skip


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(
        "from tests.verify.mutants.sound.cache import *\n"
        "def off(caches, pairs):\n    return copy_blocks(caches, pairs[:-8])\n"
    )
    verify = ["verify", "kernel"]
    assert cli.main([*verify, "theirs:copy_blocks", "--op", "copy_blocks"]) == 0
    assert "copy_blocks: 7 cases passed, 0 failed, 0 not served" in capsys.readouterr().out
    assert cli.main([*verify, "theirs:off", "--op", "copy_blocks"]) == 1
    said = capsys.readouterr()
    assert "the smallest failing case" in said.out
    assert "from theirs import off" in said.out
    assert (tmp_path / "off-copy_blocks.npz").exists()
    for wrong, message in (
        (["theirs"], "must be MODULE:NAME"),
        (["theirs:nothing"], "cannot be imported: AttributeError"),
        (["theirs:np"], "must be a function"),
        (["theirs:off", "--arrays", "torc"], "arrays='torc' must be one of numpy, jax, torch"),
        (["theirs:off", "--only", "head"], "only='head' must be NAME=VALUE"),
        (["theirs:off", "--only", "head=1"], "only='head' must be one of"),
        (["theirs:off", "--without", "arms"], "without='arms' must be one of"),
    ):
        assert cli.main([*verify, *wrong, "--op", "copy_blocks"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(NotServed, match="no parameter sinks"):
        check(lambda q, k, v, tables, lens: q, "paged_attention_v1", case("sinks"))
    with pytest.raises(InputError, match="op='paged' must be one of"):
        cases_of("paged")
