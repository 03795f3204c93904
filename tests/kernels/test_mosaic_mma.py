"""Attention by mma.sync and tcgen05, for GPUs that have no wgmma: in Pallas' GPU interpreter, and compiled.

The interpreter has no rule for `mma`: `primitives.rule` is one, acc + a @ b. The rule is justified by
`test_fragments_multiply_as_documented`: the registers that Mosaic's layouts give to each thread are those
that PTX names for mma.m16n8k16. All else of the kernel is run as it is.

An mma reads its operands in a way that the race detector sees. The interpreter knows tcgen05 and tensor
memory.

Unproven without a chip: that a GPU's sums are those of the rule, and the order of a warpgroup's four warps,
which the interpreter takes for one thread.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import compile_report, cuda_compiler
from jaxpaged.research.verify.cases.decode import DecodeCase
from jaxpaged.research.verify.cases.tiles import TileCase
from pallas_kernels import layouts, support
from pallas_kernels.gpu import targets, tuning
from pallas_kernels.gpu.prompt import program
from tests.kernels.checks import assert_close
from tests.kernels.interpreter import fresh_interpreter, is_run_with_more_threads, races_found
from tests.kernels.primitives import assert_used, interpretable, rule
from tests.kernels.test_mosaic_interpreter import ALONE, interpret
from tests.kernels.test_mosaic_tiles import launch
from tests.marks import slow_and_nightly

pytestmark = pytest.mark.usefixtures(fresh_interpreter.__name__)


def held(layout: plgpu.Layout, shape: tuple[int, int], lane: int) -> list[tuple[int, int]]:
    """Return the places of a [16 or 64, n] tile that a thread of the first warp holds, register by register.

    Two neighbours of a vector are two numbers of one register, or two registers of 32 bits.
    """
    its = layout.to_mgpu()
    tiled, rank = its.tiling.tile_shape(shape), len(shape)
    dims = [d for d in its.lane_dims if isinstance(d, int)]
    lanes = np.unravel_index(lane, [tiled[d] for d in dims])
    fixed = dict(zip([d % len(tiled) for d in dims], map(int, lanes), strict=True))
    fixed |= {d % len(tiled): 0 for d in its.warp_dims if isinstance(d, int)}
    vector = its.vector_dim % len(tiled)
    free = [1 if d in fixed or d == vector else size for d, size in enumerate(tiled)]
    places = []
    for register in np.ndindex(*free):
        for i in range(tiled[vector]):
            index = tuple(fixed.get(d, i if d == vector else at) for d, at in enumerate(register))
            places.append(tuple(its.tiling.untile_indices(index)))
    assert all(len(place) == rank for place in places)
    return places


# The fragments of mma.m16n8k16 for operands of 16 bits, by the PTX ISA: (row, column) of a thread's i-th
# number, of A [16, 16], B [16, 8] and C [16, 8].
def of_a(lane: int, i: int) -> tuple[int, int]:
    """Return the place of a0 to a7."""
    return lane // 4 + (0 if i % 4 < 2 else 8), lane % 4 * 2 + i % 2 + (0 if i < 4 else 8)


def of_b(lane: int, i: int) -> tuple[int, int]:
    """Return the place of b0 to b3."""
    return lane % 4 * 2 + i % 2 + (0 if i < 2 else 8), lane // 4


def of_c(lane: int, i: int) -> tuple[int, int]:
    """Return the place of c0 to c3."""
    return lane // 4 + (0 if i < 2 else 8), lane % 4 * 2 + i % 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fragments_multiply_as_documented(dtype: str) -> None:
    """Run the first warp's instruction on the registers that Mosaic's layouts fill; compare with the rule."""
    layouts = (getattr(plgpu.Layout, name)(jnp.dtype(dtype)) for name in ("MMA_LHS", "MMA_RHS", "MMA_ACC"))
    lhs, rhs, acc = layouts
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((64, 16), (16, 8), (64, 8)))
    fragments = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for whole, layout, place, fragment in zip(
        (a, b, c), (lhs, rhs, acc), (of_a, of_b, of_c), fragments, strict=True
    ):
        for lane in range(32):
            for i, at in enumerate(held(layout, whole.shape, lane)):
                fragment[place(lane, i)] = whole[at]
    product = fragments[0] @ fragments[1] + fragments[2]
    got = np.full((16, 8), np.nan)
    for lane in range(32):
        for i, at in enumerate(held(acc, c.shape, lane)):
            got[at] = product[of_c(lane, i)]
    np.testing.assert_array_equal(got, np.asarray(rule(*map(jnp.asarray, (c, a, b))))[:16])
    assert acc.to_mgpu() == plgpu.Layout.WGMMA.to_mgpu()  # so that softmax and merge are the same


CASES = {
    DecodeCase("tiles and partitions, soft cap", seq_lens=(15, 0, 256), soft_cap=20.0, **ALONE): "12.0",
    DecodeCase("head_dim 80, window", seq_lens=(70, 12), sliding_window=20, head_dim=80): "12.0",
    DecodeCase("float8, sinks", seq_lens=(130, 5), cache_dtype="float8_e4m3fn", sinks=True): "12.0",
    DecodeCase(
        "one slot of queries",
        seq_lens=(70, 12),
        head_dim=256,
        num_q_heads=16,
        num_kv_heads=1,
        cache_dtype="int8",
    ): "8.6",
}


@pytest.mark.parametrize(
    ("c", "capability"),
    [
        pytest.param(c, capability, id=c.name, marks=pytest.mark.slow if i else [])
        for i, (c, capability) in enumerate(CASES.items())
    ],
)
def test_decode_by_mma_equals_the_oracle_without_a_race(
    c: DecodeCase, capability: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with interpretable(capability) as used:
        got = interpret(c, "decode")
    assert_used(used, capability)
    assert_close(c, got)
    assert not races_found(capsys)


# Two consumers that meet at tiles at the edge: the last ones, and where the window begins. There are more
# tiles of K and V than slots. With tensor memory a single consumer has two tiles of scores under way.
PROMPTS = (
    TileCase("two consumers, a window", (300, 0), (330, 20), num_q_heads=4, sliding_window=150),
    TileCase("int8, one consumer", (100,), (130,), num_q_heads=2, cache_dtype="int8", head_dim=128),
    TileCase("more heads than a consumer has rows", (300, 0), (330, 20), num_q_heads=16, sliding_window=150),
    TileCase("one slot", (100,), (130,), num_q_heads=2, head_dim=256),
    TileCase("the consumer widens", (100,), (130,), num_q_heads=2, head_dim=192, cache_dtype="int8"),
    TileCase("maxima that grow", (300, 0, 0), (330, 20, 0), num_q_heads=2, scale=2.0),
)


@pytest.mark.parametrize(
    ("c", "capability"),
    [
        (PROMPTS[0], "8.0"),
        (PROMPTS[2], "10.0"),
        pytest.param(PROMPTS[5], "10.0", marks=pytest.mark.slow),
        pytest.param(PROMPTS[0], "12.0", marks=pytest.mark.slow),
        pytest.param(PROMPTS[1], "8.0", marks=pytest.mark.slow),
        pytest.param(PROMPTS[4], "8.0", marks=pytest.mark.slow),
        pytest.param(PROMPTS[1], "10.0", marks=pytest.mark.nightly),
        pytest.param(PROMPTS[3], "8.6", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_prompts_without_wgmma_equal_the_oracle_without_a_race(
    c: TileCase, capability: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if c.is_quantised and capability == "10.0" and is_run_with_more_threads(request):
        return
    with interpretable(capability) as used:
        got = launch(c)
    assert_used(used, capability, multiply="tcgen05" if capability == "10.0" else "mma.sync")
    assert_close(c, got)
    assert not races_found(capsys)


missing = cuda_compiler.missing_packages()
PROMPT = "tiles 32/8/128 bs16 bfloat16 bfloat16 32 tokens a tile"
LONGEST = "tiles 32/8/256 bs16 bfloat16 bfloat16 32 tokens a tile"
# With the longest heads: of 8 bits with scales, the most memory; and with all options, the most registers.
WIDENED = "tiles 32/8/256 bs32 bfloat16 bfloat16 32 tokens a tile int8_per_token"
FULL = "tiles 32/8/256 bs16 bfloat16 bfloat16 alibi window soft_cap sinks 32 tokens a tile 16 rows of 131072"
EIGHT_BITS = (
    "tiles 32/8/128 bs16 bfloat16 float8_e4m3fn 32 tokens a tile",
    "tiles 32/8/128 bs64 bfloat16 bfloat16 32 tokens a tile int4_grouped",
)
# The least and the most that a product takes: minima beside codes of 8 bits, and as many rows as at once.
PRODUCTS = (
    "product 16 rows Q4_0 4096 x 4096",
    "product 64 rows Q5_1 4096 x 4096",
    "product 64 rows fp8 4096 x 4096",
    "product 256 rows bfloat16 4096 x 4096",
)
# The least and the most that a program takes, and each way of widening. One process a target: on some
# versions of JAX an instruction that a target lacks ends the process.
COMPILED = {
    "12.0": (
        "decode 32/8/128 bs16 bfloat16 bfloat16",
        "decode 128/8/128 bs16 bfloat16 bfloat16",
        "decode 32/8/128 bs16 bfloat16 float8_e4m3fn",
        "decode 128/8/256 bs8 bfloat16 float8_e4m3fn",
        PROMPT,
        FULL,
        *PRODUCTS,
    ),
    "8.0": (
        "decode 32/8/128 bs16 bfloat16 bfloat16",
        "decode 32/8/128 bs16 bfloat16 float8_e4m3fn",
        "decode 32/8/128 bs64 bfloat16 bfloat16 alibi window soft_cap sinks int4_grouped",
        PROMPT,
        "tiles 32/8/128 bs16 bfloat16 int8 32 tokens a tile",
        WIDENED,
        *PRODUCTS,
    ),
    "8.6": (
        "decode 32/8/128 bs16 bfloat16 float8_e5m2",
        "decode 32/8/256 bs16 bfloat16 bfloat16",
        "decode 128/8/256 bs8 bfloat16 float8_e4m3fn",
        PROMPT,
        LONGEST,
        "tiles 32/8/192 bs16 bfloat16 float8_e4m3fn 32 tokens a tile",
        WIDENED,
        *EIGHT_BITS,
    ),
    "8.9": (
        "decode 32/8/128 bs16 bfloat16 float8_e4m3fn",
        "decode 32/8/128 bs16 bfloat16 int8",
        *EIGHT_BITS,
        *PRODUCTS,
    ),
    "10.0": (
        "decode 32/8/128 bs16 bfloat16 bfloat16",
        PROMPT,
        LONGEST,
        WIDENED,
        FULL,
        "tiles 32/8/128 bs16 bfloat16 bfloat16 64 tokens a tile",  # two consumers
        "tiles 32/8/128 bs16 bfloat16 bfloat16 window 32 tokens a tile",
        "tiles 32/8/80 bs16 bfloat16 bfloat16 32 tokens a tile",
        "tiles 64/8/64 bs16 bfloat16 bfloat16 window sinks 32 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 alibi window soft_cap sinks 32 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 32 tokens a tile 16 rows of 131072",
        *EIGHT_BITS,
        *PRODUCTS,
    ),
}
NIGHTLY = ("8.6", "8.9", "10.0")
KEPT_BYTES = 16 if jax.__version_info__ >= (0, 12) else 48  # of a thread's frame


@pytest.mark.skipif(bool(missing), reason=f"needs the cuda-compile extra: {', '.join(missing)}")
@pytest.mark.parametrize("capability", slow_and_nightly(COMPILED, set(COMPILED) - set(NIGHTLY)))
def test_kernels_compile_for_a_target_and_spill_nothing(capability: str) -> None:
    target, names = targets.TARGETS[capability], COMPILED[capability]
    reports = compile_report.run(list(names), capability)
    assert {r.program for r in reports} == set(names)
    # JAX 0.11.2 has frames of 8 bytes. By tcgen05 ptxas up to 13.0 keeps words in memory: of sinks with
    # windows, and with JAX 0.11.2 of partitions and of two consumers.
    kept = ("sinks",) if jax.__version_info__ >= (0, 12) else ("sinks", "131072", "64 tokens")
    for r in reports:
        has_kept = target.multiply == "tcgen05" and any(word in r.program for word in kept)
        assert r.stack_bytes <= (KEPT_BYTES if has_kept else 8), r
        assert r.spill_bytes == 0 or has_kept, r
    assert [r for r in reports if r.shared_memory_bytes > target.program_bytes] == []
    programs = {str(p): p for p in compile_report.attention_programs()}
    for r in reports:
        if r.kernel == "paged_attention_kernel":
            p = programs[r.program]
            dtype = {"int4_grouped": "uint8"}.get(p.kv_layout, p.cache_dtype or p.dtype)
            queries = p.num_q_heads // p.num_kv_heads
            config = tuning.default_config(
                p.head_dim, jnp.dtype(dtype), queries, has_extras=p.alibi or p.sinks, target=target
            )
            assert config.ctas_per_core <= r.ctas_per_core, r


def test_what_the_table_serves_fits_on_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new token a sequence, with as many heads of a group as are served, and prompts, in memory."""
    full, bfloat16 = support.SUPPORT["mosaic_gpu"], jnp.dtype("bfloat16")

    def prompt_fits(head_dim: int, layout: str, dtype: str) -> bool:
        kv_layout = layouts.named(layout)
        pool = jax.eval_shape(lambda: layouts.create(kv_layout, 8, 32, 8, head_dim, jnp.dtype(dtype)))
        view, q = kv_layout.view(), jax.ShapeDtypeStruct((1, 32, 32, head_dim), bfloat16)
        assert view is not None
        k_cache, v_cache = (pool.arrays[place.array] for place in (view.k, view.v))
        scales: Any = None if view.k_scale is None else (q, q)
        options = support.Options(scale=1.0, kv_layout=kv_layout, token_scales=scales)
        shapes: Any = q, k_cache, v_cache, q, q
        p = program.make_problem(support.Arrays(*shapes), options, in_registers=True, is_interpreted=False)
        return p.memory_bytes <= target.program_bytes

    for target in targets.TARGETS.values():
        monkeypatch.setattr(targets, "compiled_for", lambda target=target: target)
        for size in full.head_dims or ():
            assert tuning.fits(size, bfloat16, 16, target)
            assert prompt_fits(size, "token_major", "bfloat16")
        for size in full.quantised_head_dims or ():
            assert tuning.fits(size, jnp.dtype("int8"), 16, target)
            assert prompt_fits(size, "token_major", "int8")
            assert prompt_fits(size, "int8_per_token", "bfloat16")
