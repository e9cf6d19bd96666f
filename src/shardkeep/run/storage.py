"""Where a job keeps what it continues with: checkpoints, and what each member's replacement needs. Loads no torch.

The coordinator offers its run folder for checkpoints where the config names none; members find out whether they see it.
Where they do, journals in it survive a lost machine.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from shardkeep.base.errors import CheckpointError, PlaceRefused
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.probe import check_shared, write_token
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation, Record, RecoveryFolder, Shared
from shardkeep.ps.control.recovery import Losses


def losses_of(config: JobConfig) -> Losses:
    """How far the job may go back."""
    return Losses(config.recovery.max_lost_steps, config.checkpoint.period)


def shared_folder(
    config: JobConfig, run_dir: Path, *, start_step: int, standing: Record | None = None
) -> Shared | None:
    """The run folder's `checkpoints`, signed, or the run folder where checkpoints go elsewhere and journals ask who
    sees it; None where neither does, or the job has settled both.

    `standing`: of the coordinator before this one. Its members may have its number, so that number stays, as does the
    step that the job began at. Raises CheckpointError when the folder cannot be written."""
    if standing is not None:
        if standing.get("formation") is not None:
            return None
        start_step = int(standing.get("origin", 0))
    every = config.checkpoint.every_steps
    if config.checkpoint.dir is not None or not (config.checkpoint.on or start_step):
        if config.recovery.journal != "auto" or not config.recovery.restarts:
            return None
        return Shared(str(run_dir), write_token(run_dir, again=standing is not None), proof_only=True)
    checkpoints = Checkpoints(run_dir / "checkpoints")
    needed_by = f"--start-step {start_step}" if start_step else ""
    if every != "auto":
        needed_by = needed_by or f"checkpoint.every_steps: {every}"
    return Shared(str(checkpoints.folder), write_token(checkpoints.folder, again=standing is not None), needed_by)


def why_unseen(shared: Shared | None, *, writes: bool) -> str:
    """Why this process cannot use the folder that the coordinator offers; "" = it can. `writes`: it writes there."""
    if shared is None:
        return ""
    try:
        check_shared(Path(shared.folder), shared.token, writes=writes)
    except CheckpointError as error:
        return f"on {socket.gethostname()} {error}"
    return ""


def with_checkpoints(config: JobConfig, formation: Formation) -> JobConfig:
    """The config with the folder of checkpoints that the members have settled on."""
    if formation.checkpoints is None:
        return config
    settled = {"dir": formation.checkpoints} if formation.checkpoints else {"every_steps": "off"}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=settled)})


def folder_before(control: ControlClient) -> Path | None:
    """The run folder in which the member that this one replaces kept what it did; None = it is not here."""
    member, folder = control.member, Path(control.kept.folder)
    known = folder.parts[-3:] == ("recovery", control.job, f"{member.role}-{member.index}")
    try:
        return folder.parents[2] if known and folder.is_dir() else None
    except OSError:
        return folder.parents[2]


def folder_to_keep_in(control: ControlClient, run_dir: Path) -> Path:
    """The run folder in which this member keeps what its replacement needs: that of the member which it replaces, if
    that is here, else its own. Raises PlaceRefused when it is here and cannot be used."""
    before = folder_before(control)
    if before is not None and not os.access(control.kept.folder, os.R_OK | os.W_OK | os.X_OK):
        raise PlaceRefused(
            f"{control.member.name} cannot be replaced by this process: {control.kept.folder} has what the one before "
            "it kept, and cannot be used; start it as the user of that folder"
        )
    return before or run_dir


def kept_at(folder: Path | None) -> RecoveryFolder:
    """What this member reports about the folder; None = it keeps nothing."""
    return RecoveryFolder() if folder is None else RecoveryFolder(socket.gethostname(), str(folder))


def missed(control: ControlClient, what: str) -> str:
    """Why a replacement has not what the member before it kept."""
    told = control.kept
    where = f" in {told.folder} on {told.host}" if told.folder else ""
    return f"{control.member.name} came back without {what}, which was kept{where}"
