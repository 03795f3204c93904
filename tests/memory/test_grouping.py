"""Grouping of layers, and the bytes that a sequence holds, on the shapes of real models."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.grouping import Grouping, grouping_of, one_group
from jaxpaged.step.config import StepConfig

BLOCK_SIZE = 16


def mixed(num_layers, period, spec):
    """Return the layers of a model in which every `period`-th reads all tokens."""
    return [FULL if layer % period == period - 1 else spec for layer in range(num_layers)]


# Layers, and the bytes of K and V a token and layer in bfloat16: 2 x KV heads x head_dim x 2.
MODELS = {
    "gpt-oss-20b": (mixed(24, 2, SlidingWindow(128)), 2 * 8 * 64 * 2),
    "gemma-3-27b": (mixed(62, 6, SlidingWindow(1024)), 2 * 16 * 128 * 2),
    "gemma-3-270m": (mixed(18, 6, SlidingWindow(512)), 2 * 1 * 256 * 2),
    "llama-4-scout": (mixed(48, 4, ChunkedLocal(8192)), 2 * 8 * 128 * 2),
    "command-r7b": (mixed(32, 4, SlidingWindow(4096)), 2 * 8 * 128 * 2),
    "olmo-3-7b": (mixed(32, 4, SlidingWindow(4096)), 2 * 32 * 128 * 2),
}


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("gpt-oss-20b", [12, 12]),
        ("gemma-3-27b", [10, 9, 9, 9, 9, 8, 8]),
        ("gemma-3-270m", [3] * 6),
        ("llama-4-scout", [12] * 4),
    ],
)
def test_layers_of_a_kind_are_shared_out_evenly(name, widths):
    """Checked against vLLM 0.33's own function, which makes the same groups of these models."""
    specs, _ = MODELS[name]
    grouping = grouping_of(specs)
    assert [*map(len, grouping.groups)] == widths
    assert sorted(layer for layers in grouping.groups for layer in layers) == [*range(len(specs))]
    for layer, spec in enumerate(specs):
        group, place = grouping.group_of[layer], grouping.place_of[layer]
        assert grouping.groups[group][place] == layer
        assert grouping.specs[group] == spec
    assert Grouping.of_words(grouping.words()) == grouping


@pytest.mark.parametrize(
    ("counts", "widths"),
    [
        ((13, 12), [13, 12]),
        ((5, 7), [5, 4, 3]),  # vLLM pads the five that read all to seven
        ((20, 5), [5] * 5),
        ((7, 0), [7]),
    ],
)
def test_the_layers_that_read_most_are_never_padded(counts, widths):
    full, sliding = counts
    grouping = grouping_of([SlidingWindow(8)] * sliding + [FULL] * full)
    assert [*map(len, grouping.groups)] == widths
    assert grouping.specs[0] == FULL


@pytest.mark.parametrize("num_tokens", [32 * 1024, 128 * 1024])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_holds_what_its_layers_read(name, num_tokens):
    """Up to a block a group, and the layers by which groups are narrower.

    The latter are under 3% of all: 2.2% in gemma-3-27b with 32,768 tokens, none in the others.
    """
    specs, token_bytes = MODELS[name]
    grouping = grouping_of(specs)
    config = StepConfig(max_num_seqs=1, num_tiles=0, tiles_per_pass=1, attention="xla", grouping=grouping)
    block_bytes = grouping.width * BLOCK_SIZE * token_bytes
    held = config.blocks_of(num_tokens, BLOCK_SIZE) * block_bytes

    def tokens_of(spec):
        kept = spec.most_kept(1)
        return num_tokens if kept is None else min(kept, num_tokens)

    exact = sum(tokens_of(spec) for spec in specs) * token_bytes
    padded = sum(
        (grouping.width - len(layers)) * tokens_of(spec)
        for spec, layers in zip(grouping.specs, grouping.groups, strict=True)
    )
    assert padded * token_bytes <= 0.03 * exact
    assert exact <= held <= exact + padded * token_bytes + grouping.num_groups * block_bytes
    one_table = cdiv(num_tokens, BLOCK_SIZE) * len(specs) * BLOCK_SIZE * token_bytes
    assert held < 0.52 * one_table


