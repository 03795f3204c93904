"""Every refusal of the operations, by its message, and the support table's agreement with itself."""

# ruff: noqa: E501  one refusal per line reads best

import dataclasses
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cards
from jaxpaged.research.verify.cases.decode import DecodeCase
from pallas_kernels import ops, support
from pallas_kernels.gpu import dense_product, ptxas, targets
from pallas_kernels.gpu.decode.attention import default_partitioning
from pallas_kernels.ops import choice
from pallas_kernels.ops.checks import check_attention
from pallas_kernels.support import Arrays, BlockSparse
from tests.kernels.checks import inputs


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def good() -> dict[str, Any]:
    return {
        "q": array(2, 4, 64),
        "k_cache": array(9, 16, 2, 64),
        "v_cache": array(9, 16, 2, 64),
        "block_tables": array(2, 5, dtype=jnp.int32),
        "seq_lens": array(2, dtype=jnp.int32),
    }


FP8 = {name: array(9, 16, 2, 64, dtype=jnp.float8_e4m3fn) for name in ("k_cache", "v_cache")}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"q": array(4, 64)}, {}, "q.shape=(4, 64) must be [num_seqs, num_q_heads, head_dim]"),
    ({"q": array()}, {}, "q.shape=() must be [num_seqs, num_q_heads, head_dim]"),
    ({"q": array(2, 4, 32)}, {}, "k_cache.shape=(9, 16, 2, 64) must end with q's head_dim=32"),
    ({"q": array(2, 5, 64)}, {}, "num_q_heads=5 must be a multiple of num_kv_heads=2"),
    ({"q": array(2, 4, 64, dtype=jnp.int32)}, {}, "q.dtype=dtype('int32') must be a floating type"),
    ({"q": array(2, 4, 64, dtype=jnp.float16)}, {}, "k_cache.dtype=dtype(bfloat16) must be q's float16 or one of"),
    ({"k_cache": array(9, 16, 64)}, {}, "k_cache.shape=(9, 16, 64) must be [num_blocks, block_size, num_kv_heads"),
    ({"k_cache": array(9, 16, 64)}, {"kv_layout": "head_major"}, "[num_blocks, num_kv_heads, block_size, head_dim]"),
    ({"v_cache": array(9, 8, 2, 64)}, {}, "v_cache.shape=(9, 8, 2, 64) must be (9, 16, 2, 64)"),
    ({"v_cache": array(9, 16, 2, 64, dtype=jnp.int8)}, {}, "v_cache.dtype=dtype('int8') must be k_cache's bfloat16"),
    ({"block_tables": array(2, dtype=jnp.int32)}, {}, "block_tables.shape=(2,) must be [num_seqs, max_blocks_per_seq]"),
    ({"block_tables": array(3, 5, dtype=jnp.int32)}, {}, "block_tables.shape=(3, 5) must be (2, 5)"),
    ({"block_tables": array(2, 0, dtype=jnp.int32)}, {}, "block_tables.shape=(2, 0) must have room for at least one"),
    ({"block_tables": array(2, 5, dtype=jnp.uint32)}, {}, "block_tables.dtype=uint32 must be int32"),
    ({"seq_lens": array(3, dtype=jnp.int32)}, {}, "seq_lens.shape=(3,) must be (2,)"),
    ({"seq_lens": array(2, dtype=jnp.float32)}, {}, "seq_lens.dtype=float32 must be int32"),
    ({}, {"scale": float("nan")}, "scale=nan must be finite"),
    ({}, {"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ({}, {"attention_chunk": 0}, "attention_chunk=0 must be at least 1"),
    ({}, {"attention_chunk": 4, "sliding_window": 4}, "attention_chunk=4 must be None beside sliding_window=4"),
    ({}, {"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
    ({}, {"alibi_slopes": jnp.ones(2)}, "alibi_slopes.shape=(2,) must be (4,)"),
    ({}, {"sinks": jnp.ones((1, 4))}, "sinks.shape=(1, 4) must be (4,)"),
    ({}, {"block_sparse": BlockSparse(0, 1, 1)}, "must have block_size >= 1, vertical_stride >= 1"),
    ({}, {"kv_layout": "vllm"}, "kv_layout='vllm' must be token_major, head_major, "),
    ({}, {"k_scale": 1.0}, "k_scale must be None for a cache of bfloat16"),
    (FP8, {}, "k_scale=None must be a scale for a cache of float8_e4m3fn"),
    (FP8, {"k_scale": 1.0}, "v_scale=None must be a scale for a cache of float8_e4m3fn"),
    (FP8, {"k_scale": jnp.ones(4), "v_scale": 1.0}, "k_scale.shape=(4,) must be () or [num_kv_heads]=(2,)"),
    (FP8, {"k_scale": 1.0, "v_scale": jnp.ones((1, 2))}, "v_scale.shape=(1, 2) must be () or [num_kv_heads]=(2,)"),
    ({}, {"implementation": "triton"}, "implementation='triton' must be 'mosaic_gpu', 'xla' or None"),
    ({}, {"implementation": "xla", "interpret": True}, "interpret=True needs implementation='mosaic_gpu'"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments_of_attention(arrays: dict[str, Any], options: dict[str, Any], message: str) -> None:
    for operation in (ops.paged_attention_v1, ops.paged_attention_v2, ops.paged_attention):
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(lambda a, f=operation: f(**a, **options), good() | arrays)


def test_an_unknown_option_is_refused() -> None:
    for operation in (ops.paged_attention_v1, ops.paged_attention_v2, ops.paged_attention):
        with pytest.raises(TypeError, match="unexpected keyword argument 'softcap'"):
            jax.eval_shape(lambda a, f=operation: f(**a, softcap=1.0), good())


def test_tiles_take_no_block_sparse_pattern() -> None:
    arrays = good() | {"q": array(2, 3, 4, 64), "query_starts": array(2, dtype=jnp.int32)}
    options = {"scale": 1.0, "block_sparse": BlockSparse(64, 1, 1)}
    with pytest.raises(TypeError, match="tiled_paged_attention.* unexpected keyword argument 'block_sparse'"):
        jax.eval_shape(lambda a: ops.tiled_paged_attention(**a, **options), arrays)


@pytest.mark.parametrize("partition_size", [0, -16, 24])
def test_wrong_partition_size(partition_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"partition_size={partition_size} must be a positive multiple of block_size=16"
    ):
        jax.eval_shape(lambda a: ops.paged_attention_v2(**a, partition_size=partition_size), good())


def test_wrong_arguments_of_the_cache_operations() -> None:
    cache, new, slots = array(9, 16, 2, 64), array(3, 2, 64), array(3, dtype=jnp.int32)
    pairs = array(3, 2, dtype=jnp.int32)
    for call, args, message in [
        (ops.reshape_and_cache, (array(3, 4, 64), new, cache, cache, slots), "k.shape=(3, 4, 64) must be (3, 2, 64)"),
        (ops.reshape_and_cache, (new, array(4, 2, 64), cache, cache, slots), "v.shape=(4, 2, 64) must be (3, 2, 64)"),
        (ops.reshape_and_cache, (new, new, cache, cache, array(3)), "slot_mapping.dtype=bfloat16 must be int32"),
        (ops.reshape_and_cache, (new, new, cache, cache, array(4)), "slot_mapping.shape=(4,) must be (3,)"),
        (ops.reshape_and_cache, (new, new, *FP8.values(), slots), "k_scale=None must be a scale"),
        (ops.copy_blocks, ([cache], array(3, 3, dtype=jnp.int32)), "pairs.shape=(3, 3) must be (3, 2)"),
        (ops.copy_blocks, ([cache], array(3, 2)), "pairs.dtype=bfloat16 must be int32"),
        (ops.copy_blocks, ([cache, array(8, 4)], pairs), "caches[1].shape=(8, 4) must begin with num_blocks=9"),
        (ops.swap_blocks, (cache, array(9, 8, 2, 64), pairs), "source bfloat16(9, 16, 2, 64) must hold blocks like"),
        (ops.swap_blocks, (cache, cache, array(2)), "pairs.shape=(2,) must be (2, 2)"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(call, *args)


EIGHT_BIT_80 = {name: array(9, 16, 2, 80, dtype=jnp.int8) for name in ("k_cache", "v_cache")}
UNSERVED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"q": array(2, 4, 80), **EIGHT_BIT_80},
        {"k_scale": 1.0, "v_scale": 1.0},
        "head_dim=80 (served: 64, 128, 192",
    ),
    (
        {name: array(*a.shape, dtype=jnp.float32) for name, a in good().items() if a.ndim > 2},
        {},
        "q.dtype=float32 (served: float16, bfloat16); k_cache.dtype=float32",
    ),
    (
        {"q": array(2, 4, 72), "k_cache": array(9, 16, 2, 72), "v_cache": array(9, 16, 2, 72)},
        {},
        "head_dim=72 (served",
    ),
    ({"k_cache": array(9, 1, 2, 64), "v_cache": array(9, 1, 2, 64)}, {}, "block_size=1 (served: 8, 16"),
    ({"q": array(2, 66, 64)}, {}, "num_q_heads // num_kv_heads=33 (served: up to"),
]


@pytest.mark.parametrize(("arrays", "options", "message"), UNSERVED, ids=[u[2][:30] for u in UNSERVED])
def test_the_kernel_refuses_what_it_does_not_serve(
    arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    for operation in (ops.paged_attention_v1, ops.paged_attention_v2, ops.paged_attention):
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            jax.eval_shape(
                lambda a, f=operation: f(**a, **options, implementation="mosaic_gpu"), good() | arrays
            )
        jax.eval_shape(lambda a, f=operation: f(**a, **options, implementation="xla"), good() | arrays)


@pytest.mark.parametrize("version", [(12, 8, 0), (12, 8, 93), (12, 9, 41)])
def test_causal_masks_are_not_compiled_by_a_ptxas_that_makes_them_wrong(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts have causal masks; decode steps of one token have none."""
    monkeypatch.setattr(ptxas, "version", lambda: version)
    tiles = good() | {"q": array(2, 32, 4, 64), "query_starts": array(2, dtype=jnp.int32)}
    named = ".".join(map(str, version))
    with pytest.raises(
        NotImplementedError, match=f"ptxas {named} compiles causal masks wrongly, .* 12.9.86 or"
    ):
        jax.eval_shape(
            lambda a: ops.tiled_paged_attention(**a, scale=1.0, implementation="mosaic_gpu"), tiles
        )
    jax.eval_shape(lambda a: ops.paged_attention(**a, implementation="mosaic_gpu"), good())


@pytest.mark.parametrize("version", [None, (12, 6, 85), (12, 9, 86), (13, 0, 48)])
def test_any_other_ptxas_is_taken(version: tuple[int, ...] | None) -> None:
    ptxas.refuse(version)


def test_the_kernel_counts_so_many_partitions() -> None:
    tables = {"block_tables": array(2, 2**15, dtype=jnp.int32)}
    with pytest.raises(NotImplementedError, match="cuts a row into 32767 partitions at most, not 32768: use"):
        jax.eval_shape(
            lambda a: ops.paged_attention_v2(**a, partition_size=16, implementation="mosaic_gpu"),
            good() | tables,
        )


def test_the_table_for_people_has_a_line_for_everything() -> None:
    table = support.markdown_table().splitlines()
    assert table[0] == "|  | `xla` | `mosaic_gpu` |"
    assert {line.split("|")[1].strip() for line in table[2:]} == {
        "type of q", "type of the cache", "head_dim", "head_dim with an 8-bit cache", "block_size", "block_size with a scale a token",
        "head_dim with 4 bits a number", "block_size with 4 bits a number", "query heads per kv head", "cache layout",
        "alibi_slopes, sliding_window, attention_chunk, soft_cap, sinks, block_sparse",
    }  # fmt: skip


def test_the_default_on_a_machine_without_a_gpu_is_xla() -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the default device is not a CPU")
    assert choice.default_implementation() == "xla"


@pytest.mark.parametrize(
    ("capability", "wanted", "words"),
    [
        ("9.0", "mosaic_gpu", "sm_90a: tiles by tma, products by wgmma, 227 KiB a program"),
        ("8.9", "mosaic_gpu", "sm_89: tiles by cp.async, products by mma.sync, 99 KiB a program"),
        ("12.0", "mosaic_gpu", "sm_120a: tiles by tma, products by mma.sync, 99 KiB a program"),
        ("7.5", "xla", None),
    ],
)
def test_a_gpus_target_decides_the_default(
    capability: str, wanted: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    target = targets.target_of(device)
    assert str(target) == words if words else target is None
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert choice.default_implementation() == wanted


@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
def test_every_target_serves_what_the_table_says(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not say is refused, by default too; without a target XLA is the default."""

    def chosen(**changes: Any) -> str:
        named, options = inputs(DecodeCase("one", seq_lens=(3,), **changes))
        batch, checked = check_attention(Arrays(**named), options)
        return choice.for_attention(None, batch, checked, interpret=False)

    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert chosen(head_dim=256, num_q_heads=16, num_kv_heads=1, cache_dtype="int8") == "mosaic_gpu"
    with pytest.raises(
        NotImplementedError, match="mosaic_gpu paged attention does not serve q.dtype=float32"
    ):
        chosen(dtype="float32")
    device.compute_capability = "7.5"
    assert chosen(dtype="float32") == "xla"


def test_without_tma_a_product_has_whole_pieces_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes XLA multiplies by default; weights that are packed are padded."""
    device = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(targets, "compiled_for", lambda: targets.TARGETS["8.0"])
    x, weights = array(4, 72), array(2, 72, 128)
    with pytest.raises(NotImplementedError, match="72 inputs must be a multiple of 64, 64 or more"):
        jax.eval_shape(lambda x, w: ops.product(x, w, 1, implementation="mosaic_gpu"), x, weights)
    assert "mosaic" not in str(jax.make_jaxpr(lambda x, w: ops.product(x, w, 1))(x, weights))
    assert dense_product.pack(np.ones((130, 72))).shape == (128, 192)


def test_the_pages_have_the_tables() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert support.markdown_table() in (docs / "gpu.md").read_text()
    assert support.layouts_table() in (docs / "concepts" / "layouts.md").read_text()
    assert cards.table() in (docs / "gpu.md").read_text()


def test_a_modelled_step_takes_longer_than_its_floor() -> None:
    """The partitions of the model are the kernel's own, and so are a prompt's programs and tiles."""
    for card in targets.CARDS:
        for shape in cards.SHAPES:
            assert 1 < shape.modelled_s(card) / shape.floor_s(card) < 1.4
        assert 1 < cards.PROMPT.modelled_s(card) / cards.PROMPT.floor_s(card) < 3
    assert {cards.PROMPT.problem(card).multiply for card in targets.CARDS} == {"wgmma", "mma.sync", "tcgen05"}
    alone = dataclasses.replace(targets.CARDS[0], num_cores=4096, flops=312e12 / 108 * 4096)
    p = cards.PROMPT.problem(alone)  # as many multiprocessors as programs: the longest one's time
    longest = cards.PROMPT.num_tokens / p.tile_kv * cards.PROMPT.tile_s(alone, p)
    assert cards.PROMPT.modelled_s(alone) == pytest.approx(longest + cards.START_S + cards.LAUNCH_S)
    assert cards.Decode(1, 1126).partition_tokens() == [512, 512, 102]
    lengths = jnp.array([32768], jnp.int32)
    size = default_partitioning(8, 8).sizes(jnp.zeros_like(lengths), lengths, 32768)
    assert cards.Decode(1, 32768).partition_tokens() == [int(size[0])] * (32768 // int(size[0]))
