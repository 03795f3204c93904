"""Mixers with states over paged blocks: NumPy's numbers, and equal bits however a sequence is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.memory import sizing
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import by_role, random_weights
from reference import mixers as reference_mixers
from tests import tiny, tiny_states

BLOCK_SIZE, TILE = 8, 16
TABLE = [3, 1, 5, 6, 2, 4]
NUM_TOKENS = 37  # ends within a chunk


SLOW = (tiny_states.DELTA, tiny_states.MAMBA, tiny_states.MAMBA_1, tiny_states.LIGHTNING)


class Walk:
    """One mixer's layer over a sequence of random inputs, pass by pass."""

    def __init__(self, mixer):
        self.config = tiny_states.config(mixer)
        self.model = tiny_states.load(LoadAs(jnp.dtype("float32")), self.config)
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((NUM_TOKENS, self.config.hidden_size), np.float32)
        self.cache = self.model.create_cache(13, BLOCK_SIZE)
        self._run = jax.jit(lambda mixer, x, cache, batch: mixer(x, cache, 1, batch))

    def passed(self, tiles, tile_len):
        """Compute tiles (row, start, first token that is not in the cache, end); return outputs by position.

        Row 0 is the sequence, any other is of zeros.
        """
        width, tables = self.config.hidden_size, np.array([TABLE, [7, 8, 9, 10, 11, 12]], np.int32)
        row, start, first, end = np.array(tiles, np.int32).T
        at = start[:, None] + np.arange(tile_len)
        is_real = (at >= first[:, None]) & (at < end[:, None])
        slots = tables[row[:, None], at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        x = np.zeros((*at.shape, width), np.float32)
        mine = is_real & (row == 0)[:, None]
        x[mine] = self.x[at[mine]]
        batch = PassBatch(
            slot_mapping=jnp.asarray(np.where(is_real, slots, 0).reshape(-1)),
            block_tables=jnp.asarray(tables),
            query_starts=jnp.asarray(start),
            seq_lens=jnp.asarray(end),
            table_rows=jnp.asarray(row),
            implementation="xla",
        )
        out, self.cache = self._run(
            self.model.layers.mixer, jnp.asarray(x.reshape(-1, width)), self.cache, batch
        )
        out = np.asarray(out).reshape(*at.shape, width)
        return {int(p): out[i, j] for i, j in zip(*np.nonzero(mine), strict=True) for p in [at[i, j]]}

    def prompt(self, first, end):
        """Compute a prompt's tokens from `first` on in tiles that begin at multiples of their length."""
        starts = [s for s in range(0, NUM_TOKENS, TILE) if s + TILE > first and s < end]
        tiles = [(0, s, max(s, first), min(s + TILE, end)) for s in starts]
        return self.passed(tiles + [(1, 0, 0, 0)] * (3 - len(tiles)), TILE)


@pytest.mark.parametrize(
    "mixer",
    [
        tiny_states.CONVOLUTION,
        *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW),
    ],
    ids=lambda mixer: mixer.name,
)
def test_a_token_has_the_same_bits_in_a_prompt_in_a_step_and_among_drafts(mixer):
    walk = Walk(mixer)
    whole = walk.prompt(0, NUM_TOKENS)
    weights = by_role(walk.config, tiny_states.NAMES, random_weights(walk.config, tiny_states.NAMES, 0))
    want = reference_mixers.mixer(walk.config, weights, "layers.2", walk.x)
    np.testing.assert_allclose(np.stack([whole[p] for p in range(NUM_TOKENS)]), want, atol=2e-5)

    def same(found):
        for position, out in found.items():
            np.testing.assert_array_equal(out, whole[position], str(position))

    for first in (5, 8, 24):  # what lies before is in the cache
        same(walk.prompt(0, first))
        same(walk.prompt(first, NUM_TOKENS))
    same(walk.prompt(0, 14))
    for p in (14, 15, 16):  # beside another row
        same(walk.passed([(1, p, p, p + 1), (0, p, p, p + 1), (1, 0, 0, 0), (1, 0, 0, 0)], 1))
    for p in (17, 22):  # three tokens of a row in one pass, across a block's end, in any order of lines
        same(walk.passed([(0, p + i, p + i, p + i + 1) for i in (2, 0, 1)] + [(1, 3, 3, 4)], 1))
        same(walk.prompt(p + 1, p + 5))  # two of them are taken back


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "enable_lora=True must be False with layers of gated_delta"),
        ({"quantization": "int8"}, "quantization='int8' must be None with layers of gated_delta"),
        ({"loop_over_layers": True}, "loop_over_layers=True must be None or False with layers of"),
        ({"tensor_parallel_sums": 2}, "tensor_parallel_sums=2 must be a text with layers of gated_delta"),
        ({"block_size": 2}, "block_size=2 must be at least 3, the tokens that a convolution reads"),
    ],
)
def test_options_that_states_do_not_serve_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        tiny_states.driver(tiny_states.DELTA, **tiny.SMALL | options)


def test_a_model_of_states_alone_has_room_for_any_number_of_blocks():
    """Such a model has no layer with K and V, and so no slots to count."""
    assert sizing.most_blocks(0, 16) == sizing.most_blocks(1, 16)
