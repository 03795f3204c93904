"""Recurrent layers over paged blocks: the recurrence in NumPy and float64 is the oracle, and bits are equal
however tokens are divided.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops import states
from reference.states import causal_convolution, recurrence, selective_scan


@dataclass(frozen=True)
class Case:
    """A recurrent layer's kind and sizes."""

    name: str
    heads: int
    key_heads: int
    k_dim: int
    v_dim: int
    chunk: int = 16
    has_delta_rule: bool = True
    decay_by_channel: bool = False

    def __str__(self) -> str:
        return self.name

    def blocks(self, num_blocks: int) -> states.StateBlocks:
        return states.create(
            num_blocks,
            self.heads,
            self.k_dim,
            self.v_dim,
            num_key_heads=self.key_heads,
            chunk=self.chunk,
            has_delta_rule=self.has_delta_rule,
            decay_by_channel=self.decay_by_channel,
        )

    def tokens(self, num_tokens: int, seed: int = 0) -> dict[str, Any]:
        """Return q, k, v, log_decay and beta of a sequence, with weak, middling and strong decay."""
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((num_tokens, self.key_heads, self.k_dim)) for _ in "qk")
        if self.has_delta_rule:
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
        decay_dim = self.k_dim if self.decay_by_channel else 1
        rate = rng.choice([0.001, 0.05, 2.0], (num_tokens, self.heads, 1))
        arrays = {
            "q": q / self.k_dim**0.5,
            "k": k,
            "v": rng.standard_normal((num_tokens, self.heads, self.v_dim)),
            "log_decay": -np.abs(rng.standard_normal((num_tokens, self.heads, decay_dim))) * rate,
            "beta": 1 / (1 + np.exp(-rng.standard_normal((num_tokens, self.heads)))),
        }
        made: dict[str, Any] = {name: x.astype(np.float32) for name, x in arrays.items()}
        return made if self.has_delta_rule else made | {"beta": None}


CASES = [
    Case("gated delta rule", 4, 2, 32, 32),
    Case("gated delta rule, one head, odd widths", 1, 1, 24, 40),
    Case("gated delta rule, chunks of 32", 2, 2, 64, 32, chunk=32),
    Case("decay by channel", 2, 2, 32, 32, decay_by_channel=True),
    Case("decay by channel, chunks of 8", 3, 1, 16, 24, 8, decay_by_channel=True),
    Case("additive", 4, 1, 32, 16, has_delta_rule=False),
    Case("additive, chunks of 64", 16, 2, 16, 64, 64, has_delta_rule=False),
]
QUICK = CASES[0]
each_case = pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c is QUICK else pytest.mark.slow) for c in CASES]
)
advance = jax.jit(states.advance, donate_argnums=0)


class Sequences:
    """Sequences over scattered blocks of one pool, whose unused numbers are NaN."""

    def __init__(self, case: Case, num_seqs: int, max_tokens: int, seed: int = 0) -> None:
        max_blocks = -(-max_tokens // case.chunk)
        blocks = case.blocks(1 + num_seqs * max_blocks)
        self.blocks = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), blocks)
        ids = 1 + np.random.default_rng(seed).permutation(num_seqs * max_blocks)
        self.tables = ids.reshape(num_seqs, max_blocks).astype(np.int32)
        self.lengths = np.zeros(num_seqs, np.int32)

    def append(self, tokens: list[dict[str, Any]], counts: list[int], width: int) -> list[np.ndarray]:
        """Compute each sequence's next tokens in one call of this width. Return their outputs."""
        padded: dict[str, Any] = {}
        for name, x in tokens[0].items():
            if x is None:
                padded[name] = None
                continue
            padded[name] = np.full((len(tokens), width, *x.shape[1:]), np.nan, np.float32)
            for i, (its, count) in enumerate(zip(tokens, counts, strict=True)):
                first = self.lengths[i]
                padded[name][i, :count] = its[name][first : first + count]
        arrays = padded["q"], padded["k"], padded["v"], padded["log_decay"], padded["beta"]
        out, self.blocks = advance(
            self.blocks, *arrays, self.tables, self.lengths, np.array(counts, np.int32)
        )
        self.lengths = self.lengths + np.array(counts, np.int32)
        return [np.asarray(out[i, :count]) for i, count in enumerate(counts)]


