"""Where a job keeps what it continues with: checkpoints, and what each member's replacement needs. Loads no torch.

The coordinator offers its run folder for checkpoints where the config names none; members find out whether they see it.
Where they do, journals in it survive a lost machine.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from shardkeep.base.errors import CheckpointError, PlaceRefused
from shardkeep.config import JobConfig
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.ps.checkpoints.probe import check_shared, write_token
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.ps.control.records import Formation, Record, RecoveryFolder, Shared
from shardkeep.ps.control.recovery import Losses


def losses_of(config: JobConfig) -> Losses:
    """How far the job may go back, and what journals survive."""
    recovery = config.recovery
    journal = recovery.journal if recovery.restarts and config.servers else ""
    return Losses(recovery.max_lost_steps, config.checkpoint.period, journal=journal)


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
    needed_by = "" if every == "auto" else f"checkpoint.every_steps: {every}"
    needed_by = f"--start-step {start_step}" if start_step else needed_by
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
    """The run folder in which the member that this one replaces kept what it did, as that member named it or as the
    coordinator names its own; None = it is not here."""
    member, folder = control.member, Path(control.kept.folder)
    place = ("recovery", control.job, f"{member.role}-{member.index}")
    for home in (folder.parents[2], Path(control.run_dir)) if folder.parts[-3:] == place else ():
        try:
            if home.joinpath(*place).is_dir():
                return home
        except OSError:
            return home
    return None


def folder_to_keep_in(control: ControlClient, run_dir: Path) -> Path:
    """The run folder in which this member keeps what its replacement needs: that of the member which it replaces, if
    that is here, else its own. Raises PlaceRefused when it is here and cannot be used."""
    before = folder_before(control)
    if before is None:
        return run_dir
    kept = before.joinpath(*Path(control.kept.folder).parts[-3:])
    if not os.access(kept, os.R_OK | os.W_OK | os.X_OK):
        raise PlaceRefused(
            f"{control.member.name} cannot be replaced by this process: {kept} has what the one before it kept, and "
            "cannot be used; make it writable here, or start it as the user of that folder"
        )
    return before


def kept_at(folder: Path | None, shared: Shared | None = None) -> RecoveryFolder:
    """What this member reports about the folder; None = it keeps nothing. `shared`: what the coordinator offers."""
    if folder is None:
        return RecoveryFolder()
    here = folder.parents[2] / ("" if shared is None or shared.proof_only else "checkpoints")
    seen = shared is not None and not why_unseen(replace(shared, folder=str(here)), writes=False)
    return RecoveryFolder(socket.gethostname(), str(folder), seen)


def missed(control: ControlClient, what: str) -> str:
    """Why a replacement has not what the member before it kept."""
    told = control.kept
    where = f" in {told.folder} on {told.host}" if told.folder else ""
    return f"{control.member.name} came back without {what}, which was kept{where}"
