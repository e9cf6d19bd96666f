"""AdminServer: serves the admin calls of one server (ps/wire/admin.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import TransportError
from shardkeep.ps.checkpoint_probe import check_token
from shardkeep.ps.shard.journal.journal import Journal
from shardkeep.ps.shard.serving import Serving, done, in_thread, promised
from shardkeep.ps.shard.snapshot.writer import SnapshotWriter
from shardkeep.ps.wire.admin import (
    Call,
    CheckFolder,
    CheckpointSaved,
    CpuTime,
    Done,
    DropSnapshot,
    GetCpuTime,
    GetJournalSize,
    GetReport,
    JournalSize,
    LoadRows,
    R,
    Reply,
    ServerReport,
    TakeSnapshot,
    WriteSnapshot,
    decode_call,
    encode_reply,
)
from shardkeep.ps.wire.message import Kind, Packed, text_of, unpack


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
        serving: Serving,
        snapshots: SnapshotWriter,
        journal: Journal | None,
        *,
        frozen: Callable[[int], AbstractContextManager[None]],
        report: Callable[[bool], ServerReport],
        load: Callable[[LoadRows], None],
    ) -> None:
        self._serving, self._snapshots, self._journal, self._frozen = serving, snapshots, journal, frozen
        self._report, self._load = report, load

    def handle(self, message: Packed) -> Future[Bytes]:
        """The ANSWER to an ASK. Raises ProtocolError, CheckpointError or TransportError."""
        call = decode_call(text_of(unpack(message.buffer)))
        with self._serving.lock:
            self._serving.check_open(message.generation)
        if isinstance(call, WriteSnapshot):
            return self._later(self._snapshots.write(call.step, call.folder), message.rank)
        if isinstance(call, LoadRows):
            return self._later(in_thread(lambda: self._loaded(call), name="load-rows"), message.rank)
        return done(self._packed(self._reply(call), message.rank))

    def _reply(self, call: Call) -> Reply:
        match call:
            case GetReport():
                return self._report(call.digest)
            case GetCpuTime():
                return CpuTime(os.getpid(), time.process_time())
            case GetJournalSize():
                return JournalSize(0 if self._journal is None else self._journal.size_bytes)
            case CheckFolder():
                check_token(Path(call.folder) if call.folder else self._snapshots.folder().folder, call.token)
            case TakeSnapshot():
                self._take_snapshot(call)
            case DropSnapshot():
                self._snapshots.drop()
            case CheckpointSaved():
                self._checkpoint_saved(call)
        return Done()

    def _loaded(self, call: LoadRows) -> Done:
        self._load(call)
        return Done()

    def _take_snapshot(self, call: TakeSnapshot) -> None:
        with self._frozen(call.step):
            self._snapshots.take(call.step, call.base)
        if self._journal is not None:
            self._journal.roll()

    def _checkpoint_saved(self, call: CheckpointSaved) -> None:
        self._snapshots.saved(call.step, call.id)
        if self._journal is not None:
            self._journal.forget_before(call.step)

    def _packed(self, reply: Reply, rank: int) -> Bytes:
        return self._serving.text(Kind.ANSWER, encode_reply(reply), rank)

    def _later(self, found: Future[R], rank: int) -> Future[Bytes]:
        """The reply of a call that takes long."""
        message = promised()

        def finish(found: Future[R]) -> None:
            error = found.exception()
            if isinstance(error, TransportError):
                message.set_exception(error)
            elif isinstance(error, Exception):
                message.set_result(self._serving.error(error))
            else:
                message.set_result(self._packed(found.result(), rank))

        found.add_done_callback(finish)
        return message
