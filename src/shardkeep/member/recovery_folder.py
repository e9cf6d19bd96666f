"""The folder in which a member keeps what its replacement resumes with. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.errors import CheckpointError, ConfigError, PlaceRefused
from shardkeep.base.files import make_folder, owner_lock
from shardkeep.base.logs.log import EventLog
from shardkeep.base.machine.owners import check_unshared
from shardkeep.ps.control.grpc.client import ControlClient
from shardkeep.run.storage import folder_before, folder_to_keep_in

_log = EventLog("roles")
OWNER_S = 10.0
"""Seconds that the process before this one gets to end; then it is killed."""


def kept_for_recovery(run_dir: Path, job: str, role: str, index: int) -> Path:
    """Where a member keeps what its replacement continues with; what it kept for earlier starts of the job is deleted.

    A process that holds the place still has lost it, or the coordinator had not let this one in: it hangs
    perhaps, and is killed. Raises ConfigError where others could change what is kept, CheckpointError."""
    top, mine = run_dir / "recovery", _kept_folder(run_dir, job, role, index)
    check_unshared(mine, what="--run-dir")
    try:
        for earlier in [path for path in top.glob(f"*/{role}-{index}") if path != mine]:
            with contextlib.suppress(TimeoutError):  # of a job that runs
                os.close(owner_lock(earlier / "owner", limit_s=0.0))
                shutil.rmtree(earlier, ignore_errors=True)
                with contextlib.suppress(OSError):
                    earlier.parent.rmdir()
        make_folder(mine)
        try:
            owner_lock(mine / "owner", limit_s=OWNER_S)  # as long as this process lives
        except TimeoutError:
            if not _kill_owner(mine / "owner"):
                raise
            owner_lock(mine / "owner", limit_s=OWNER_S)
    except OSError as error:
        raise CheckpointError(f"{mine}: cannot be used ({error.strerror or error})") from error
    return mine


def replaced_folder(control: ControlClient, run_dir: Path) -> Path | None:
    """`kept_for_recovery`, where the member before this one kept it, if that is here. None = the folder cannot be used,
    and this member keeps nothing. Raises PlaceRefused when a replacement cannot use it."""
    member = control.member
    try:
        home = folder_to_keep_in(control, run_dir)
        return kept_for_recovery(home, control.job, member.role, member.index)
    except (CheckpointError, ConfigError) as error:
        if not control.kept.folder and isinstance(error, ConfigError):
            raise
        if not control.kept.folder:
            report_unkept(control, "recovery", f"{member.name} keeps nothing for a replacement: {error}")
            return None
        raise PlaceRefused(f"{member.name} cannot be replaced by this process: {error}") from error


def report_unkept(control: ControlClient, what: str, text: str) -> None:
    """Warns that something which protects the job is not kept; training continues."""
    _log.warning(text)
    control.report("phase", {"phase": "warning", "text": text, "unkept": what})


def _kept_folder(run_dir: Path, job: str, role: str, index: int) -> Path:
    return run_dir / "recovery" / job / f"{role}-{index}"


@contextlib.contextmanager
def kept_while_useful(control: ControlClient, run_dir: Path) -> Iterator[None]:
    """Deletes what this member kept for its replacement, if on the way out the coordinator says that the job is over.

    If the coordinator is silent, nothing is deleted: another one may take over, and wait for replacements."""
    try:
        yield
    finally:
        if control.verdict is not None and control.verdict.over:
            member = control.member
            home = folder_before(control) or run_dir
            mine = _kept_folder(home, control.job, member.role, member.index)
            shutil.rmtree(mine, ignore_errors=True)
            for above in (mine.parent, mine.parent.parent):
                with contextlib.suppress(OSError):  # other members' are there
                    above.rmdir()


def _kill_owner(path: Path) -> bool:
    """Kills the process that a lock names; False where it is not one of this machine that has the file open."""
    import psutil

    try:
        process = psutil.Process(int(path.read_text(encoding="ascii")))
        if str(path.resolve()) not in [file.path for file in process.open_files()]:
            return False
        _log.warning("ending the process before this one, which hangs", pid=process.pid)
        process.kill()
    except (OSError, ValueError, psutil.Error):
        return False
    return True
