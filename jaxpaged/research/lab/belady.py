"""Belady's rule: the block whose content is asked for last goes first. It has to know the future, so it is
for the laboratory alone: the bound of what any policy can reach where a prompt needs all of its blocks.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.checks import check
from jaxpaged.code_digest import digest_of, trace_anew_if_changed
from jaxpaged.contracts import versions
from jaxpaged.memory import eviction
from jaxpaged.memory.policies import Policy
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking
from jaxpaged.research.lab.traces import Blocks


def _by_next_use(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    return -queue.note(RankedQueue.NEXT_USE, ids), now


BELADY = eviction.policy("belady", Ranking(_by_next_use))
LAB_POLICIES = {**eviction.EVICTION_POLICIES, BELADY.name: BELADY}


def named(name: str) -> Policy:
    """Return the policy of this name: one of ours, Belady's among them, or "package.module:Name" of another.

    Raises `InputError` for an unknown one.
    """
    if versions.is_path(name):
        return eviction.named(name)
    rule = f"one of {', '.join(LAB_POLICIES)}, or 'package.module:Name'"
    check("policy", name, rule, name in LAB_POLICIES)
    return LAB_POLICIES[name]


def trace_anew(names: Iterable[str]) -> None:
    """Drop JAX's traces of former versions of policies from outside.

    Raises `InputError` for an unknown one.
    """
    for name in sorted({name for name in names if versions.is_path(name)}):
        trace_anew_if_changed(name, digest_of(named(name)))


def next_use(blocks: Blocks) -> np.ndarray:
    """Return, for each of `blocks.symbols`, the number of the next request that has it; past all requests if
    none.
    """
    num_requests = len(blocks.starts)
    request = np.repeat(np.arange(num_requests), blocks.num_findable)
    order = np.argsort(blocks.symbols, kind="stable")
    is_last = np.append(blocks.symbols[order][1:] != blocks.symbols[order][:-1], True)
    uses = np.empty(len(order), np.int32)
    uses[order] = np.where(is_last, num_requests, np.append(request[order][1:], num_requests))
    return uses
