"""Pushes of one worker: sends a step's gradients, one message per server, and waits for acknowledgements.

The compressor does selection, residuals and number formats; a push without them enters none of its files.
"""
# U = unique ids of a table in a step, D = embedding dim, V = requested ids, K = rows sent, T = tables

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shardkeep.base.arrays import Bytes, Rows
from shardkeep.base.errors import ProtocolError
from shardkeep.ps.client.calls import Replies, ServerCalls
from shardkeep.ps.client.compressor import Compressor, EncodedRows
from shardkeep.ps.client.pull import PullHandle, PullSender
from shardkeep.ps.client.request import Request
from shardkeep.ps.jagged import JaggedIds, JaggedLayout, JaggedRows
from shardkeep.ps.placement import Split, split
from shardkeep.ps.wire.ids import write_ids
from shardkeep.ps.wire.message import Kind, Packed, pull_names, push_value, set_value
from shardkeep.ps.wire.rows import RowFormats

Allocate = Callable[..., Packed]
"""`message.allocate` of a server's push, except the directory's columns."""


class PushWriter:
    """Writes the pushes of one worker.

    Args:
        formats: Formats of the encoded rows.
        coded: Code the ids.
    """

    def __init__(self, formats: RowFormats, *, num_servers: int, coded: bool) -> None:
        self._formats = formats
        self._widths_T = formats.widths_T
        self._num_servers = num_servers
        self.coded = coded
        """Whether ids are coded."""

    def write(self, rows: EncodedRows, request: Request, allocate: Sequence[Allocate]) -> list[Packed]:
        """Returns one message per server. `request`: the ids of the gradients; `allocate`: by server."""
        parts = request.split if rows.ids is request.ids else split(rows.ids, self._num_servers)
        return [self._message(rows, parts, server, each) for server, each in enumerate(allocate)]

    def _message(self, rows: EncodedRows, parts: Split, server: int, allocate: Allocate) -> Packed:
        ids = write_ids(parts.counts_ST[server], parts.ids_of(server, rows.ids.ids_V), coded=self.coded)
        sizes_S, tags_S = ids.rows_S * self._widths_T[ids.tables_S], self._formats.tags_T[ids.tables_S]
        if self._formats.packs:
            own = np.empty(int(sizes_S.sum()), dtype=np.uint8)
            parts.take_rows(server, rows.ids.layout, rows.encoded, self._widths_T, own)
            values, sizes_S = self._formats.pack(own, ids.rows_S, ids.tables_S)
            message = allocate(**ids.directory, value_bytes_S=sizes_S, value_formats_S=tags_S)
            message.values_area[:] = values
        else:
            message = allocate(**ids.directory, value_bytes_S=sizes_S, value_formats_S=tags_S)
            parts.take_rows(server, rows.ids.layout, rows.encoded, self._widths_T, message.values_area)
        message.ids_area[:] = ids.area
        return message


Grads = Mapping[str, Rows]
PullHandles = Sequence[PullHandle]


class PushBuffer(JaggedRows):
    """Gradients in the buffer of their push message. Do not change them after the push."""

    def __init__(self, layout: JaggedLayout, names: tuple[str, ...], message: Packed) -> None:
        super().__init__(layout, message.values_area.view(np.float32), names)
        self.message = message

    def is_of(self, step: int, request: Request) -> bool:
        """Whether the message is the push of this step and these ids."""
        return self.message.step == step and np.array_equal(self.message.ids_area.view(np.int64), request.ids.ids_V)


@dataclass(slots=True)
class _Unacknowledged:
    """A step's pushes that were sent alone, and the pull that the others carried, whose reply acknowledges them."""

    pull: PullHandle | None
    futures: list[tuple[int, Future[Bytes]]] = field(default_factory=list)

    def all(self) -> list[Future[Bytes]]:
        return [future for _, future in [*self.futures, *(self.pull.futures if self.pull else ())]]


