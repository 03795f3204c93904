"""Eviction policies that know more of a block than when it was freed: which free one loses its content first.

Blocks without content always go first, in the order in which they were given back. For the others:

- `fifo`: in the order in which they were first given back, whatever was found since.
- `lfu`: the least often used first, with ageing: a block's uses are counted from the floor, the count at
  which the last block was taken (LFU with dynamic ageing). Of equals the longest unused.
- `depth`: the leaves of the prefix tree first, with the same ageing: to lie half as deep in a prompt is worth
  one more turn. Of equals the longest unused.
- `sieve`: in rounds in the order of `fifo`; a block that was found since the last round is left for the next.
  New blocks are last in the current round, or, where none of it is left, in the next (SIEVE).
- `s3fifo`: two such orders, a small one for new blocks and a main one; a block found twice in the small
  one, or comes back soon after its eviction from there, moves to the main one (S3-FIFO).
- `plain_lfu`: the least often used, without ageing.
- `tinylfu`: a small window and a main part, for which blocks compete by how often they were used (W-TinyLFU).
- `greedy_dual`: the longest unused, where a block of a longer prompt, which costs more, counts as used later.
- `queue_lru`: what waiting requests will find goes last.

`named` knows these, those of `policies`, and by "package.module:Name" those from outside. The oracles are in
`reference/eviction.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.checks import InputError, check, shown
from jaxpaged.contracts import versions
from jaxpaged.memory import greedy_dual, policies, queue_lru, ranked_queue, s3_fifo, tiny_lfu
from jaxpaged.memory.policies import Policy, Sweep
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking, Spared

MOST_TURNS = 16  # turns that a block at depth 0 is worth under `depth`
SMALL_SHARE = 10  # the small queue of `s3fifo` has 1 of so many blocks
MOST_HITS = 3  # hits that count under `s3fifo`

type Rank = tuple[Int[Array, " n"], Int[Array, " n"]]


@functools.cache
def policy(
    name: str,
    ranking: Ranking,
    *,
    push: Callable[..., Any] = ranked_queue.push,
    take: Callable[..., Any] = ranked_queue.take,
    note_content: Callable[..., Any] = ranked_queue.note_content,
    **others: Any,
) -> Policy:
    """Return the policy of a pool whose free blocks are ranked so; the same object for the same arguments.

    others: fields of `Policy`.
    """
    return Policy(
        name,
        functools.partial(ranked_queue.create, ranking=ranking),
        (
            Sweep(
                functools.partial(push, ranking, content=True),
                last_block_first=True,
                content=True,
            ),
            Sweep(
                functools.partial(push, ranking, content=False),
                last_block_first=True,
                content=False,
            ),
        ),
        keeps_content=True,
        take=functools.partial(take, ranking),
        remove=ranked_queue.remove,
        note_content=functools.partial(note_content, ranking),
        **{"note_hits": ranked_queue.note_hits, "contract": ranking.contract, **others},
    )


def _by_birth(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> Rank:
    return jnp.broadcast_to(queue.floor, now.shape), queue.note(RankedQueue.BORN, ids)


def _by_uses(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> Rank:
    return queue.floor + 1 + queue.note(RankedQueue.HITS, ids), now


def _by_uses_without_ageing(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> Rank:
    return queue.note(RankedQueue.HITS, ids), now


def _by_depth(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> Rank:
    depth = queue.note(RankedQueue.DEPTH, ids) - 1
    halvings = sum((depth >> i > 0).astype(jnp.int32) for i in range(MOST_TURNS))
    return queue.floor + MOST_TURNS - halvings, now


def _as_it_was(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> Rank:
    """Put new blocks behind all others; every other block stays where it was."""
    major, minor = queue.rank[ids].T
    return jnp.where(is_first, queue.floor, major), jnp.where(is_first, now, minor)


def _passed_over(queue: RankedQueue, block_id: Int[Array, ""]) -> Spared:
    """Keep a block that was hit since the last round for the next round, with its hits cleared."""
    hits = queue.note(RankedQueue.HITS, block_id)
    next_round = queue.rank[block_id] + jnp.array([1, 0], jnp.int32)
    return hits > 0, next_round, queue.kind[block_id], jnp.zeros_like(hits)


RANKINGS = {
    "fifo": Ranking(_by_birth),
    "lfu": Ranking(_by_uses),
    "depth": Ranking(_by_depth),
    "sieve": Ranking(_as_it_was, spare=_passed_over, floor_follows_lowest=True),
    "plain_lfu": Ranking(_by_uses_without_ageing),
}
DEFAULT_BLOCK_SIZE = 16  # tokens


@functools.cache
def _greedy_dual(block_size: int) -> Policy:
    return policy("greedy_dual", greedy_dual.ranking(block_size), push=greedy_dual.push)


EVICTION_POLICIES = (
    {name: each for name, each in policies.POLICIES.items() if each.keeps_content}
    | {name: policy(name, ranking) for name, ranking in RANKINGS.items()}
    | {
        "s3fifo": policy("s3fifo", s3_fifo.RANKING, take=s3_fifo.take, note_content=s3_fifo.note_content),
        "tinylfu": policy(
            "tinylfu",
            tiny_lfu.RANKING,
            push=tiny_lfu.push,
            note_content=tiny_lfu.note_content,
            note_hits=tiny_lfu.note_hits,
        ),
        "greedy_dual": replace(_greedy_dual(DEFAULT_BLOCK_SIZE), for_block_size=_greedy_dual),
        "queue_lru": policy("queue_lru", queue_lru.RANKING, note_waiting=queue_lru.note_waiting),
    }
)
OURS = frozenset(EVICTION_POLICIES.values())  # whatever is put into the table later


def named(asked: Any, option: str = "policy") -> Policy:
    """Return the policy that a user means: a name of ours, "package.module:Name", a `Policy`, or a `Ranking`.

    option: the option's name, for the error.

    A policy from outside that is found by its path has that path as its name. Raises `InputError`.
    """
    rule = f"one of {', '.join(EVICTION_POLICIES)}, or 'package.module:Name' of a Policy or a Ranking"
    if isinstance(asked, str) and not versions.is_path(asked):
        check(option, asked, rule, asked in EVICTION_POLICIES)
        return EVICTION_POLICIES[asked]
    path = asked if isinstance(asked, str) else None
    chosen = asked if path is None else versions.imported(option, path, rule)
    if isinstance(chosen, Ranking):
        chosen = policy(path or getattr(chosen.rank, "__qualname__", "ranking"), chosen)
    if not isinstance(chosen, Policy):
        raise InputError(f"{option}={shown(asked)} must be {rule}, not {type(chosen).__name__}")
    versions.check_version(option, path or chosen.name, chosen, "policy")
    if not chosen.keeps_content:
        raise InputError(
            f"{option}={shown(path or chosen.name)} must keep content: its keeps_content must be True"
        )
    if path is not None:
        return replace(chosen, name=path)
    if EVICTION_POLICIES.get(chosen.name, chosen) != chosen:
        raise InputError(f"{option}={shown(chosen.name)} must have another name than ours of that name")
    return chosen
