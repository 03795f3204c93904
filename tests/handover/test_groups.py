"""Blocks of models with several groups of layers: out of one engine and into another."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.handover import exchange, programs
from jaxpaged.handover.blocks import BlockFormat, Blocks
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.models.config import LayerKind
from jaxpaged.sampling_params import SamplingParams
from tests import tiny

SCORED = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
FULL_LAYER, WINDOW, CHUNK = LayerKind(), LayerKind(sliding_window=11), LayerKind(attention_chunk=20)
PROMPT, WHOLE_BLOCKS, OTHER = tiny.prompts([50, 64, 40])


def engine(config, **options):
    options = EngineConfig(**tiny.DEFAULTS | {"num_blocks": 1 + 4 * 24} | options)
    return Engine(options, config, functools.partial(tiny.load, config=config))


def answer(engine, prompt, **options):
    """Return an answer's tokens and scores, and the number of prompt tokens found in the cache."""
    found = engine.submit(prompt, SCORED, **options).result()
    return (found.token_ids, found.scores), found.num_hit_tokens


@pytest.mark.parametrize(
    ("dtype", "kinds", "present"),
    [
        # Of 48 tokens a window of 11 begins in block 4, of 40 tokens in block 3; a chunk of 20 at 40 and 40.
        pytest.param(
            "float32",
            [FULL_LAYER, WINDOW],
            [[1] * 6, [0, 0, 0, 1, 1, 1]],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "bfloat16",
            [FULL_LAYER, WINDOW, CHUNK],
            [[1] * 6, [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_answers_from_blocks_of_groups_are_those_computed_in_place(dtype, kinds, present):
    config = tiny.mixed(*kinds, num_layers=len(kinds))
    with engine(config, dtype=dtype) as here, engine(config, dtype=dtype) as there:
        want, num_hit_tokens = answer(here, PROMPT)
        assert num_hit_tokens == 0
        blocks = here.export_blocks(PROMPT)
        assert blocks.present.tolist() == present
        assert {len(x) for x in blocks.arrays.values()} == {np.sum(present)}
        sent = Blocks.from_bytes(blocks.to_bytes())
        before = programs.read_blocks.num_compiled()
        assert there.adopt_blocks(sent) == 6
        assert answer(there, PROMPT) == (want, 48)
        assert there.adopt_blocks(sent) == 6, "there already"
        assert there.export_blocks(PROMPT).to_bytes() == blocks.to_bytes()
        assert answer(there, [*PROMPT, 1, 2, 3])[1] == 48
        assert programs.read_blocks.num_compiled() == before

        # From device to device; of a prompt that ends with a block one token is left to compute.
        want = answer(here, WHOLE_BLOCKS, cache_salt="mine")[0]
        assert here.hand_over(there, WHOLE_BLOCKS, "mine") == 8
        assert answer(there, WHOLE_BLOCKS, cache_salt="mine") == (want, 56)
        assert answer(there, WHOLE_BLOCKS)[1] == 0
        assert there.adopt_blocks(here.export_blocks(OTHER)) == 0
        for each in (here, there):
            assert each.snapshot().state.status == 0
            tiny.check_invariants(each.snapshot().state.tables)

        # What does not agree is refused, and changes nothing.
        assert there.reset_prefix_cache()
        one_table = dataclasses.replace(blocks.block_format, groups="FullAttention() in layers 0, 1")
        with pytest.raises(InputError, match=r"^blocks: groups='FullAttention\(\) in layers 0, 1' must be"):
            there.adopt_blocks(dataclasses.replace(blocks, block_format=one_table))
        for wrong in (
            blocks.present[:1],
            np.concatenate([blocks.present, blocks.present[:1]]),
            blocks.present & (np.arange(6) < 5),
            blocks.present & ((np.arange(6) < 5) | (np.arange(len(present)) == 0)[:, None]),
            np.ones_like(blocks.present),
        ):
            with pytest.raises(InputError, match=r"^(blocks: )?(present|arrays)="):
                there.adopt_blocks(dataclasses.replace(blocks, present=wrong))
        assert answer(there, PROMPT)[1] == 0


def its_blocks(present):
    """Return blocks of 4 tokens without arrays."""
    block_format = BlockFormat(4, "groups", "layout", "float32", 1, 1, 1, False, "model")
    present = np.array(present, bool)
    return Blocks(block_format, np.zeros((present.shape[1], 4), np.int32), present, None, {})


def test_each_group_brings_what_the_next_token_reads():
    specs = FULL, SlidingWindow(6), ChunkedLocal(8)
    # The token at 12 reads 7 and those after it in a window of 6, and from 8 on in its chunk.
    exchange.check_lines(its_blocks([[1, 1, 1], [0, 1, 1], [0, 0, 1]]), specs)
    exchange.check_lines(its_blocks([[1, 1, 1], [1, 1, 1], [1, 0, 1]]), specs)
    exchange.check_lines(its_blocks([[], [], []]), specs)
    for present, rule in (
        ([[1, 1, 1], [1, 0, 1], [0, 0, 1]], r"true from block 1 on: what group 1 reads next$"),
        ([[1, 1, 1], [0, 1, 1], [1, 1, 0]], r"true from block 2 on: what group 2 reads next$"),
        ([[1, 1, 1], [0, 1, 1]], r"blocks: present=\(2, 3\) must be of shape \(3, 3\)$"),
        ([[0, 1, 1], [0, 1, 1], [0, 0, 1]], r"present=.* must be bool \[num_groups, 3\], and true for the"),
    ):
        with pytest.raises(InputError, match=rule):
            exchange.check_lines(its_blocks(present), specs)
    blocks = its_blocks([[1, 1, 1]] * 3)
    for wrong in (
        blocks.present.astype(np.int8),
        blocks.present[0],
        blocks.present[:0],
    ):
        with pytest.raises(InputError, match=r"^present=.* must be bool \[num_groups, 3\]"):
            exchange.check_lines(dataclasses.replace(blocks, present=wrong), specs)
