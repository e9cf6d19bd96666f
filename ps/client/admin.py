"""AdminClient: admin calls to every server. Pulls and pushes no rows."""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.ps.wire.admin import (
    Call,
    CheckFolder,
    CheckpointSaved,
    CpuTime,
    DropSnapshot,
    GetCpuTime,
    GetJournalSize,
    GetReport,
    JournalSize,
    LoadRows,
    R,
    ServerReport,
    SnapshotFiles,
    TakeSnapshot,
    WriteSnapshot,
    decode_reply,
    encode_call,
)


class AdminClient:
    """Sends each call to all servers and returns their replies in the order of the servers.

    Thread safe. Every method blocks, and raises DeadlineExceeded, TransportError, ProtocolError, or RemoteError when a
    server refuses or fails.
    """

    def __init__(self, ask: Callable[[str, float | None], list[str]]) -> None:
        """`ask`: sends a text to all servers and returns the texts of their replies; its deadline in seconds, None =
        the usual one."""
        self._ask = ask

    def report(self, *, digest: bool = True) -> list[ServerReport]:
        """Tables and counts and, by a scan of all rows on the servers, digests."""
        return self._replies(GetReport(digest), GetReport.reply)

    def cpu_time(self) -> list[CpuTime]:
        """Reads process ids and CPU seconds."""
        return self._replies(GetCpuTime(), GetCpuTime.reply)

    def journal_size(self) -> list[JournalSize]:
        """Reads the sizes of the journals."""
        return self._replies(GetJournalSize(), GetJournalSize.reply)

    def check_folder(self, token: str, folder: str = "") -> None:
        """Checks that the servers see the checkpoint folder that has `token`. `folder`: its path; "" = the job's."""
        self._replies(CheckFolder(token, folder), CheckFolder.reply)

    def take_snapshot(self, step: int, base: str = "") -> None:
        """Fixes the rows of a step boundary, or those that changed since checkpoint `base`."""
        self._replies(TakeSnapshot(step, base), TakeSnapshot.reply)

    def write_snapshot(self, step: int, *, timeout_s: float, folder: str = "") -> list[SnapshotFiles]:
        """Writes the rows that `take_snapshot` fixed; blocks until the files are written. `folder`: of checkpoints, as
        servers see it; "" = the job's."""
        return self._replies(WriteSnapshot(step, folder), WriteSnapshot.reply, timeout_s)

    def load_rows(self, folder: str, step: int, *, servers: int, timeout_s: float) -> None:
        """Fills the empty tables of the job's `servers` with the rows of the checkpoint of `step` in a folder."""
        self._replies(LoadRows(folder, step, servers), LoadRows.reply, timeout_s)

    def drop_snapshot(self) -> None:
        """Drops the snapshot, also while it is written."""
        self._replies(DropSnapshot(), DropSnapshot.reply)

    def checkpoint_saved(self, step: int, checkpoint: str) -> None:
        """Reports that the checkpoint of `step` is complete, with its id."""
        self._replies(CheckpointSaved(step, checkpoint), CheckpointSaved.reply)

    def _replies(self, call: Call, kind: type[R], timeout_s: float | None = None) -> list[R]:
        return [decode_reply(text, kind) for text in self._ask(encode_call(call), timeout_s)]
