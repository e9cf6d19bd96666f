"""Which processes of a run are still there, on this machine. Ends none."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import psutil

from shardkeep.base.machine.pids import pid_space, start_of
from shardkeep.base.net.addresses import is_loopback
from shardkeep.base.net.interfaces import is_own
from shardkeep.run.reader import RunReader


def launcher_there(run: Path) -> bool | None:
    """Whether a launcher is in the folder (`RunReader.held`); None = there never was one: its roles run by hand."""
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


def living(run: RunReader) -> list[dict[str, Any]]:
    """The members of the last generation, and the coordinator, whose processes are on this machine. This process and
    those above it are none: in a container, every role is process 1. Raises OSError, ValueError (a file of the folder
    is damaged)."""
    known = [member for member in run.member_list() if member.get("pid") and member["role"] != "coordinator"]
    here = numbers_mean_the_same(run)
    found = [member for member in known if lives_here(member, here=here)]
    leading = [pid for pid in run.coordinator_pids() if here and _is_another(pid, run.coordinator_fact("started"))]
    return found + [{"role": "coordinator", "index": 0, "pid": pid} for pid in leading]


def numbers_mean_the_same(run: RunReader) -> bool:
    """Whether the numbers of the coordinator's machine or container are those of this process's, or may be."""
    return run.coordinator_fact("pid_space") in ("", pid_space())


def lives_here(member: dict[str, Any], *, here: bool) -> bool:
    """Whether a member's process is on this machine. `here`: the members at a loopback address would be."""
    process = int(member["pid"]), str(member.get("started", ""))
    host = str(member["host"])
    return _is_another(*process) and (here if is_loopback(host) else is_own(host))


def _is_another(pid: int, started: str) -> bool:
    """Whether it is there, and neither this process nor one above it."""
    return is_there(pid, started) and pid not in {os.getpid(), *(above.pid for above in psutil.Process().parents())}


def is_there(pid: int, started: str) -> bool:
    """Whether the process that started then has not ended; its number may be another's by now."""
    return bool(started) and start_of(pid) == started
