"""TableBytes: what each table adds to the messages of a dry run: ids, rows and gradients, without headers."""

# T = tables, S = sections of a message

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from shardkeep.base.arrays import Bytes
from shardkeep.ps.transport.transport import Handler
from shardkeep.ps.wire.message import Kind, Packed, read

_CLASSES = {Kind.PULL: "pull", Kind.ROWS: "pull answer", Kind.PUSH: "push"}


class TableBytes:
    """Counts by table what passes a server's handler."""

    def __init__(self, num_tables: int) -> None:
        self.bytes_T: dict[str, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(num_tables))
        """By class of messages, bytes of each table (T,)."""

    def watching(self, handle: Handler) -> Handler:
        """A handler that counts, in the place of another one."""

        def handler(buffer: Bytes, then: Bytes | None = None) -> Future[Bytes]:
            for message in (buffer, then):
                if message is not None:
                    self._add(read(message))
            reply = handle(buffer, then)
            reply.add_done_callback(lambda done: self._add(read(done.result())))
            return reply

        return handler

    def _add(self, message: Packed) -> None:
        if message.kind in _CLASSES and message.tables_S.size:
            bytes_T = self.bytes_T[_CLASSES[message.kind]]
            bytes_T += np.bincount(message.tables_S, message.id_sizes + message.value_sizes, bytes_T.size)