class Pusher:
    """Sends one worker's pushes and waits for their acknowledgements. Not thread safe."""

    def __init__(
        self,
        calls: ServerCalls,
        pulls: PullSender,
        writer: PushWriter,
        compressor: Compressor,
        *,
        window: int,
        frozen: frozenset[str],
        replies: Replies,
    ) -> None:
        """`pulls`: of the same worker. `window`: most steps without an acknowledgement. `frozen`: tables whose
        gradients are not sent. `replies`: waits for the replies to a push within a step."""
        self.next_step = 0
        """The step after the last pushed one."""
        self.num_values = 0
        """Values of all gradients so far, sent or not; those of a step that is pushed again count once."""
        self._calls = calls
        self._replies = replies
        self._counted_until = 0
        self._pulls = pulls
        self._writer = writer
        self._compressor = None if compressor.plain else compressor
        self._frozen = frozen
        self.window = window
        """Most steps without an acknowledgement."""
        self._unacknowledged: dict[int, _Unacknowledged] = {}
        self._held: tuple[int, dict[int, Bytes]] | None = None

    def restart(self, step: int) -> None:
        """Forgets unacknowledged pushes: all steps from `step` on are pushed again."""
        self._unacknowledged.clear()
        self._held = None
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
            value=pull_names([1]),  # most pushes name one pull; another value may take more bytes
            **ids.directory,
            value_bytes_S=4 * ids.rows_S * layout.catalog.dims_T[ids.tables_S],
        )
        message.ids_area[:] = ids.area
        message.values_area[:] = 0
        return PushBuffer(layout, request.ids.names, message)

    def messages(
        self,
        step: int,
        request: Request,
        grads: Grads,
        pulls: PullHandles,
        *,
        last: bool = False,
        lr_factor: float = 1.0,
    ) -> dict[int, Bytes]:
        """Returns a step's pushes by server. Blocks until the window of unacknowledged steps has room.

        Raises as `RowClient.push`."""
        self.send_held()
        if step in self._unacknowledged:
            raise ProtocolError(f"step {step} was pushed before and is not acknowledged yet; a step is pushed once")
        compressor = self._compressor
        flush = last and compressor is not None and compressor.sends_later
        values = self._values(step, pulls, push_value(flush=flush, lr_factor=lr_factor))
        request, rows = self._fitted(request, grads)
        if step >= self._counted_until:
            self._counted_until = step + 1
            self.num_values += request.ids.layout.num_values
        self._wait_for_window(step)
        self._pulls.pushed(step)
        if isinstance(rows, PushBuffer) and rows.is_of(step, request) and set_value(rows.message, values[0]):
            return {0: rows.message.buffer}
        if compressor is None:
            encoded = EncodedRows(request.ids, rows.flat.view(np.uint8))
        else:
            encoded = compressor.compress(step, request.ids, rows, last=last)
        allocate = [partial(self._calls.allocate, Kind.PUSH, step, value=value) for value in values]
        messages = self._writer.write(encoded, request, allocate)
        return {server: packed.buffer for server, packed in enumerate(messages)}

    def _values(self, step: int, pulls: PullHandles, value: int) -> list[int]:
        """The `value` of each server's push, which names the step's pulls that it answered."""
        pulls = [pull for pull in pulls if pull.number and pull.fetch.step == step and pull.received]
        return [
            value | pull_names(pull.number for pull in pulls if pull.fetch.missing.split.count(server))
            for server in range(self._calls.num_servers)
        ]

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

    def send(self, step: int, pushes: dict[int, Bytes], pulls: Mapping[int, Bytes], pull: PullHandle | None) -> None:
        """Sends pushes. A pull to the same server goes in the same call, and its reply acknowledges both. Adds
        those replies to `pull`."""
        pending = self._unacknowledged[step] = _Unacknowledged(pull)
        self.next_step = step + 1
        for server, message in pushes.items():
            then = pulls.get(server)
            future = self._calls.send(server, message, then)
            (pending.futures if pull is None or then is None else pull.futures).append((server, future))

    def hold(self, step: int, pushes: dict[int, Bytes]) -> None:
        """Keeps a step's pushes until `take_held` or `send_held`."""
        self._held, self.next_step = (step, pushes), step + 1

    def take_held(self) -> tuple[int, dict[int, Bytes]] | None:
        """The held pushes, which the caller sends."""
        held, self._held = self._held, None
        return held

    def send_held(self) -> None:
        """Sends the held pushes alone."""
        if (held := self.take_held()) is not None:
            self.send(*held, {}, None)

    def wait_acknowledged(self, *, in_step: bool = True) -> None:
        """Blocks until every push is acknowledged; `in_step`: a step waits for it. Raises as `PullHandle.result`."""
        self.send_held()
        for step in sorted(self._unacknowledged):
            self._finish(step, self._replies if in_step else self._calls.replies)

    def acknowledged_within(self, limit_s: float) -> bool:
        """Whether every push is acknowledged; blocks up to `limit_s` seconds."""
        self.send_held()
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
