"""The kernels in C++, called by XLA and for each target: products against NumPy in float64, attention
against its oracle."""

import _ctypes
import ctypes
import dataclasses
import functools
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.models import layers
from pallas_kernels import layouts, native, ops
from pallas_kernels.layouts import LAYOUTS, Fp8
from pallas_kernels.native import library
from reference import attention as reference_attention
from tests.kernels import native_targets
from tests.kernels.native_targets import Kernels

# For what does not depend on the target: the processor's own.
DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(bool(why), reason=f"no native kernels: {why}"))
    for dtype in ("float32", "bfloat16")
    for why in [native_targets.why_not(dtype)]
]
F32, BF16 = map(jnp.dtype, ("float32", "bfloat16"))
SINKS = {"sinks": np.array([-3, 0, 1.5, 4, -np.inf, 2], np.float32)}  # of six query heads
ALL_BIASES = {"soft_cap": 1.5, "alibi_slopes": np.linspace(0, 0.2, 6, dtype=np.float32), **SINKS}
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(params=["xla", *native_targets.EACH])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_targets.kernels(request.param)


def draw(seed: int, dtype: str, *shape: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


@each_dtype
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"),
    [(1, 1, 1), (2, 31, 17), (9, 64, 32), (23, 33, 100), (16, 576, 200)],
)
def test_product(kernels: Kernels, dtype: str, num_rows: int, in_features: int, out_features: int) -> None:
    x, weight = draw(1, dtype, num_rows, in_features), draw(2, dtype, out_features, in_features)
    y = kernels.product(x, weight)
    assert (y.dtype, y.shape) == (np.float32, (num_rows, out_features))
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    # Up to 576 sums of up to 70, each rounded to 24 bits: 2e-6 each and, as they are up and down, 24 of them.
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=5e-5)


@each_dtype
def test_bits_of_a_row_do_not_depend_on_the_others(kernels: Kernels, dtype: str) -> None:
    """The bits depend neither on the number of rows, nor on which rows are zero: those give zeros."""
    x, weight = draw(1, dtype, 40, 95), draw(2, dtype, 80, 95)
    together = kernels.product(x, weight)
    for num_rows in (1, 7):
        np.testing.assert_array_equal(
            bits(kernels.product(x[-num_rows:], weight)), bits(together[-num_rows:])
        )
    lives = [range(40 - count, 40) for count in range(20)] + [[0, 38], [5, 6, 30], range(3, 21)]
    for live in lives:
        is_live = np.isin(np.arange(40), live)[:, None]
        y = kernels.product(np.where(is_live, x, -0.0).astype(x.dtype), weight)
        np.testing.assert_array_equal(bits(y), bits(np.where(is_live, together, np.float32(0))))


@each_dtype
def test_what_is_not_a_number_stays_in_its_row_and_column(kernels: Kernels, dtype: str) -> None:
    x, weight = draw(1, dtype, 9, 24), draw(2, dtype, 40, 24)
    x[4, 7], weight[33, 3] = np.nan, np.inf
    strange = ~np.isfinite(kernels.product(x, weight))
    assert strange[4].all()
    assert strange[:, 33].all()
    assert strange.sum() == 40 + 9 - 1


