"""Pushes of one worker: sends a step's gradients, one message per server, and waits for acknowledgements.

The compressor does selection, residuals and number formats; a push without them enters none of its files.
"""
# U = unique ids of a table in a step, D = embedding dim

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import ProtocolError
from shardkeep.ps.client.calls import Replies, ServerCalls
from shardkeep.ps.client.compressor import Compressor, EncodedRows
from shardkeep.ps.client.pull import Pull, Puller
from shardkeep.ps.client.push_messages import PushWriter
from shardkeep.ps.client.request import Request
from shardkeep.ps.jagged import JaggedIds, JaggedRows, Layout
from shardkeep.ps.placement import split
from shardkeep.ps.wire.ids import write_ids
from shardkeep.ps.wire.message import Kind, Packed, pull_names, push_value, set_value

Grads = Mapping[str, Rows]
Pulls = Sequence[Pull]


class PushBuffer(JaggedRows):
    """Gradients in the buffer of their push message. Do not change them after the push."""

    def __init__(self, layout: Layout, names: tuple[str, ...], message: Packed) -> None:
        super().__init__(layout, message.values_area.view(np.float32), names)
        self.message = message

    def is_of(self, step: int, request: Request) -> bool:
        """Whether the message is the push of this step and these ids."""
        return self.message.step == step and np.array_equal(self.message.ids_area.view(np.int64), request.ids.ids_V)


@dataclass(slots=True)
class _Unacknowledged:
    """A step's pushes that were sent alone, and the pull that the others carried, whose reply acknowledges them."""

    pull: Pull | None
    futures: list[tuple[int, Future[Bytes]]] = field(default_factory=list)

    def all(self) -> list[Future[Bytes]]:
        return [future for _, future in [*self.futures, *(self.pull.futures if self.pull else ())]]


