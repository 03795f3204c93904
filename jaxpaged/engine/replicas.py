"""Replicas: data-parallel groups of devices, each with rows, a pool and a scheduler of its own.

The driver sees one engine with the rows of all replicas, one replica's after another's. What it writes and
reads has a first axis for replicas if there are several.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine.request import Request
from jaxpaged.kv_events.follower import tell
from jaxpaged.kv_events.messages import Event
from jaxpaged.routing import Router, keys_of_tokens, salt_of
from jaxpaged.step.report import Merge, Report
from jaxpaged.step.step import PromptScores


class Replicas:
    """The replicas of an engine, and the choice of one for each request. For one thread.

    num_blocks: blocks of one replica's pool.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._config = config
        self.size, self.num_rows = config.data_parallel_size, config.num_rows
        self._num_blocks = num_blocks
        # The last request with other answers to its prompt, and its replica: the others come next.
        self._leader: tuple[int, int] = (0, 0)
        self.forget()

    def forget(self) -> None:
        """Forget which prefixes are cached where."""
        # A replica with the longer cached prefix may have up to `lead` more requests than the others.
        lead = self._config.max_num_seqs / 2
        self._router: Router[int] = Router(max(self._num_blocks - 1, 1), max_lead=lead)

    def follow(self, replica: int, events: Sequence[Event]) -> None:
        """Take over what a replica tells of its prefix cache: from then on that decides."""
        if self.size > 1:
            tell(self._router, replica, events)

    def split(self, rows: np.ndarray) -> list[list[int]]:
        """Return the rows of each replica."""
        return [rows[rows // self.num_rows == replica].tolist() for replica in range(self.size)]

    def choose(self, request: Request, token_ids: np.ndarray, free_rows: Sequence[Sequence[int]]) -> int:
        """Choose a replica that has free rows for a request and for all that come with it.

        Answers to one prompt go to the replica of its first answer, as long as they run together there. For
        others `Router` decides: longest cached prefix, then load, unless a replica is too far ahead.
        """
        if self.size == 1:
            return 0
        loads = {
            replica: self.num_rows - len(rows)
            for replica, rows in enumerate(free_rows)
            if len(rows) >= request.group_size
        }
        leader, its_replica = self._leader
        if leader == request.leader_id != 0 and loads.get(its_replica, np.inf) < self._config.max_num_seqs:
            return its_replica
        keys = []
        if self._config.enable_prefix_caching:
            adapter = None if request.adapter is None else request.adapter.request.lora_name
            salt = salt_of(request.cache_salt, adapter)
            keys = keys_of_tokens(token_ids, self._config.block_size, salt)
        chosen = self._router.rank(keys, loads)[0]
        self._router.note(chosen, keys)
        if request.leader_id == 0:
            self._leader = request.request_id, chosen
        return chosen

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Return rows by each replica's own numbers; `num_rows` stands for rows of others, and for none.

        With several replicas the result has one axis more, the first.
        """
        if self.size == 1:
            return rows
        first = self.num_rows * np.arange(self.size, dtype=np.int32).reshape(-1, *[1] * rows.ndim)
        local_rows = rows - first
        return np.where((local_rows >= 0) & (local_rows < self.num_rows), local_rows, self.num_rows).astype(
            np.int32
        )

    def with_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Return [lines, n], whose first line are rows, with each replica's own row numbers."""
        if self.size == 1:
            return tokens
        rows = self.local(tokens[0])
        rest = np.broadcast_to(tokens[1:], (self.size, *tokens[1:].shape))
        return np.concatenate([rows[:, None], rest], axis=1)

    def merged(self, report: Report) -> Report:
        """Merge the reports of all replicas, NumPy arrays; `counters` stay apart, [replicas, counters]."""
        if self.size == 1:
            return report
        each = {
            field.name: self._merge(field.metadata["merge"], getattr(report, field.name))
            for field in dataclasses.fields(report)
        }
        return dataclasses.replace(report, **each)

    def _merge(self, how: Merge, values: Any) -> Any:
        """Return one engine's values from those of all groups, which have one axis more, the first."""
        match how:
            case Merge.ROWS:
                return _joined(values)
            case Merge.ROW_NUMBERS:
                return _joined(values + self._first_rows)
            case Merge.SUM:
                return values.sum()
            case Merge.BITS:
                return np.bitwise_or.reduce(values)
            case Merge.KEEP:
                return values

    def merged_prompts(self, scores: PromptScores) -> PromptScores:
        """Merge what all replicas report of prompts."""
        if self.size == 1:
            return scores
        row: Any = scores.row
        none = self.size * self.num_rows
        row = np.where(row < self.num_rows, row + self._first_rows, none)
        return _joined(dataclasses.replace(scores, row=row))

    @property
    def _first_rows(self) -> np.ndarray:
        return self.num_rows * np.arange(self.size)[:, None]


def _joined(tree: Any) -> Any:
    """Join the first two axes."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
