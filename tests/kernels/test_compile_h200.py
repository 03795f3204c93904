"""The kernels compiled to sm_90a machine code for an H200, on a machine without one."""

import os

import jax.numpy as jnp
import pytest

from benchmarks import compile_report, cuda_compiler
from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.decode.attention import partial_bytes
from pallas_kernels.gpu.prompt.attention import partial_bytes as prompt_partial_bytes
from tests.once import once

missing = cuda_compiler.missing_packages()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs the cuda-compile extra: {', '.join(missing)}")

# A program takes a second or two. JAXPAGED_EXHAUSTIVE=1 compiles the whole table.
LEAN = {
    str(p)
    for p in compile_report.programs()
    if str(p) in (
        "decode 32/8/128 bs16 bfloat16 bfloat16",
        "decode 32/8/128 bs16 bfloat16 bfloat16 256 rows of 131072",
        "decode 32/8/64 bs16 bfloat16 bfloat16",
        "decode 32/8/80 bs16 bfloat16 bfloat16",
        "decode 32/8/256 bs16 bfloat16 bfloat16",
        "decode 24/8/128 bs16 bfloat16 bfloat16",
        "decode 128/8/128 bs16 bfloat16 bfloat16",
        "decode 128/8/256 bs8 bfloat16 float8_e4m3fn",
        "decode 32/8/128 bs16 bfloat16 int8",
        "decode 32/8/128 bs32 bfloat16 bfloat16 int8_per_token",
        "decode 32/8/128 bs64 bfloat16 bfloat16 int4_grouped",
        "decode 32/8/128 bs16 bfloat16 bfloat16 alibi window soft_cap sinks",
        "decode 32/8/128 bs16 bfloat16 bfloat16 block_sparse",
        "v1 32/8/128 bs16 bfloat16 bfloat16",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 8 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 16 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 32 tokens a tile",
        "tiles 32/8/80 bs16 bfloat16 bfloat16 32 tokens a tile",
        "tiles 32/8/256 bs16 bfloat16 bfloat16 window 32 tokens a tile",
        "tiles 24/8/128 bs16 bfloat16 bfloat16 32 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 alibi window soft_cap sinks 32 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 float8_e4m3fn 32 tokens a tile",
        "tiles 32/8/256 bs8 bfloat16 int8 32 tokens a tile",
        "tiles 32/8/128 bs32 bfloat16 bfloat16 32 tokens a tile int8_per_token",
        "tiles 32/8/128 bs64 bfloat16 bfloat16 32 tokens a tile int4_grouped",
        "tiles 32/8/128 bs16 bfloat16 float8_e4m3fn alibi window soft_cap sinks 32 tokens a tile",
        "tiles 32/8/128 bs16 bfloat16 bfloat16 32 tokens a tile 16 rows of 131072",
        "tiles 32/8/128 bs16 bfloat16 float8_e4m3fn 32 tokens a tile 16 rows of 131072",
        "tiles 32/8/256 bs16 bfloat16 bfloat16 32 tokens a tile 16 rows of 131072",
        "tiles 32/8/256 bs64 bfloat16 bfloat16 alibi window soft_cap sinks 32 tokens a tile 16 rows of 131072"
        " int8_per_token",
        "product 16 rows Q4_0 4096 x 4096",
        "product 64 rows Q5_1 4096 x 4096",
        "product 64 rows Q6_K 4096 x 4096",
        "product 16 rows fp8 4096 x 4096",
        "product 16 rows bfloat16 4096 x 4096",
        "product 256 rows bfloat16 4096 x 4096",
        "product 256 rows bfloat16 576 x 1536",
    )
}  # fmt: skip
assert len(LEAN) == 37
WANTED = {str(p) for p in compile_report.programs()} if os.environ.get("JAXPAGED_EXHAUSTIVE") else LEAN


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[compile_report.Report]:
    return once(tmp_path_factory, "compiled_kernels", lambda: compile_report.run(sorted(WANTED)))


def test_every_kernel_compiles_and_spills_nothing(reports: list[compile_report.Report]) -> None:
    assert {r.program for r in reports} == WANTED
    kernels = {
        "paged_attention_kernel",
        "prompt_attention_kernel",
        "quantised_product_kernel",
        "product_kernel",
    }
    assert {r.kernel for r in reports} == kernels
    assert [r for r in reports if r.spill_bytes or r.stack_bytes] == []


def test_no_int8_is_converted_by_itself(reports: list[compile_report.Report]) -> None:
    assert [r for r in reports if " int8" in r.program and r.conversions] == []


