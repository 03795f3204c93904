"""Products of prompts by tcgen05, on GPUs that have tensor memory: one warp starts all of them.

    S = Q @ K^T  of a tile, into a slot of scores        O += P @ V  of the slot's tile before, which is done

Two slots are under way: while a consumer takes the softmax of one, the tensor cores compute the other. The
warp never waits for a product. It starts the next as soon as the weights are there; tensor cores compute in
the order in which one thread starts, so that scores may come where weights were read before.

O stays in tensor memory. A consumer multiplies it by the factor of a new maximum before it hands over the
weights that are relative to it. That is rare: a row's maximum is renewed only where a logit exceeds it by
`SLACK`. Each row decides for itself, so that a token's bits do not depend on others.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import votes
from pallas_kernels.gpu.attention import filled
from pallas_kernels.gpu.prompt import tensor_memory
from pallas_kernels.gpu.prompt.program import KeyRange, Problem, Scratch
from pallas_kernels.gpu.prompt.tensor_memory import SLOTS, Tensors

SLACK = 8.0  # of logits times log2(e): weights are at most 2^8, which float16 holds, too
AT_A_TIME, WRITTEN_AT_A_TIME = 32, 64  # columns of sums in registers, to be rescaled, and in the end


def start(p: Problem, keys: KeyRange, scratch: Scratch) -> None:
    """Start all products of a program, as one warp.

    It waits for K and for weights. V is there when weights are, for consumers wait for V first. If both
    waited for V, ptxas would keep the phase of its barriers in memory.
    """
    tensors, ring = scratch.tensors, scratch.ring
    assert tensors is not None
    consumers, num_stages = range(p.num_warpgroups), jnp.int32(p.num_stages)
    behind = SLOTS // p.num_warpgroups  # tiles from scores to the weights that were in the same slot

    def step(i: jax.Array, _: None) -> None:
        for consumer in consumers:
            slot = tensor_memory.slot_of(i, consumer, p.num_warpgroups)
            is_last = consumer == p.num_warpgroups - 1

            @pl.when(i >= behind)
            def _add(consumer: int = consumer, slot: Any = slot, is_last: bool = is_last) -> None:
                at = lax.rem(i - behind, num_stages)
                plgpu.barrier_wait(tensors.weighted.at[slot])
                out, weights = tensors.sums_of(consumer, p.head_dim), tensors.weights(slot)
                plgpu.tcgen05_mma(out, weights, ring.v.at[at], accumulate=i > behind)
                plgpu.tcgen05_commit_arrive(tensors.added.at[consumer])
                if is_last:
                    plgpu.tcgen05_commit_arrive(ring.v_free.at[at])

            @pl.when(i < keys.num_tiles)
            def _score(consumer: int = consumer, slot: Any = slot, is_last: bool = is_last) -> None:
                at = lax.rem(i, num_stages)
                if consumer == 0:
                    plgpu.barrier_wait(ring.k_full.at[at])
                queries, k = scratch.q.at[consumer], ring.k.at[at].T
                plgpu.tcgen05_mma(tensors.scores(slot), queries, k, accumulate=False)
                plgpu.tcgen05_commit_arrive(tensors.scored.at[slot])
                if is_last:
                    plgpu.tcgen05_commit_arrive(ring.k_free.at[at])

    for consumer in consumers:
        plgpu.barrier_wait(scratch.q_full.at[consumer])
    num_steps = jnp.where(keys.num_tiles > 0, keys.num_tiles + behind, 0)
    lax.fori_loop(0, num_steps, step, None)


def scores(p: Problem, tensors: Tensors, slot: jax.Array) -> jax.Array:
    """Load a tile's scores, once they are there."""
    plgpu.barrier_wait(tensors.scored.at[slot])
    scores: jax.Array = plgpu.async_load_tmem(tensors.scores(slot), layout=p.layout)
    plgpu.wait_load_tmem()  # before weights are written there
    return scores


def maximum(old: jax.Array, largest: jax.Array) -> jax.Array:
    """Return the number that a row's weights are relative to: its old maximum, or its largest logit if that
    exceeds the maximum by more than `SLACK`.
    """
    return jnp.where(largest > old + SLACK, largest, old)


def store_weights(tensors: Tensors, slot: jax.Array, column: int, weights: jax.Array) -> None:
    """Store weights of a tile, from a column on."""
    plgpu.async_store_tmem(tensors.weights(slot).at[:, pl.ds(column, weights.shape[1])], weights)


def hand_over(
    p: Problem,
    tensors: Tensors,
    i: jax.Array,
    slot: jax.Array,
    consumer: jax.Array,
    rescale: jax.Array,
) -> None:
    """Hand a tile's weights over to be multiplied, with the consumer's sums times rescale."""
    sums, has_sums = tensors.sums_of(consumer, p.head_dim), i > 0
    pl.when(has_sums)(lambda: plgpu.barrier_wait(tensors.added.at[consumer]))

    @pl.when(has_sums & votes.any_in_warp(rescale != 1, is_interpreted=p.is_interpreted))
    def _rescale() -> None:
        for first in range(0, p.head_dim, AT_A_TIME):
            piece = sums.at[:, pl.ds(first, min(AT_A_TIME, p.head_dim - first))]
            old = plgpu.async_load_tmem(piece, layout=p.layout)
            if p.is_interpreted:  # on a GPU a value that is used has been read
                plgpu.wait_load_tmem()
            plgpu.async_store_tmem(piece, old * lax.broadcast_in_dim(rescale, old.shape, [0]))

    plgpu.commit_tmem()
    plgpu.barrier_arrive(tensors.weighted.at[slot])


def finish(p: Problem, tensors: Tensors, keys: KeyRange, consumer: jax.Array) -> None:
    """Wait until all has been added to a consumer's sums; zero them if there were no keys."""
    accumulator = tensors.sums_of(consumer, p.head_dim)

    @pl.when(keys.num_tiles == 0)
    def _no_keys() -> None:
        zeros = filled(accumulator.shape, 0.0, p.layout)
        plgpu.async_store_tmem(accumulator, zeros)
        plgpu.commit_tmem()

    pl.when(keys.num_tiles > 0)(lambda: plgpu.barrier_wait(tensors.added.at[consumer]))


def sums(p: Problem, tensors: Tensors, consumer: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """Load a consumer's sums, with the first column of each piece."""
    accumulator = tensors.sums_of(consumer, p.head_dim)
    for first in range(0, p.head_dim, WRITTEN_AT_A_TIME):
        piece = accumulator.at[:, pl.ds(first, min(WRITTEN_AT_A_TIME, p.head_dim - first))]
        yield first, plgpu.async_load_tmem(piece, layout=p.layout)
