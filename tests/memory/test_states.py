"""A recurrent layer's blocks in the tables that K and V use: forks, drafts, shared prefixes, freed blocks.

Each chunk reads the state that ends the one before.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import block_pool, block_table, group_content, prefix_cache
from jaxpaged.memory.cache_specs import ChunkState
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.policies import LRU
from jaxpaged.research.verify import quick, subjects
from pallas_kernels.ops import states

CHUNK, ROWS, MAX_BLOCKS, WIDTH, VOCABULARY = 4, 4, 8, 9, 5
HEADS, K_DIM, V_DIM = 2, 8, 8


SPEC = ChunkState(CHUNK)
append = quick.jit(functools.partial(block_table.append, max_new_blocks=ROWS * MAX_BLOCKS))
fork = quick.jit(block_table.fork)
truncate = quick.jit(block_table.truncate)
free = quick.jit(block_table.free_rows)
slide = quick.jit(lambda tables, rows: block_table.slide_windows(tables, rows, (SPEC,)))
commit = quick.jit(functools.partial(subjects.commit, max_blocks=MAX_BLOCKS))


@quick.jit
def adopt(tables, block_ids, chain):
    chain = jax.tree.map(lambda x: x[None], chain)
    return block_table.adopt(tables, jnp.array([0]), block_ids, chain, jnp.array([True]))


advance = jax.jit(states.advance)


@quick.jit
def look_up(pool, tokens):
    def tokens_at(positions):
        return tokens.at[positions].get(mode="clip")

    most = MAX_BLOCKS * CHUNK
    hit = prefix_cache.lookup(pool.prefix_cache, tokens_at, jnp.int32(most), jnp.int32(0), max_tokens=most)
    return group_content.lookup(pool.prefix_cache, hit, (SPEC,))


def arrays_of(tokens):
    """Return q, k, v, log_decay and beta of tokens [num_seqs, num_tokens]: each token has its own."""
    rng = np.random.default_rng(0)
    shapes = {"q": K_DIM, "k": K_DIM, "v": V_DIM}
    drawn = {
        name: rng.standard_normal((VOCABULARY, HEADS, n)).astype(np.float32) for name, n in shapes.items()
    }
    drawn["k"] /= np.linalg.norm(drawn["k"], axis=-1, keepdims=True)
    log_decay = -rng.random((VOCABULARY, HEADS, 1), np.float32)
    beta = rng.random((VOCABULARY, HEADS), np.float32)
    return [x[tokens] for x in (*drawn.values(), log_decay, beta)]


@functools.cache
def outputs_of(tokens):
    """Return the outputs of a sequence that is computed alone and at once."""
    blocks = states.create(1 + MAX_BLOCKS, HEADS, K_DIM, V_DIM, chunk=CHUNK)
    padded = np.zeros((1, MAX_BLOCKS * CHUNK), np.int32)
    padded[0, : len(tokens)] = tokens
    table = np.arange(1, 1 + MAX_BLOCKS)[None]
    out, _ = advance(blocks, *arrays_of(padded), table, np.array([0]), np.array([len(tokens)]))
    return np.asarray(out)[0, : len(tokens)]


class World:
    """Rows of tokens over one pool: tables, blocks of states, and the tokens that rows should hold."""

    def __init__(self):
        size = 1 + ROWS * MAX_BLOCKS
        pool = block_pool.create(size, LRU, prefix_cache=prefix_cache.create(size, CHUNK))
        self.tables = block_table.create(pool, ROWS, MAX_BLOCKS, CHUNK, 1)
        blocks = states.create(size, HEADS, K_DIM, V_DIM, chunk=CHUNK)
        self.blocks = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), blocks)
        self.tokens = [()] * ROWS

    def compute(self, new):
        """Append tokens to rows, copy what is written by one row alone, and compare with each row alone."""
        starts, counts = np.array([len(each) for each in self.tokens]), np.array([len(each) for each in new])
        self.tables, info = append(self.tables, jnp.asarray(counts, jnp.int32))
        assert int(info.status) == 0
        for source, target in zip(info.copy_sources.tolist(), info.copy_destinations.tolist(), strict=True):
            if source:
                self.blocks = jax.tree.map(lambda x, s=source, t=target: x.at[t].set(x[s]), self.blocks)
        padded = np.zeros((ROWS, WIDTH), np.int32)
        for row, tokens in enumerate(new):
            padded[row, : len(tokens)] = tokens
        out, self.blocks = advance(
            self.blocks, *arrays_of(padded), np.asarray(self.tables.block_tables), starts, counts
        )
        self.tokens = [old + tuple(more) for old, more in zip(self.tokens, new, strict=True)]
        for row, count in enumerate(counts):
            if count:
                want = outputs_of(self.tokens[row])[starts[row] :]
                np.testing.assert_array_equal(np.asarray(out)[row, :count], want)

    def take_back(self, counts):
        self.tables, info = truncate(self.tables, jnp.asarray(counts, jnp.int32))
        assert int(info.status) == 0
        self.tokens = [each[: len(each) - n] for each, n in zip(self.tokens, counts, strict=True)]

    def settle(self):
        """Note full blocks by their content, and give back what no coming token reads."""
        held = np.zeros((ROWS, MAX_BLOCKS * CHUNK), np.int32)
        for row, tokens in enumerate(self.tokens):
            held[row, : len(tokens)] = tokens
        self.tables = commit(self.tables, jnp.asarray(held), self.tables.seq_lens)[0]
        self.tables, _ = slide(self.tables, jnp.ones(ROWS, bool))

    def free(self, row):
        self.tables, _ = free(self.tables, jnp.arange(ROWS) == row)
        self.tokens[row] = ()


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_any_history_has_the_bits_of_each_sequence_alone(seed):
    """Prompts, single tokens, drafts taken back across chunks, forks, ends, and prefixes found again."""
    rng, world, done = np.random.default_rng(seed), World(), {"fork": 0, "hit": 0, "back": 0}
    prefix = tuple(rng.integers(0, VOCABULARY, 3 * CHUNK).tolist())
    for _ in range(60):
        room = [MAX_BLOCKS * CHUNK - len(each) for each in world.tokens]
        for row in range(ROWS):
            if room[row] < WIDTH:
                world.free(row)
        empty = [row for row, each in enumerate(world.tokens) if not each]
        if 0 in empty and rng.random() < 0.7:
            others = [VOCABULARY] * (MAX_BLOCKS * CHUNK - len(prefix))  # that no sequence has
            hit = look_up(world.tables.pool, jnp.asarray([*prefix, *others]))
            if length := int(hit.chain.num_blocks):
                world.tables, info = adopt(world.tables, hit.block_ids, hit.chain)
                assert int(info.status) == 0
                world.tokens[0] = prefix[: length * CHUNK]
                done["hit"] += 1
        elif (
            empty and (full := [row for row, each in enumerate(world.tokens) if each]) and rng.random() < 0.5
        ):
            source, target = int(rng.choice(full)), empty[-1]
            world.tables, info = fork(world.tables, *map(jnp.array, ([source], [target], [True])))
            assert int(info.status) == 0
            world.tokens[target] = world.tokens[source]
            done["fork"] += 1
        new = []
        for row, tokens in enumerate(world.tokens):
            count = min(int(rng.choice([0, 1, 1, 2, WIDTH])), MAX_BLOCKS * CHUNK - len(tokens))
            begins = (
                prefix[len(tokens) : len(tokens) + count]
                if row < 2 and tokens == prefix[: len(tokens)]
                else ()
            )
            new.append((*begins, *rng.integers(0, VOCABULARY, count - len(begins)).tolist()))
        world.compute(new)
        back = [
            int(rng.integers(0, len(more) + 1)) if len(more) > 1 and rng.random() < 0.5 else 0 for more in new
        ]
        world.take_back(back)
        done["back"] += any(back)
        world.settle()
        check_invariants(world.tables)
    assert min(done.values()) > 2, done