def in_pieces(case: Case, tokens: dict[str, Any], size: int) -> np.ndarray:
    total = len(tokens["v"])
    alone = Sequences(case, 1, total, seed=size)
    pieces = [min(size, total - first) for first in range(0, total, size)]
    return np.concatenate([alone.append([tokens], [count], size)[0] for count in pieces])


@each_case
def test_outputs_are_those_of_the_recurrence(case: Case) -> None:
    tokens = case.tokens(60)
    want, _ = recurrence(**tokens)
    got = in_pieces(case, tokens, 60)
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()


@each_case
def test_bits_do_not_depend_on_how_a_prompt_is_divided(case: Case) -> None:
    tokens = case.tokens(60, seed=1)
    want = in_pieces(case, tokens, 60)
    for size in (1, 7, case.chunk):
        np.testing.assert_array_equal(in_pieces(case, tokens, size), want, err_msg=str(size))


@each_case
def test_bits_do_not_depend_on_company(case: Case) -> None:
    """Prompts and single tokens of other sequences, and padding of a row that has none."""
    each = [case.tokens(40, seed) for seed in range(5)]
    want = [in_pieces(case, tokens, 40) for tokens in each]
    together = Sequences(case, 5, 40)
    found: list[list[np.ndarray]] = [[] for _ in each]
    for counts in ([9, 1, 0, 20, 16], [1, 20, 17, 1, 0], [20, 1, 20, 19, 20], [10, 18, 3, 0, 4]):
        for rows, out in zip(found, together.append(each, counts, 20), strict=True):
            rows.append(out)
    for rows, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.concatenate(rows), expected)


@each_case
@pytest.mark.parametrize(("first", "drafts"), [(37, 4), (30, 5), (32, 20), (15, 1)])
def test_tokens_taken_back_leave_nothing(case: Case, first: int, drafts: int) -> None:
    """Within a chunk, across its end, and across two: the true tokens have the bits of a plain prompt."""
    tokens, wrong = case.tokens(60, seed=2), case.tokens(60, seed=3)
    want = in_pieces(case, tokens, 60)
    row = Sequences(case, 1, 60)
    row.append([tokens], [first], 60)
    row.append([wrong], [drafts], 60)
    row.lengths = np.array([first], np.int32)
    np.testing.assert_array_equal(row.append([tokens], [60 - first], 60)[0], want[first:])


@each_case
def test_another_sequence_goes_on_behind_a_shared_prefix(case: Case) -> None:
    """Poison all blocks of the prefix but the one that ends it, which alone is read."""
    tokens = case.tokens(4 * case.chunk, seed=4)
    want = in_pieces(case, tokens, 4 * case.chunk)
    rows = Sequences(case, 2, 4 * case.chunk)
    prefix = 2 * case.chunk
    rows.append([tokens, tokens], [prefix, 0], prefix)
    shared, alone = rows.tables[0, 1], rows.tables[0, 0]
    rows.tables[1, 1] = shared
    rows.lengths[1] = prefix
    rows.blocks = jax.tree.map(lambda x: x.at[alone].set(jnp.nan), rows.blocks)
    rest = rows.append([tokens, tokens], [0, prefix], prefix)[1]
    np.testing.assert_array_equal(rest, want[prefix:])


def test_what_does_not_fit_together_is_refused() -> None:
    case = QUICK
    tokens = case.tokens(4)
    arrays = [x[None] for x in tokens.values()]
    rest = np.array([[1]], np.int32), np.array([0], np.int32), np.array([4], np.int32)
    with pytest.raises(ValueError, match="beta must be given with the delta rule"):
        states.advance(case.blocks(2), *arrays[:4], None, *rest)
    with pytest.raises(ValueError, match=r"k.shape=\(1, 4, 1, 32\) must be \(1, 4, 2, 32\)"):
        states.advance(case.blocks(2), arrays[0], arrays[1][:, :, :1], *arrays[2:], *rest)
    with pytest.raises(ValueError, match="num_heads=3 must be a multiple of num_key_heads=2"):
        states.create(2, 3, 8, 8, num_key_heads=2)


