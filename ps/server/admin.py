"""AdminServer: serves the admin calls of one server (ps/wire/admin.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import SILENCE_S, wait_while_moving
from shardkeep.base.errors import CheckpointError, TransportError
from shardkeep.ps.checkpoints.probe import check_token
from shardkeep.ps.server.journal.journal import Journal
from shardkeep.ps.server.server_state import ServerState, done, in_thread
from shardkeep.ps.server.snapshot.writer import SnapshotWriter
from shardkeep.ps.wire import admin as wire
from shardkeep.ps.wire.message import Kind, Packed, text_of


class AdminServer:
    """Replies to admin calls: at once, or through a future for a call that takes long.

    Args:
        journal: The journal of the server's pushes; None = there is none.
        frozen: Inside, all steps before the given step are applied and no push can be. Raises if the server is at
            another step.
        report: The facts that a server reports about itself, with or without digests of its rows.
        load: Fills the server's empty tables with the rows of a checkpoint.
    """

    def __init__(
        self,
        serving: ServerState,
        snapshots: SnapshotWriter,
        journal: Journal | None,
        *,
        frozen: Callable[[int], AbstractContextManager[None]],
        report: Callable[[bool], wire.ServerReport],
        load: Callable[[wire.LoadRows], None],
    ) -> None:
        self._serving, self._snapshots, self._journal, self._frozen = serving, snapshots, journal, frozen
        self._report, self._load = report, load

    def handle(self, message: Packed) -> Future[Bytes]:
        """The ANSWER to an ASK. Raises ProtocolError, CheckpointError or TransportError."""
        call = wire.decode_call(text_of(message))
        with self._serving.lock:
            self._serving.check_open(message.generation)
        if isinstance(call, wire.WriteSnapshot):
            return self._later(self._snapshots.write(call.step, call.folder), message.rank)
        if isinstance(call, wire.LoadRows):
            return self._later(in_thread(lambda: self._load(call), name="load-rows"), message.rank)
        return done(self._packed(self._reply(call), message.rank))

    def _reply(self, call: wire.Call) -> wire.Reply:
        match call:
            case wire.GetReport():
                return self._report(call.digest)
            case wire.GetCpuTime():
                return wire.ServerCpuTime(os.getpid(), time.process_time())
            case wire.GetJournalSize():
                return wire.JournalSize(0 if self._journal is None else self._journal.size_bytes)
            case wire.CheckFolder():
                check_token(Path(call.folder) if call.folder else self._snapshots.folder().folder, call.token)
            case wire.TakeSnapshot():
                with self._frozen(call.step):
                    self._snapshots.take(call.step, call.base)
                if self._journal is not None:
                    self._journal.roll()
            case wire.DropSnapshot():
                self._snapshots.drop()
            case wire.CheckpointSaved():
                self._snapshots.saved(call.step, call.id)
                if self._journal is not None:
                    self._journal.forget_before(call.step)
        return wire.Done()

    def _packed(self, reply: wire.Reply, rank: int) -> Bytes:
        return self._serving.text(Kind.ANSWER, wire.encode_reply(reply), rank)

    def _later(self, reply: Future[Any], rank: int) -> Future[Bytes]:
        """The reply of a call that takes long; None = `Done`. An error where it is stuck."""
        before = self._snapshots.rows_done

        def answer() -> Bytes:
            try:
                if not wait_while_moving(partial(_has_come, reply), SILENCE_S, lambda: self._snapshots.rows_done):
                    rows = self._snapshots.rows_done - before
                    self._snapshots.drop()
                    raise CheckpointError(f"a snapshot is stuck: {rows:,} rows, none for {SILENCE_S:g} s")
                return self._packed(reply.result() or wire.Done(), rank)
            except TransportError:
                raise
            except Exception as error:
                return self._serving.error(error)

        return in_thread(answer, name="answer")


def _has_come(reply: Future[Any], seconds: float) -> bool:
    return bool(wait([reply], seconds).done)
