"""ChangedRows: which rows of a server's tables changed since the last complete checkpoint: what an increment holds.

A bit for each row, set by the kernel of every update (table_kernels.py). Rows are never deleted from a table, so the
bits tell all there is to tell. Knows no file: a checkpoint is an id.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardkeep.ps.shard.table.table import Bits, Table


class ChangedRows:
    """The bits of all tables. At a mark they are handed over to the snapshot and start at zero. If that checkpoint has
    not become complete by the next mark, they come back then. Not thread safe."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._base = ""
        self._handed: list[Bits] | None = None

    def follow(self, base: str) -> None:
        """Notes changes from now on; without this none are. `base`: the checkpoint that the tables hold just now; "" =
        none. Nobody may push meanwhile."""
        for table in self._tables:
            table.note_changes()
        self._base, self._handed = base, None

    def hand_over(self, base: str) -> list[Bits] | None:
        """The bits of the rows that changed since checkpoint `base`, for a snapshot; None where these are not known,
        so that it must hold all rows. From here on changes are noted anew: they are those since the snapshot's
        checkpoint if that is told to be `complete`. Nobody may push meanwhile."""
        for table, bits in zip(self._tables, self._handed or [], strict=False):
            table.add_changes(bits)
        handed = [table.note_changes() for table in self._tables] if self._follows else None
        self._handed = handed
        return handed if base and base == self._base else None

    def complete(self, checkpoint: str) -> None:
        """The checkpoint for which bits were last handed over is complete; its id. Pushes may go on meanwhile."""
        if self._handed is not None:
            self._base, self._handed = checkpoint, None

    @property
    def _follows(self) -> bool:
        return any(table.notes_changes for table in self._tables)
