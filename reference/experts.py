"""Choices of experts by a router's scores, as plain as they are defined."""

from typing import Any

import numpy as np


def choose(e: Any, logits: np.ndarray, correction: np.ndarray) -> list[tuple[int, float]]:
    """Return one token's experts and their weights, by scores with a correction that weights do not have.

    Of groups of neighbouring experts those are left whose best few add up to most; of these, the best.
    """
    if e.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    ranked = (logits if e.ranks_logits else scores) + correction
    groups = ranked.reshape(e.num_groups, -1)
    of_group = np.sort(groups, axis=1)[:, -e.group_best :].sum(axis=1)
    left = np.argsort(-of_group, kind="stable")[: e.num_chosen_groups]
    size = groups.shape[1]
    ranked = np.where(np.isin(np.arange(len(ranked)) // size, left), ranked, -np.inf)
    chosen = np.argsort(-ranked, kind="stable")[: e.num_chosen]
    total = scores[chosen].sum() if e.renormalise else 1.0
    return [(int(expert), float(scores[expert] / total)) for expert in chosen]


def sparse_mixer(e: Any, scores: np.ndarray) -> list[tuple[int, float]]:
    """Return one token's two experts and their weights, each a softmax over the experts with a near score."""
    left, choices = set(range(len(scores))), []
    for _ in range(2):
        best = max(left, key=lambda i: (scores[i], -i))
        top = scores[best]
        near = [i for i in left if (top - scores[i]) / max(abs(scores[i]), top) <= 2 * e.jitter]
        choices.append((best, float(1 / np.exp(scores[near] - top).sum())))
        left.remove(best)
    return choices
