"""Loads a model: of a run, from a checkpoint, or of an export."""

from __future__ import annotations

from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.inference.export.manifest import MANIFEST, is_export
from shardkeep.inference.trained import Trained, trained_of_run
from shardkeep.run.trained import Which
from shardkeep.workers.config import Amp


def load_trained(path: Path, which: Which = "auto", *, verify: bool = False, amp: Amp | None = None) -> Trained:
    """The model of a run or an export. Blocks while the rows of a run load.

    Args:
        which: Of a run: its checkpoint.
        verify: Of an export: read all files and compare their checksums.
        amp: Arithmetic of the dense model; None = that of the job.

    Raises UserError, ConfigError and CheckpointError.
    """
    if not is_export(path):
        return trained_of_run(path, which, amp)
    if which not in ("auto", "last"):
        raise UserError(f"--model {which}: {path} is an export, which has one model; allowed: last")
    from shardkeep.inference.export.opening import open_export

    return open_export(path, verify=verify, amp=amp)


def made_at(path: Path) -> float | None:
    """When an export was written, seconds since 1970; None = it is a run."""
    return (path / MANIFEST).stat().st_mtime if is_export(path) else None