def gemma4(num_layers, period, num_shared, window, wide, narrow):
    """Return Gemma 4's layers with K and V of their own, and the numbers of K a token of each kind."""
    layers = mixed(num_layers, period, SlidingWindow(window))[: num_layers - num_shared]
    sizes = [wide if layer == FULL else narrow for layer in layers]
    return layers, [size // min(wide, narrow) for size in sizes], 2 * min(wide, narrow) * 2


# With heads of 512 where all tokens are seen, else 256: one KV head, two, and 4 of the former and 16.
GEMMA4 = {
    "gemma-4-e2b": (gemma4(35, 5, 20, 512, 512, 256), [3, 6, 6]),
    "gemma-4-e4b": (gemma4(42, 6, 18, 512, 1024, 512), [2, 2, 4, 4, 4, 4, 4]),
    "gemma-4-31b": (gemma4(60, 6, 0, 1024, 2048, 4096), [10, *[5] * 10]),
}


@pytest.mark.parametrize("num_tokens", [32 * 1024, 128 * 1024])
@pytest.mark.parametrize("name", GEMMA4)
def test_layers_of_two_widths_share_blocks_without_waste(name, num_tokens):
    """A block holds twice as many of the narrower layers: a sequence holds what is read, up to a block."""
    (specs, weights, place_bytes), widths = GEMMA4[name]
    grouping = grouping_of(specs, weights)
    assert [*map(len, grouping.groups)] == widths
    config = StepConfig(max_num_seqs=1, num_tiles=0, tiles_per_pass=1, attention="xla", grouping=grouping)
    block_bytes = grouping.width * BLOCK_SIZE * place_bytes
    held = config.blocks_of(num_tokens, BLOCK_SIZE) * block_bytes
    kept = [num_tokens if spec.most_kept(1) is None else spec.most_kept(1) for spec in specs]
    exact = sum(n * weight for n, weight in zip(kept, weights, strict=True)) * place_bytes
    assert exact <= held <= exact + grouping.num_groups * block_bytes
    assert Grouping.of_words(grouping.words()) == grouping
    for group in grouping.groups:  # the places of a group's layers are apart, and within the block
        ends = [0]
        for layer in sorted(group, key=lambda layer: grouping.place_of[layer] * weights[layer]):
            assert grouping.place_of[layer] * weights[layer] == ends[-1]
            ends.append(ends[-1] + weights[layer])
        assert ends[-1] <= grouping.width


def test_wide_layers_go_first_where_all_share_a_table():
    grouping = one_group(FULL, 4, [1, 2, 1, 2])
    assert (grouping.place_of, grouping.width) == ((4, 0, 5, 1), 6)
    assert one_group(FULL, 2, [1, 2]).width == 4  # a block has room for whole wide layers
    assert grouping.of_step == grouping


def test_one_table_keeps_what_the_layer_that_reads_most_reads():
    config = StepConfig(
        max_num_seqs=1, num_tiles=1, tiles_per_pass=1, attention="xla", grouping=one_group(SlidingWindow(10))
    )
    assert not config.keeps_sequence
    assert config.blocks_shared(40, 4) == 0
    assert (
        StepConfig(max_num_seqs=1, num_tiles=1, tiles_per_pass=1, attention="xla").blocks_shared(40, 4) == 10
    )


@pytest.mark.parametrize("spec", [FULL, SlidingWindow(5), ChunkedLocal(6)])
def test_what_is_out_of_reach_stays_so(spec):
    first = np.asarray(spec.first_read(jnp.arange(40)))
    assert (np.diff(first) >= 0).all()
    assert (first <= np.arange(40)).all()
    kept = spec.most_kept(1)
    assert kept is None or (np.arange(40) - first + 1).max() == kept