@each_dtype
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"),
    [(9, 3, 64), (14, 2, 80), (5, 5, 24), (3, 1, 7), (2, 1, 256), (8, 1, 101)],
)
def test_attention_of_any_head(
    kernels: Kernels, dtype: str, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Heads that fill registers and that do not, groups of more heads than are summed at once."""
    lengths = np.array([1, 50, 133, 16])
    q, k, v, tables = paged(dtype, num_q_heads, num_kv_heads, head_dim, block_size=8, lengths=lengths)
    out = kernels.attend(q, k, v, tables, lengths - 1, lengths, scale=0.125)
    check(out, q, k, v, tables, lengths - 1, lengths, window=None)


@each_dtype
@pytest.mark.parametrize(
    ("window", "chunk", "biases"),
    [(None, None, {}), (20, None, {}), (None, 33, {}), (None, None, SINKS), (20, None, ALL_BIASES)],
    ids=["all", "window", "chunk", "sinks", "window and biases"],
)
def test_attention_of_a_tile(
    kernels: Kernels, dtype: str, window: int | None, chunk: int | None, biases: dict[str, Any]
) -> None:
    """Each query sees the tokens up to its own, and has the bits that it has alone; padding gives zeros."""
    lengths, num_queries = np.array([70, 33, 0, 104]), 7  # as many rows as K is turned for, and a few
    starts = np.array([63, 30, 0, 97])
    begins = starts // chunk * chunk if chunk else lengths - (window + 6 if window else lengths)
    _, k, v, tables = paged(dtype, 6, 2, 64, block_size=16, lengths=lengths, begins=begins)
    q = draw(9, dtype, 4, num_queries, 6, 64)
    bounds = {"window": window, "chunk": chunk, **biases}
    out = kernels.attend(q, k, v, tables, starts, lengths, scale=0.125, **bounds)
    check(out, q, k, v, tables, starts, lengths, **bounds)
    assert not out[1, 3:].any()
    for i in range(num_queries):
        alone = kernels.attend(q[:, i : i + 1], k, v, tables, starts + i, lengths, scale=0.125, **bounds)
        np.testing.assert_array_equal(bits(alone[:, 0]), bits(out[:, i]))


def test_a_window_of_some_row_begins_at_each_token(kernels: Kernels) -> None:
    """Nine heads a query and 32 queries: of every 32 tokens each is the first that some few rows see."""
    lengths = np.array([70])
    q, k, v, tables = paged("float32", 9, 1, 16, block_size=16, lengths=lengths)
    q = draw(9, "float32", 1, 32, 9, 16)
    out = kernels.attend(q, k, v, tables, lengths - 32, lengths, scale=0.125, window=20)
    check(out, q, k, v, tables, lengths - 32, lengths, window=20)


@each_dtype
@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize(
    ("name", "as_bytes"),
    [
        (name, as_bytes)
        for name, layout in LAYOUTS.items()
        for as_bytes in ((False, True) if isinstance(layout, Fp8) else (False,))
        if layout.view()
    ],
)
def test_attention_reads_layouts_where_they_lie(
    kernels: Kernels, dtype: str, name: str, as_bytes: bool, head_dim: int
) -> None:
    """Strides, and 8 bits a number with scales of all kinds: the same as of what is read of the blocks."""
    layout, lengths = LAYOUTS[name], np.array([1, 50, 33])
    starts = np.maximum(lengths - 6, 0)
    if isinstance(layout, Fp8):
        layout = dataclasses.replace(layout, k_scale=(0.5, 0.25), v_scale=2.0, as_bytes=as_bytes)
    block_size = 1 if name == "token" else 8
    num_blocks = 1 + 64 // block_size * 3
    pool = layouts.create(layout, num_blocks, block_size, 2, head_dim, jnp.dtype(dtype))
    slots = np.arange(block_size, num_blocks * block_size, dtype=np.int32)
    k, v = draw(3, dtype, 2, len(slots), 2, head_dim)
    pool = ops.write(pool, k, v, slots)
    tables = 1 + np.random.default_rng(4).permutation(num_blocks - 1).reshape(3, -1)
    q = draw(5, dtype, 3, 6, 6, head_dim)
    k, v = (np.asarray(x) for x in pool.read(jnp.arange(num_blocks), jnp.dtype("float32")))
    out = kernels.attend_to(q, pool, tables, starts, lengths, scale=0.125)
    check(out, q, k, v, tables, starts, lengths, window=None)
    alone = kernels.attend_to(q[:, :1], pool, tables, starts, lengths, scale=0.125, soft_cap=1.5)
    check(alone, q[:, :1], k, v, tables, starts, lengths, window=None, soft_cap=1.5)


@each_dtype
@pytest.mark.parametrize(("head_dim", "window"), [pytest.param(64, None, marks=pytest.mark.slow), (24, 20)])
def test_attention_unpacks_four_bits(kernels: Kernels, dtype: str, head_dim: int, window: int | None) -> None:
    """Groups that are whole, the newest tokens as they are, from a window's middle of a group on; alone and
    in a tile the same bits. What nobody has written is not a number.
    """
    lengths, layout = np.array([3, 50, 93]), LAYOUTS["int4_grouped"]
    starts = np.maximum(lengths - 5, 0)
    pool = layouts.create(layout, 10, 32, 2, head_dim, jnp.dtype(dtype))
    unwritten = {
        name: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0)
        for name, x in pool.arrays.items()
    }
    tables = 1 + np.random.default_rng(4).permutation(9).reshape(3, 3)
    slots = [
        tables[row, np.arange(n) // 32] * 32 + np.arange(n) % 32 for row, n in enumerate(lengths.tolist())
    ]
    k, v = draw(3, dtype, 2, int(lengths.sum()), 2, head_dim)
    pool = ops.write(
        dataclasses.replace(pool, arrays=unwritten), k, v, np.concatenate(slots).astype(np.int32)
    )
    newest = np.asarray(pool.arrays["new_group"])[tables[np.arange(3), lengths // 32]]
    assert newest.tolist() == [0, 1, 1], "each sequence has a group that is not whole"
    q = draw(5, dtype, 3, 5, 6, head_dim)
    options = {"window": window, **(ALL_BIASES if window else {})}
    out = kernels.attend_to(q, pool, tables, starts, lengths, scale=0.125, **options)
    k, v = (np.asarray(x) for x in pool.read(jnp.arange(10), jnp.dtype("float32")))
    check(out, q, k, v, tables, starts, lengths, **options)
    for i in (0, 4):
        at = starts + i
        alone = kernels.attend_to(q[:, i : i + 1], pool, tables, at, lengths, scale=0.125, **options)
        np.testing.assert_array_equal(bits(alone[:, 0]), bits(out[:, i]))


@each_dtype
def test_attention_weights_of_far_apart_scores(kernels: Kernels, dtype: str) -> None:
    """Scores of hundreds: exp(x) of what is far below the largest is nothing, of the largest one."""
    lengths = np.array([40])
    q, k, v, tables = paged(dtype, 1, 1, 32, block_size=8, lengths=lengths)
    k[tables[0, 2], 5] = q[0, 0] * 50
    for sign in (1, -1):
        out = kernels.attend(sign * q, k, v, tables, lengths - 1, lengths, scale=float(sign))[0, 0, 0]
        np.testing.assert_array_equal(out, v[tables[0, 2], 5, 0])
        # A sink beyond all scores leaves nothing, one far below them all.
        options = {"scale": float(sign), "sinks": np.array([-1e4], np.float32)}
        out = kernels.attend(sign * q, k, v, tables, lengths - 1, lengths, **options)[0, 0, 0]
        np.testing.assert_array_equal(out, v[tables[0, 2], 5, 0])
        options["sinks"] = np.array([1e4], np.float32)
        out = kernels.attend(sign * q, k, v, tables, lengths - 1, lengths, **options)
        np.testing.assert_allclose(out.astype(np.float32), 0, atol=1e-30)


def paged(dtype, num_q_heads, num_kv_heads, head_dim, *, block_size, lengths, begins=0):
    """Return a query for each sequence, and its K and V in shuffled blocks. What no query sees is NaN."""
    width = -(-int(lengths.max()) // block_size)
    num_blocks = 1 + len(lengths) * width
    k, v = draw(2, dtype, 2, num_blocks, block_size, num_kv_heads, head_dim)
    tables = 1 + np.random.default_rng(3).permutation(len(lengths) * width).reshape(len(lengths), width)
    slots = (tables[:, :, None] * block_size + np.arange(block_size)).reshape(len(lengths), -1)
    positions = np.arange(width * block_size)
    is_stale = (positions >= lengths[:, None]) | (positions < np.reshape(begins, (-1, 1)))
    for x in (k, v):
        x.reshape(-1, num_kv_heads, head_dim)[slots[is_stale]] = np.nan
    return draw(1, dtype, len(lengths), 1, num_q_heads, head_dim), k, v, tables.astype(np.int32)


def check(out, q, k, v, tables, starts, lengths, window, chunk=None, **biases) -> None:
    """Compare with the oracle, query by query."""
    assert out.dtype == q.dtype
    wide_q, wide_k, wide_v = (x.astype(np.float32) for x in (q, k, v))
    # Only the result is rounded: half a unit in the last of bfloat16's 8 bits.
    tolerance = 1e-5 if q.dtype == np.float32 else 2**-8
    for i in range(q.shape[1]):
        seen = np.where(starts + i < lengths, starts + i + 1, 0).astype(np.int32)
        want = reference_attention.paged_attention(
            *(wide_q[:, i], wide_k, wide_v, tables, seen),
            scale=0.125,
            sliding_window=window,
            attention_chunk=chunk,
            **biases,
        )
        got = out[:, i].astype(np.float32)[seen > 0]
        np.testing.assert_allclose(got, want[seen > 0], rtol=tolerance, atol=tolerance * 1e-2 + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_at_the_same_time_do_not_wait_for_each_other(dtype: str) -> None:
    """XLA runs what is independent on all threads of its pool, and each product offers its panels to them."""
    packed = native.pack(jnp.asarray(draw(1, dtype, 640, 64)))
    xs = [jnp.asarray(draw(seed, dtype, 16, 64)) for seed in range(12)]
    expected = [np.asarray(native.product(x, packed, 640)) for x in xs]
    together = jax.jit(lambda xs: [native.product(x, packed, 640) for x in xs])
    answers = []

    def call() -> None:
        answers.extend(jax.device_get(together(xs)) for _ in range(100))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(answers) == 300, "a call hangs"
    for answer in answers:
        np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_that_do_not_fit(dtype: str) -> None:
    packed = native.pack(jnp.asarray(draw(1, dtype, 40, 64)))
    with pytest.raises(ValueError, match=r"shape=\(2, .* does not take rows of 66 to 40"):
        native.product(draw(2, dtype, 3, 66), packed, 40)
    with pytest.raises(ValueError, match=r"does not take rows of 64 to 72"):
        native.product(draw(2, dtype, 3, 64), packed, 72)
    with pytest.raises(TypeError, match="must be the packed weight's"):
        native.product(draw(2, dtype, 3, 64).astype(jnp.float16), packed, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_the_same_without_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, bias, x = (
        jnp.asarray(draw(seed, dtype, *shape)) for seed, shape in enumerate([(48, 80), (80,), (5, 48)])
    )
    weights, biases = [jnp.zeros((80, 48), dtype), kernel.T], [jnp.zeros(80, dtype), bias]
    packed = layers.Linear(weights, biases)
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    plain = layers.Linear(weights, biases)
    assert (packed.implementation, plain.implementation) == ("native", "xla")
    np.testing.assert_allclose(packed(x, 1), plain(x, 1), rtol=1e-5, atol=1e-5)


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.why_not(jnp.dtype("float16")) == "the dtype is float16"
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    assert native.why_not(jnp.dtype("float32")) == "JAXPAGED_NATIVE is 0"


@pytest.mark.parametrize(
    ("machine", "features", "served", "words"),
    [
        (
            "x86_64",
            {"sse2", *library.AVX512, "avx512_bf16"},
            "avx512_bf16, avx512, avx2, sse2",
            "AVX-512 with BF16",
        ),
        ("x86_64", {"sse2", *library.AVX512} - {"avx512vl"}, "avx2, sse2", "AVX2 with FMA"),
        ("x86_64", {"sse2", "avx2"}, "sse2", "none"),  # XLA's code is as fast
        ("x86_64", set(), "none", "none"),  # where they cannot be read
        ("aarch64", {"asimd"}, "neon", "NEON"),
        ("arm64", set(), "neon", "NEON"),
        ("riscv64", set(), "none", "none"),
    ],
)
def test_the_target_is_the_fastest_of_the_processor(machine, features, served, words, monkeypatch) -> None:
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "_cpu_features", lambda: frozenset(features))
    monkeypatch.setenv("JAXPAGED_NATIVE", "avx3")
    with pytest.raises(ValueError, match=f"'avx3' must be 0, 1 or a target of this processor: {served}$"):
        native.why_not(jnp.dtype("float32"))
    monkeypatch.delenv("JAXPAGED_NATIVE")
    assert native.instructions() == words
    if words == "none":
        assert native.why_not(jnp.dtype("float32")) == f"there are no faster kernels for this {machine}"
    monkeypatch.setattr(library, "_load", lambda *_: None)
    for target in set(served.split(", ")) - {"none"}:
        monkeypatch.setenv("JAXPAGED_NATIVE", target)
        assert library.registered("product", jnp.dtype("bfloat16")) == f"jaxpaged_product_bfloat16_{target}"
        assert native.instructions() == library.TARGETS[target].words


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fused", []),
        ("int8_per_token", [("attention_of_bytes",)]),
        ("int4_grouped", [("attention_of_nibbles",)]),
    ],
)
def test_what_a_cache_needs_is_made_known_before_its_programs_are_read(name, more, monkeypatch) -> None:
    """A program that is read from the disk is not traced: nothing else asks for its functions."""
    asked: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(library, "target", lambda: "avx2")
    monkeypatch.setattr(
        library, "_load", lambda target, dtype, functions: asked.append((dtype.name, functions))
    )
    assert native.why_not_cache(LAYOUTS[name], jnp.dtype("bfloat16")) is None
    assert list(dict.fromkeys(asked)) == [("bfloat16", functions) for functions in (library.USUAL, *more)]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """Call it for a compiler that always writes the same bytes, and a line into tmp_path / "calls"."""
    monkeypatch.setattr(library, "compilation_cache_dir", lambda: tmp_path)
    monkeypatch.delenv("JAXPAGED_NATIVE", raising=False)
    # Nothing is known yet; afterwards what was known is: XLA takes no second handler of a name.
    monkeypatch.setattr(library, "load_once", functools.cache(library.load_once.__wrapped__))

    def write(written: bytes) -> str:
        (tmp_path / "written").write_bytes(written)
        (tmp_path / "calls").touch()
        script = f'while [ "$1" != -o ]; do shift; done; cp {tmp_path}/written "$2"; echo >> {tmp_path}/calls'
        (tmp_path / "compiler").write_text(script)
        return f"sh {tmp_path}/compiler"

    return write


# Some library: what is in it does not matter before its functions are looked up.
SOME_LIBRARY = Path(_ctypes.__file__).read_bytes()


def test_it_is_compiled_once(compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_open", lambda file, function: ctypes.CDLL(str(file)))
    command, (first, second, *_) = compiler(SOME_LIBRARY), library.TARGETS.values()
    calls = tmp_path / "calls"
    for _ in range(2):
        library.handler_of("product", F32, first, command)
    assert len(calls.read_text()) == 1
    library.handler_of("product", F32, second, command)
    assert len(calls.read_text()) == 2, "for another target"
    library.handler_of("product", BF16, second, command)
    assert len(calls.read_text()) == 3, "for another dtype"
    for file in tmp_path.glob("native*"):
        file.unlink()
        file.write_bytes(b"damaged")
    library.handler_of("product", F32, second, command)
    assert len(calls.read_text()) == 4, "instead of a damaged one"
    sources = shutil.copytree(library.SOURCES, tmp_path / "sources")
    (sources / "vector.h").write_text("")
    monkeypatch.setattr(library, "SOURCES", sources)
    library.handler_of("product", F32, first, command)
    assert len(calls.read_text()) == 5, "from other sources"
    monkeypatch.setattr(library, "compilation_cache_dir", lambda: None)
    for _ in range(2):
        library.handler_of("product", F32, first, command)
    assert len(calls.read_text()) == 7, "each time where it cannot be kept"


@pytest.mark.skipif(not library.targets(), reason="no native kernels for this processor")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("false", "'false' failed with exit code 1: "),
        ("no-such-compiler", "'no-such-compiler' makes no library: .*No such file or directory: "),
        ('g++ "-O3', "'g\\+\\+ \"-O3' makes no library: No closing quotation: "),
        (" ", "' ' makes no library: its name is empty: "),
        ("true", "'true' makes no library: .*cannot open"),
        (b"damaged", "makes no library: .*(too short|invalid)"),
        (SOME_LIBRARY, "makes no library: .*jaxpaged_product"),
        ("", "there is no C\\+\\+ compiler: .*; install one, for example with apt install g\\+\\+$"),
    ],
)
def test_without_a_compiler_xla_does_the_work_and_it_is_said_once(
    given: str | bytes, why: str, compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("CXX", compiler(given) if isinstance(given, bytes) else given)
    if not given:
        monkeypatch.setenv("PATH", "")
    message = native.why_not(jnp.dtype("float32"))
    assert re.search(why, message), message
    assert "XLA's attention and products take two to three times as long; " in message
    assert "\n" not in message
    assert layers.Linear([jnp.zeros((8, 8))]).implementation == "xla"
    assert [record.getMessage() for record in caplog.records] == [f"no native kernels: {message}"]
    assert not [*tmp_path.glob("native*")]
