"""The kernels in C++: products against NumPy in float64, attention against its oracle."""

import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.models import layers
from pallas_kernels import native, ops
from pallas_kernels.native import library
from reference import attention as reference_attention

DTYPES = [
    pytest.param(dtype, marks=pytest.mark.skipif(bool(why), reason=f"no native product: {why}"))
    for dtype in ("float32", "bfloat16")
    for why in [native.why_not(jnp.dtype(dtype))]
]


def draw(seed: int, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [1, 31, 64])
@pytest.mark.parametrize("out_features", [1, 17, 32, 100])
def test_product(dtype: str, in_features: int, out_features: int) -> None:
    kernel = draw(1, dtype, in_features, out_features)
    packed = native.pack(kernel.T)
    for num_rows in (1, 2, 3, 5, 8, 9, 23):
        x = draw(num_rows, dtype, num_rows, in_features)
        y = native.product(x, packed, out_features)
        assert (y.dtype, y.shape) == (jnp.float32, (num_rows, out_features))
        expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_as_wide_as_models_are(dtype: str) -> None:
    x, kernel = draw(1, dtype, 48, 1536), draw(2, dtype, 1536, 576)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(native.product(x, native.pack(kernel.T), 576), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: str) -> None:
    x, packed = draw(1, dtype, 40, 96), native.pack(draw(2, dtype, 96, 80).T)
    together = np.asarray(native.product(x, packed, 80))
    for num_rows in range(1, 40):
        alone = np.asarray(native.product(x[-num_rows:], packed, 80))
        assert np.array_equal(alone.view(np.int32), together[-num_rows:].view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("live", [[], [0], [38], [5, 6, 30], [*range(3, 21)]])
def test_rows_of_zeros_give_zeros_and_leave_the_others_alone(dtype: str, live: list[int]) -> None:
    x, packed = draw(1, dtype, 40, 96), native.pack(draw(2, dtype, 96, 80).T)
    everything = np.asarray(native.product(x, packed, 80))
    is_live = np.isin(np.arange(40), live)
    y = np.asarray(native.product(jnp.where(is_live[:, None], x, -0.0), packed, 80))
    assert np.array_equal(y[is_live], everything[is_live])
    assert np.array_equal(y[~is_live].view(np.int32), np.zeros_like(y[~is_live]).view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row_and_column(dtype: str) -> None:
    x, kernel = draw(1, dtype, 9, 24), draw(2, dtype, 24, 40)
    y = native.product(x.at[4, 7].set(jnp.nan), native.pack(kernel.at[3, 33].set(jnp.inf).T), 40)
    strange = ~np.isfinite(np.asarray(y))
    assert strange[4].all()
    assert strange[:, 33].all()
    assert strange.sum() == 40 + 9 - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_at_the_same_time_do_not_wait_for_each_other(dtype: str) -> None:
    """XLA runs what is independent on all threads of its pool, and each product offers its panels to them."""
    packed = native.pack(draw(1, dtype, 64, 640).T)
    xs = [draw(seed, dtype, 16, 64) for seed in range(12)]
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
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (14, 2, 80), (5, 5, 24), (3, 1, 7), (2, 1, 256)]
)
def test_attention_of_any_head(dtype: str, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Heads that fill registers and that do not, groups of more heads than are summed at once."""
    lengths = np.array([1, 50, 133, 16], np.int32)
    q, k, v, tables = paged(dtype, num_q_heads, num_kv_heads, head_dim, block_size=8, lengths=lengths)
    out = attend(q[:, None], k, v, tables, lengths - 1, lengths)[:, 0]
    assert out.dtype == q.dtype
    wide = [np.asarray(x, np.float32) for x in (q, k, v)]
    want = reference_attention.paged_attention(*wide, np.asarray(tables), lengths, scale=0.125)
    # Only the result is rounded: half a unit in the last of bfloat16's 8 bits.
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(
        np.asarray(out, np.float32), want, rtol=tolerance, atol=tolerance * 1e-2 + 1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_weights_of_far_apart_scores(dtype: str) -> None:
    """Scores of hundreds: exp(x) of what is far below the largest is nothing, of the largest one."""
    lengths = np.array([40], np.int32)
    q, k, v, tables = paged(dtype, 1, 1, 32, block_size=8, lengths=lengths)
    k = k.at[tables[0, 2], 5].set(q[0] * 50)
    out = attend(q[:, None], k, v, tables, lengths - 1, lengths, scale=1.0)[0, 0, 0]
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(v[tables[0, 2], 5, 0], np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_same_bits_in_a_tile_and_alone(dtype: str) -> None:
    lengths = np.array([70, 33], np.int32)
    _, k, v, tables = paged(dtype, 6, 2, 64, block_size=16, lengths=lengths)
    tiles = draw(9, dtype, 2, 5, 6, 64)
    together = attend(tiles, k, v, tables, lengths - 5, lengths)
    for i in range(5):
        alone = attend(tiles[:, i : i + 1], k, v, tables, lengths - 5 + i, lengths)
        np.testing.assert_array_equal(
            np.asarray(alone[:, 0], np.float32), np.asarray(together[:, i], np.float32)
        )


def paged(dtype: str, num_q_heads: int, num_kv_heads: int, head_dim: int, *, block_size: int, lengths):
    """A query for each sequence, and its K and V in shuffled blocks among blocks of NaN."""
    width = -(-int(lengths.max()) // block_size)
    num_blocks = 1 + len(lengths) * width
    k, v = draw(2, dtype, 2, num_blocks, block_size, num_kv_heads, head_dim)
    tables = 1 + np.random.default_rng(3).permutation(len(lengths) * width).reshape(len(lengths), width)
    slots = tables[:, :, None] * block_size + np.arange(block_size)
    stale = slots.reshape(len(lengths), -1)[np.arange(width * block_size) >= lengths[:, None]]
    shape = k.shape
    k, v = (x.reshape(-1, *shape[2:]).at[stale].set(jnp.nan).reshape(shape) for x in (k, v))
    return draw(1, dtype, len(lengths), num_q_heads, head_dim), k, v, jnp.asarray(tables, jnp.int32)


def attend(*arrays, scale: float = 0.125) -> jax.Array:
    return ops.tiled_paged_attention(*map(jnp.asarray, arrays), scale=scale, implementation="native")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_that_do_not_fit(dtype: str) -> None:
    packed = native.pack(draw(1, dtype, 64, 40).T)
    with pytest.raises(ValueError, match=r"shape=\(2, .* does not take rows of 66 to 40"):
        native.product(draw(2, dtype, 3, 66), packed, 40)
    with pytest.raises(ValueError, match=r"does not take rows of 64 to 72"):
        native.product(draw(2, dtype, 3, 64), packed, 72)
    with pytest.raises(TypeError, match="must be the packed weight's"):
        native.product(draw(2, dtype, 3, 64).astype(jnp.float16), packed, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_the_same_without_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, bias, x = draw(1, dtype, 48, 80), draw(2, dtype, 80), draw(3, dtype, 5, 48)
    weights, biases = [jnp.zeros((80, 48), dtype), kernel.T], [jnp.zeros(80, dtype), bias]
    packed = layers.Linear(weights, biases)
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    plain = layers.Linear(weights, biases)
    assert (packed.is_packed, plain.is_packed) == (True, False)
    np.testing.assert_allclose(packed(x, 1), plain(x, 1), rtol=1e-5, atol=1e-5)


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.why_not(jnp.dtype("float16")) == "the dtype is float16"
    monkeypatch.setenv("JAXPAGED_NATIVE", "0")
    assert native.why_not(jnp.dtype("float32")) == "JAXPAGED_NATIVE is 0"


@pytest.fixture
def fresh_load():
    """`native` as in a process that has not compiled it yet."""
    library._load.cache_clear()
    yield
    library._load.cache_clear()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = library.compiled("c++")
    assert [*(tmp_path / "jaxpaged").iterdir()] == [made]
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)
        assert library.compiled("c++") == made
    sources = shutil.copytree(library.SOURCES, tmp_path / "sources")
    (sources / "another.cc").write_text("int another;")
    monkeypatch.setattr(library, "SOURCES", sources)
    assert library.compiled("c++") != made


@pytest.mark.usefixtures("fresh_load")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiler_that_fails_is_told_in_words(
    dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert native.why_not(jnp.dtype(dtype)) == "false failed with exit code 1"
    assert not layers.Linear([draw(1, dtype, 8, 8)]).is_packed
    library._load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in native.why_not(jnp.dtype(dtype))
    library._load.cache_clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert native.why_not(jnp.dtype(dtype)) == "there is no C++ compiler"
    assert not (tmp_path / "jaxpaged").exists() or not [*(tmp_path / "jaxpaged").iterdir()]
