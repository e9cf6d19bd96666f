"""Which processes of a run are still there, on this machine. Ends none."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import psutil

from shardkeep.report import RunFolder


def launcher_there(run: Path) -> bool | None:
    """Whether a launcher is in the folder (`RunFolder.held`); None = there never was one: its roles run by hand."""
    try:
        with (run / ".lock").open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return None
    except OSError:
        return False
    return False


def living(run: RunFolder) -> list[dict[str, Any]]:
    """The members of the last generation, and the coordinator, whose processes are on this machine. Raises OSError,
    ValueError (a file of the folder is damaged)."""
    known = {int(member["pid"]): member for member in run.member_list() if member.get("pid")}
    for pid in run.coordinator_pids():
        known.setdefault(pid, {"role": "coordinator", "index": 0, "pid": pid})
    return [member for pid, member in known.items() if is_ours(pid)]


def is_ours(pid: int) -> bool:
    """Whether the process is one of shardkeep's; its number may be another's by now."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any("shardkeep" in part for part in process.cmdline())
    except psutil.Error:
        return False