def two_in_pieces(
    compute: Callable[..., Any], blocks: Any, tokens: dict[str, np.ndarray], sizes: list[tuple[int, int]]
) -> np.ndarray:
    """Return the outputs of all tokens of two sequences, computed in calls of so many tokens of each."""
    x = tokens["x"]
    starts, out = np.zeros(2, np.int32), np.zeros(x.shape, np.float32)
    for counts in sizes:
        new = {name: np.full((2, max(counts), *x.shape[2:]), np.nan, x.dtype) for name, x in tokens.items()}
        for name, padded in new.items():
            for i, count in enumerate(counts):
                padded[i, :count] = tokens[name][i, starts[i] : starts[i] + count]
        got, blocks = compute(blocks, **new, starts=starts, lengths=np.array(counts, np.int32))
        for i, count in enumerate(counts):
            out[i, starts[i] : starts[i] + count] = got[i, :count]
        starts = starts + np.array(counts, np.int32)
    assert (starts == x.shape[1]).all()
    return out


@dataclass(frozen=True)
class Convolution:
    """A causal convolution's sizes."""

    name: str
    kernel_size: int
    channels: int
    dtype: str = "float32"
    has_bias: bool = True

    def __str__(self) -> str:
        return self.name


CONVOLUTIONS = [
    Convolution("four tokens", 4, 48),
    Convolution("three tokens, bfloat16, odd channels", 3, 37, "bfloat16", False),
    Convolution("longer than a block", 7, 16),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_a_convolution_is_the_oracles_and_has_the_same_bits_in_any_pieces(case: Convolution) -> None:
    block_size, total = 5, 33
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((case.kernel_size, case.channels)).astype(case.dtype)
    bias = rng.standard_normal(case.channels).astype(case.dtype) if case.has_bias else None
    x = rng.standard_normal((2, total, case.channels)).astype(case.dtype)
    tables = 1 + rng.permutation(2 * 7).reshape(2, 7).astype(np.int32)
    rows = jnp.full((15, block_size, case.channels), jnp.nan, case.dtype)
    convolve = functools.partial(jax.jit(states.convolve), weight=weight, bias=bias, block_tables=tables)
    in_pieces = functools.partial(two_in_pieces, convolve, rows, {"x": x})
    want = in_pieces([(total, total)])
    for i in range(2):
        expected = causal_convolution(x[i], weight, bias)
        np.testing.assert_allclose(want[i], expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(in_pieces([(1, 1)] * total), want)
    np.testing.assert_array_equal(in_pieces([(4, 0), (1, 9), (20, 1), (8, 23)]), want)


@pytest.mark.parametrize("chunk", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("channels", [32, pytest.param(19, marks=pytest.mark.slow)])
def test_a_selective_scan_is_the_oracles_and_has_the_same_bits_in_any_pieces(
    chunk: int, channels: int
) -> None:
    total, state_size = 45, 16
    rng = np.random.default_rng(8)
    a = -np.exp(rng.standard_normal((channels, state_size))).astype(np.float32)
    shapes = {"x": channels, "dt": channels, "b": state_size, "c": state_size}
    tokens = {name: rng.standard_normal((2, total, n)).astype(np.float32) for name, n in shapes.items()}
    tokens["dt"] = np.log1p(np.exp(tokens["dt"]))
    tables = 1 + rng.permutation(12).reshape(2, 6).astype(np.int32)
    blocks = states.create_selective(13, channels, state_size, chunk=chunk)
    blocks = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), blocks)
    scan = functools.partial(jax.jit(states.selective_scan), a=a, block_tables=tables)
    in_pieces = functools.partial(two_in_pieces, scan, blocks, tokens)
    want = in_pieces([(total, total)])
    for i in range(2):
        expected, _ = selective_scan(*(x[i] for x in tokens.values()), a)
        assert np.abs(want[i] - expected).max() <= 3e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(in_pieces([(1, 1)] * total), want)
    np.testing.assert_array_equal(in_pieces([(4, 0), (1, 9), (20, 1), (20, 35)]), want)
