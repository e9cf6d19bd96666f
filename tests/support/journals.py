"""Journals that this process fills and reads back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkeep.ps.server.journal.journal import Journal, JournalRecord, RecordKind

LIMIT_S = 60.0


def body_of(size: int, step: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(step).integers(0, 256, size, dtype=np.uint8)


def seen(record: JournalRecord) -> tuple[RecordKind, int, int, bytes]:
    return record.entry, record.rank, record.step, record.body.tobytes()


def replayed(folder: Path) -> list[tuple[RecordKind, int, int, bytes]]:
    journal = Journal(folder, sync=False, lock_s=0)
    try:
        return [seen(record) for record in journal.replay()]
    finally:
        journal.close()


def steps(folder: Path) -> list[int]:
    return [step for entry, _, step, _ in replayed(folder) if entry is RecordKind.PUSH]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def filled(folder: Path, *, num_steps: int = 4, generation: int = 1, size: int = 100) -> Path:
    """One segment of some pushes, left by a process that ended; its path."""
    journal = Journal(folder, sync=False)
    journal.begin(generation, step=0, facts={})
    for step in range(num_steps):
        journal.append(RecordKind.PUSH, rank=0, step=step, body=body_of(size, step))
    journal.close()
    return segments(folder)[-1]
