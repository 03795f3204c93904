"""Groups of devices, each with rows, a pool and a scheduler of its own: as one engine with all their rows.

The driver counts rows through, a group's after another's; what it writes and reads has an axis for the groups
if there are several.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine.request import Request
from jaxpaged.routing import Router, keys_of_tokens
from jaxpaged.step.report import Merge, Report
from jaxpaged.step.step import PromptScores


class Groups:
    """The groups of an engine, and which of them a request goes to. For one thread.

    `num_blocks` are a group's.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._config = config
        self.size, self.num_rows = config.data_parallel_size, config.num_rows
        self._num_blocks = num_blocks
        # Where the leader of answers last dealt went: its followers are the next ones.
        self._leader: tuple[int, int] = (0, 0)
        self.forget()

    def forget(self) -> None:
        """Nothing of former requests can be found any more."""
        # So many requests for its cached blocks a group may be ahead of others.
        lead = self._config.max_num_seqs / 2
        self._router: Router[int] = Router(max(self._num_blocks - 1, 1), max_lead=lead)

    def split(self, rows: np.ndarray) -> list[list[int]]:
        """Rows by their groups."""
        return [rows[rows // self.num_rows == group].tolist() for group in range(self.size)]

    def choose(self, request: Request, token_ids: np.ndarray, free_rows: Sequence[Sequence[int]]) -> int:
        """The group for a request, of those with free rows for it and all who must come with it.

        Answers to one prompt go where its first one went, as long as they run together there. Others go by
        `Router`: longest cached prefix, then load, unless a group is too far ahead.
        """
        if self.size == 1:
            return 0
        loads = {
            group: self.num_rows - len(rows)
            for group, rows in enumerate(free_rows)
            if len(rows) >= request.group_size
        }
        leader, its_group = self._leader
        if leader == request.leader_id != 0 and loads.get(its_group, np.inf) < self._config.max_num_seqs:
            return its_group
        keys = []
        if self._config.enable_prefix_caching:
            keys = keys_of_tokens(token_ids, self._config.block_size, str(request.salt))
        chosen = self._router.rank(keys, loads)[0]
        self._router.note(chosen, keys)
        if request.leader_id == 0:
            self._leader = request.request_id, chosen
        return chosen

    def local(self, rows: np.ndarray) -> np.ndarray:
        """Rows by each group's own numbers: one beyond all for another group's, and for none.

        With several groups they have an axis more, the first.
        """
        if self.size == 1:
            return rows
        first = self.num_rows * np.arange(self.size, dtype=np.int32).reshape(-1, *[1] * rows.ndim)
        own = rows - first
        return np.where((own >= 0) & (own < self.num_rows), own, self.num_rows).astype(np.int32)

    def with_rows(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [3, n], the first line their rows, by each group's own numbers."""
        if self.size == 1:
            return tokens
        rows = self.local(tokens[0])
        rest = np.broadcast_to(tokens[1:], (self.size, *tokens[1:].shape))
        return np.concatenate([rows[:, None], rest], axis=1)

    def merged(self, report: Report) -> Report:
        """What all groups report, as NumPy arrays; `counters` stay each group's, [groups, counters]."""
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

    def merged_prompts(self, told: PromptScores) -> PromptScores:
        """What all groups tell of prompts."""
        if self.size == 1:
            return told
        row: Any = told.row
        nobody = self.size * self.num_rows
        row = np.where(row < self.num_rows, row + self._first_rows, nobody)
        return _joined(dataclasses.replace(told, row=row))

    @property
    def _first_rows(self) -> np.ndarray:
        return self.num_rows * np.arange(self.size)[:, None]


def _joined(tree: Any) -> Any:
    """The first two axes as one."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)