def test_partial_results_stay_small_whatever_the_capacity(reports: list[compile_report.Report]) -> None:
    """v1 has none: a few bytes a row say what there is to do."""
    temp_bytes = {r.program: r.temp_bytes for r in reports}
    partials = partial_bytes(256, 131072, num_kv_heads=8, group_size=4, head_dim=128)
    rest = temp_bytes["decode 32/8/128 bs16 bfloat16 bfloat16 256 rows of 131072"] - partials
    assert 0 <= rest < 1e6  # what there is to do, 16 bytes a partition
    assert temp_bytes["decode 32/8/128 bs16 bfloat16 bfloat16 256 rows of 131072"] < 320e6
    assert temp_bytes["v1 32/8/128 bs16 bfloat16 bfloat16"] < 1000
    for head_dim in (128, 256):
        partials = prompt_partial_bytes(16, 32, 131072, num_kv_heads=8, group_size=4, head_dim=head_dim)
        name = f"tiles 32/8/{head_dim} bs16 bfloat16 bfloat16 32 tokens a tile 16 rows of 131072"
        assert 0 <= temp_bytes[name] - partials < 1e5
    assert temp_bytes["tiles 32/8/128 bs16 bfloat16 bfloat16 32 tokens a tile"] < 1000


def test_two_programs_share_a_multiprocessor(reports: list[compile_report.Report]) -> None:
    """Exceptions: decode steps with head_dim 256, whose ring takes more than half of the memory; products of
    64 rows with codes of 8 bits and minima; layers' products for many rows.
    """
    alone = {r.program for r in reports if r.ctas_per_core < 2 and not r.program.startswith("tiles ")}
    alone -= {r.program for r in reports if " rows bfloat16 " in r.program and rows_of(r) > 64}
    assert all("/256 " in program or "64 rows Q5_1" in program for program in alone), alone


def test_no_more_programs_are_started_than_a_multiprocessor_has_room_for(
    reports: list[compile_report.Report],
) -> None:
    """Else their number would make a second wave, in which most of the GPU has nothing to do."""
    programs = {str(p): p for p in compile_report.attention_programs()}
    found = [r for r in reports if r.kernel == "paged_attention_kernel"]
    for r in found:
        p = programs[r.program]
        dtype = {"int8_per_token": "int8", "int4_grouped": "uint8"}.get(p.kv_layout, p.cache_dtype or p.dtype)
        queries = p.num_q_heads // p.num_kv_heads * p.tile_len
        is_scaled = p.kv_layout == "int8_per_token"
        config = tuning.default_config(
            p.head_dim, jnp.dtype(dtype), queries, is_scaled=is_scaled, has_extras=p.alibi or p.sinks
        )
        assert config.ctas_per_core <= r.ctas_per_core, r
    assert {r.ctas_per_core for r in found} == {1, 2}


def rows_of(product: compile_report.Report) -> int:
    return int(product.program.split()[1])


def test_the_committed_table_is_of_these_kernels(reports: list[compile_report.Report]) -> None:
    """Registers may differ between versions of jax; programs, kernels and shared memory may not."""

    def key(line: str) -> tuple[str, str, str]:
        _, program, kernel, _, _, memory, *_ = (cell.strip() for cell in line.split("|"))
        return program, kernel, memory

    def keys(page: str) -> set[tuple[str, str, str]]:
        return {key(line) for line in page.splitlines() if " bs" in line or "| product " in line}

    committed, made = keys(compile_report.TABLE.read_text()), keys(compile_report.markdown(reports))
    assert made <= committed, sorted(made - committed)


def test_codes_with_one_scale_an_output_are_all_that_a_product_reads() -> None:
    """Half of bfloat16's bytes, beside rows and results: nothing widened is written to memory."""
    names = ["bfloat16", "fp8, by output"]
    wide, codes = cuda_compiler.run("benchmarks.compile_products", names)
    assert codes["weight_bytes"] < 0.51 * wide["weight_bytes"]
    assert codes["moved_bytes"] - codes["weight_bytes"] <= wide["moved_bytes"] - wide["weight_bytes"] + 2**16


def test_no_experts_weights_are_copied_for_the_kernel() -> None:
    """XLA copies both of an expert's: they are read, written and read again."""
    by_xla, by_kernel = cuda_compiler.run(
        "benchmarks.compile_products", ["experts", "experts, by the kernel"]
    )
    assert sum(by_xla["written"].values()) == by_xla["expert_bytes"]
    assert by_kernel["written"] == {}
    assert by_kernel["temporary_bytes"] < by_kernel["expert_bytes"] // 16


def test_codes_and_scales_are_all_that_the_kernel_reads_of_a_weight() -> None:
    """Besides them only rows, and sums that are written and read once."""
    bits = {"int4, Q4_0": 4 + 16 / 32, "Q6_K": 6 + 32 / 16, "fp8, blocks of 128": 8 + 32 / 128}
    lines = cuda_compiler.run("benchmarks.compile_products", [f"{name}, by the kernel" for name in bits])
    rows, sums = 16 * 4096 * 2, 4 * 16 * 4096 * 4
    for line, its in zip(lines, bits.values(), strict=True):
        assert line["weight_bytes"] == 4096 * 4096 * its / 8
        assert line["moved_bytes"] <= line["weight_bytes"] + rows + 2 * sums + 16 * 4096 * 4 + 64, line
