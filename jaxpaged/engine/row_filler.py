"""Filler of rows: gives requests that wait free rows, and takes rows back for more urgent ones."""

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.engine.device import Device
from jaxpaged.engine.host_rows import HostRow, HostRows
from jaxpaged.engine.partial_rollouts import with_replayed
from jaxpaged.engine.replicas import Replicas
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_encoding import filled, row_values
from jaxpaged.engine.request_queue import Queued, RequestQueue
from jaxpaged.engine.services.service import InUse, Service
from jaxpaged.step.channels import CHANNELS
from jaxpaged.step.feature_values import BEAMS
from jaxpaged.step.state import Rows, empty_rows

# Requests submitted in one dispatch, and tokens written in one.
SUBMIT_LINES = 8
SUBMIT_TOKENS = 2048


class RowFiller:
    """The way from the queue into rows of the device, and back. For the engine's thread only."""

    def __init__(
        self,
        device: Device,
        rows: HostRows,
        queue: RequestQueue,
        replicas: Replicas,
        services: Sequence[Service],
    ) -> None:
        self._device, self._rows, self._queue, self._replicas = device, rows, queue, replicas
        self._services = services  # the driver's list, to which more may come
        self._config, self._vocab_size = device.setup.config, device.setup.model_config.vocab_size
        self._empty_lines = self._lines()

    def _lines(self) -> Rows:
        """Return what submitted requests are filled into, a line each."""
        return empty_rows(SUBMIT_LINES, 0, self._vocab_size, self._device.setup.features)

    def warm_up(self) -> None:
        """Make each call to the device once, without an effect, so that all is compiled.

        Needed again when the rows have other fields.
        """
        self._empty_lines = self._lines()
        self._submit([])
        self._device.abort(np.zeros(len(self._rows), np.int32))

    def fill(self) -> None:
        """Give rows to the first requests in the queue; those that come together get theirs at once."""
        if not self._queue:
            return
        free_rows = self._replicas.split(self._rows.free_rows)
        if num_held_rows := self._num_held_rows:
            del free_rows[0][-num_held_rows:]
        in_use = InUse.of(entry.request for _, entry in self._rows.taken())
        filled_rows: list[tuple[int, int, Queued]] = []
        taken = self._queue.take(
            max_requests=lambda: max(map(len, free_rows)),
            has_room=lambda request: all(service.make_room(request, in_use) for service in self._services),
        )
        for together in taken:
            first = together[0]
            if any(service.takes_for_row(together) for service in self._services):
                del free_rows[0][-len(together) :]
                continue
            in_use.add(first.request)
            replica_rows = free_rows[self._replicas.choose(first.request, first.token_ids, free_rows)]
            head = replica_rows[0]
            filled_rows += [(replica_rows.pop(0), head, queued) for queued in together]
        for batch in itertools.batched(filled_rows, SUBMIT_LINES):
            self._submit(batch)

    def recall_less_urgent(self) -> None:
        """Put requests that wait in rows, new or preempted, back where more urgent ones could have their
        rows.

        A recalled request may have run in the run whose report is unread. Then it runs again, to the same
        answer.
        """
        if not self._queue:
            return
        waiting = sorted(self._rows.waiting(), reverse=True)
        if not waiting:
            return
        if self._queue.first.order > waiting[0][0]:
            return  # always so under first come, first served
        num_free = max(len(self._rows.free_rows) - self._num_held_rows, 0)
        giving_way = {row for _, row in waiting}
        staying = InUse.of(entry.request for row, entry in self._rows.taken() if row not in giving_way)

        def has_room(request: Request) -> bool:
            return all(service.has_room(request, staying) for service in self._services)

        urgent = itertools.islice(self._queue.with_room(has_room), num_free, None)
        pairs = zip(waiting, urgent, strict=False)
        self.recall([row for (order, row), queued in pairs if queued.request.order < order])

    def recall(self, rows: Sequence[int]) -> None:
        """Put the requests in these rows back into the queue, with what is known of their answers."""
        recalled = []
        for row in rows:
            entry = self._rows[row]
            assert entry is not None
            recalled.append(entry)
            self._rows.leave(row)
        self.abort(recalled)
        for entry in recalled:
            self._queue.add(entry.request, entry.answer)

    def abort(self, entries: Sequence[HostRow]) -> None:
        """Let the device end the requests of rows."""
        if entries:
            self._device.abort(self._rows.device_ids_of(entries))

    @property
    def _num_held_rows(self) -> int:
        """Number of free rows that services hold for requests that they have taken."""
        return sum(service.num_held_rows for service in self._services)

    def _submit(self, batch: Sequence[tuple[int, int, Queued]]) -> None:
        """Put requests, each with its row and the first row of those that come with it, into the state."""
        rows = np.full(SUBMIT_LINES, len(self._rows), np.int32)  # beyond all: none
        tokens = [np.zeros((3, 0), np.int32)]  # row, position and id of each token
        lines = []
        for line, (row, head, queued) in enumerate(batch):
            token_ids, num_tokens = with_replayed(queued), len(queued.token_ids)
            positions = np.arange(len(token_ids), dtype=np.int32)
            tokens.append(np.stack([np.full_like(token_ids, row), positions, token_ids]))
            rows[line] = row
            self._rows.take(row, queued.request, queued.answer)
            values = row_values(queued.request, self._config, self._vocab_size, num_tokens)
            values["features"][BEAMS]["head"] = head % self._config.num_rows  # a row of its replica
            for service in self._services:
                values["features"] |= service.row_values(queued)
            lines.append(values)
        self._in_chunks(np.concatenate(tokens, axis=1), self._device.write_tokens)
        asked = [(row, queued.request.params) for row, _, queued in batch]
        for name, template in self._empty_lines.given.items():
            written = CHANNELS[name].lines(asked, template.shape[2:])
            self._in_chunks(written, functools.partial(self._device.write_given, name))
        self._device.place(filled(self._empty_lines, lines), self._replicas.local(rows))

    def _in_chunks(self, tokens: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
        """Write tokens, each under its row and position, in chunks of one size: so nothing is compiled
        anew.
        """
        for first in range(0, max(tokens.shape[1], 1), SUBMIT_TOKENS):
            chunk = tokens[:, first : first + SUBMIT_TOKENS]
            padding = ((0, 0), (0, SUBMIT_TOKENS - chunk.shape[1]))
            chunk = np.pad(chunk, padding, constant_values=len(self._rows))  # beyond all rows: none
            write(self._replicas.with_rows(chunk))