class Pusher:
    """Sends one worker's pushes and waits for their acknowledgements. Not thread safe."""

    def __init__(
        self,
        calls: ServerCalls,
        pulls: Puller,
        writer: PushWriter,
        compressor: Compressor,
        *,
        window: int,
        frozen: frozenset[str] = frozenset(),
        replies: Replies | None = None,
    ) -> None:
        """`pulls`: of the same worker. `window`: most steps without an acknowledgement. `frozen`: tables whose
        gradients are not sent. `replies`: waits for the replies to a push within a step."""
        self.next_step = 0
        """The step after the last pushed one."""
        self.num_values = 0
        """Values of all gradients so far, sent or not; those of a step that is pushed again count once."""
        self._calls = calls
        self._replies = calls.replies if replies is None else replies
        self._counted_until = 0
        self._pulls = pulls
        self._writer = writer
        self._compressor = None if compressor.plain else compressor
        self._frozen = frozen
        self.window = window
        """Most steps without an acknowledgement."""
        self._unacknowledged: dict[int, _Unacknowledged] = {}

    def restart(self, step: int) -> None:
        """Forgets unacknowledged pushes: all steps from `step` on are pushed again."""
        self._unacknowledged.clear()
        self.next_step = step

    @property
    def num_unacknowledged(self) -> int:
        """Steps whose push is not acknowledged."""
        return len(self._unacknowledged)

    def buffer(self, step: int, request: Request) -> JaggedRows:
        """Returns zeros for a step's gradients: in the buffer of the message, if the push needs no other form."""
        if self._calls.num_servers > 1 or self._writer.coded or self._frozen or self._compressor is not None:
            return JaggedRows.zeros(request.ids)
        layout = request.ids.layout
        ids = write_ids(request.split.counts_ST[0], request.ids.ids_V, coded=False)
        message = self._calls.allocate(
            Kind.PUSH,
            step,
            **ids.directory,
            value_bytes_S=4 * ids.rows_S * layout.catalog.dims_T[ids.tables_S],
        )
        message.ids_area[:] = ids.area
        message.values_area[:] = 0
        return PushBuffer(layout, request.ids.names, message)

    def messages(
        self, step: int, request: Request, grads: Grads, pulls: Pulls, *, last: bool = False, lr_factor: float = 1.0
    ) -> dict[int, Bytes]:
        """Returns a step's pushes by server. Blocks until the window of unacknowledged steps has room.

        Raises as `RowClient.push`."""
        if step in self._unacknowledged:
            raise ProtocolError(f"step {step} was pushed before and is not acknowledged yet; a step is pushed once")
        compressor = self._compressor
        flush = last and compressor is not None and compressor.sends_later
        pulls = [pull for pull in pulls if pull.number and pull.fetch.step == step and pull.received]
        value = push_value(flush=flush, lr_factor=lr_factor)

        def value_of(server: int) -> int:
            return value | pull_names(pull.number for pull in pulls if pull.fetch.missing.split.count(server))

        request, rows = self._fitted(request, grads)
        if step >= self._counted_until:
            self._counted_until = step + 1
            self.num_values += request.ids.layout.num_values
        self._wait_for_window(step)
        self._pulls.pushed(step)
        if isinstance(rows, PushBuffer) and rows.is_of(step, request):
            set_value(rows.message, value_of(0))
            return {0: rows.message.buffer}
        if compressor is None:
            encoded = EncodedRows(request.ids, rows.flat.view(np.uint8), None)
        else:
            encoded = compressor.compress(step, request.ids, rows, last=last)

        def allocate(server: int, **directory: Any) -> Packed:
            return self._calls.allocate(Kind.PUSH, step, value=value_of(server), **directory)

        messages = self._writer.write(encoded, request, [pull.fetch.missing for pull in pulls], allocate)
        return {server: packed.buffer for server, packed in enumerate(messages)}

    def _fitted(self, request: Request, grads: Grads) -> tuple[Request, JaggedRows]:
        """The gradients as jagged rows, and the request of their tables alone."""
        ids = request.ids
        if self._frozen and not self._frozen.isdisjoint(grads):
            grads = {name: grad_UD for name, grad_UD in grads.items() if name not in self._frozen}
        if isinstance(grads, JaggedRows) and grads.layout.same(ids.layout) and len(grads) == len(ids):
            return request, grads
        catalog = ids.layout.catalog
        for name, grad_UD in grads.items():
            if name not in ids:
                raise ProtocolError(f"gradients of table {name}, which the request has no ids of")
            expected = (ids[name].size, int(catalog.dims_T[catalog.index[name]]))
            if grad_UD.shape != expected or grad_UD.dtype != np.float32 or not grad_UD.flags.c_contiguous:
                raise ProtocolError(
                    f"table {name}: {grad_UD.dtype} gradients {grad_UD.shape}; expected contiguous float32 {expected}"
                )
        if set(grads) != set(ids):
            ids = JaggedIds.of_arrays(catalog, {name: ids[name] for name in grads})
            request = Request(ids, split(ids, self._calls.num_servers))
        return request, JaggedRows.of_arrays(ids, grads)

    def send(self, step: int, pushes: dict[int, Bytes], pulls: Mapping[int, Bytes], pull: Pull | None) -> None:
        """Sends pushes. A pull to the same server goes in the same call, and its reply acknowledges both. Adds
        those replies to `pull`."""
        pending = self._unacknowledged[step] = _Unacknowledged(pull)
        self.next_step = step + 1
        for server, message in pushes.items():
            then = pulls.get(server)
            future = self._calls.send(server, message, then)
            (pending.futures if pull is None or then is None else pull.futures).append((server, future))

    def wait_acknowledged(self, *, in_step: bool = True) -> None:
        """Blocks until every push is acknowledged. Raises what `Pull.result` raises. `in_step`: a step waits for it."""
        for step in sorted(self._unacknowledged):
            self._finish(step, self._replies if in_step else self._calls.replies)

    def acknowledged_within(self, limit_s: float) -> bool:
        """Whether every push is acknowledged; blocks up to `limit_s` seconds."""
        futures = [future for pending in self._unacknowledged.values() for future in pending.all()]
        return not concurrent.futures.wait(futures, timeout=limit_s).not_done

    def _wait_for_window(self, step: int) -> None:
        for earlier in sorted(self._unacknowledged):
            if earlier <= step - self.window or all(f.done() for f in self._unacknowledged[earlier].all()):
                self._finish(earlier, self._replies)

    def _finish(self, step: int, replies: Replies) -> None:
        pending = self._unacknowledged[step]
        for _ in replies(pending.futures, Kind.ACK):
            pass
        if pending.pull is not None and not pending.pull.received:
            for _ in replies(pending.pull.futures, Kind.ROWS):
                pass
        del self._unacknowledged[step]
