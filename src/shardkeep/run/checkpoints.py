"""The checkpoints of a run: where they are, who may write them, which one a job resumes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints
from shardkeep.ps.checkpoints.owner import Hold, owner_here
from shardkeep.ps.config import TableSpec


def checkpoints_of(config: JobConfig, run_dir: Path) -> Checkpoints:
    """Returns the checkpoints of the job: in `checkpoint.dir`, or in the run folder."""
    given = config.checkpoint.dir
    return Checkpoints(run_dir / "checkpoints" if given is None else Path(given).expanduser().resolve())


def owned(checkpoints: Checkpoints, config: JobConfig, run_dir: Path, job: str) -> Checkpoints:
    """Returns the checkpoints for the process that commits them: locks the folder against other jobs until `release`.

    Returns them unchanged if they are locked already or the config wants no checkpoints. Raises ConfigError if another
    job holds the folder, CheckpointError if it cannot be written."""
    if checkpoints.owned or not config.checkpoint.on:
        return checkpoints
    return Checkpoints(checkpoints.folder, hold=Hold(checkpoints.folder, owner_here(job, str(run_dir))))


def out_of_grace(config: JobConfig, run_dir: Path) -> str:
    """Returns the message for a job that did not end in time after SIGTERM, with the step of its last checkpoint."""
    complete = checkpoints_of(config, run_dir).complete()
    where = f"the last checkpoint is that of step {complete[-1][0]}" if complete else "there is no checkpoint"
    return f"it did not end within {config.liveness.grace_s:g} s of SIGTERM (liveness.grace_s); {where}"


def resumed_from(checkpoints: Checkpoints, start_step: int) -> Checkpoint | None:
    """Returns the checkpoint with which a job starts at this step; None = at step 0, with nothing. A job that continues
    another run's model (warm_start.py) has one of step 0. Raises CheckpointError."""
    return checkpoints.load(start_step) if start_step or checkpoints.has_start else None


def check_needs_no_rows(tables: Sequence[TableSpec], folder: Path | None) -> None:
    """For a process that starts without a checkpoint. Raises ConfigError if a table begins with the rows of a file,
    because these are in the checkpoint of step 0 (pretrained.py).

    `folder`: where checkpoints were looked for; None = nowhere, in a loop."""
    for table in tables:
        if table.init.name == "file":
            where = "a loop of your own has none; fill the table by client.fill"
            if folder is not None:
                where = f"there is none in {folder}; all members must share this folder"
            raise ConfigError(
                f"tables.{table.name}.init.name: file; its rows are in the checkpoint of step 0, and {where}"
            )
