"""`shardkeep stop RUN`: asks a running job to end, and waits until it has. Its workers save (workers/trainer.py).

The coordinator receives the request. A job in one process has no coordinator: it reads the request in its run folder.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError, TransportError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.config import stored_config
from shardkeep.launch.stopping.interrupts import Interrupts
from shardkeep.ps.control.grpc.client import fetch_status, request_stop
from shardkeep.ps.control.records import OVER, JobState, JobStatus
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.next_steps import resume_line
from shardkeep.run.processes import launcher_there, living
from shardkeep.run.reader import RunReader, check_ours
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.tls import Tls
from shardkeep.view.run_view import RunView, ended_text

REASON = "shardkeep stop"
ASK_S = 20.0
"""Seconds to reach the coordinator of a launcher: it may still be starting, or a replacement for a dead one."""
POLL_S = 0.1
LOOK_S = 0.3
"""Seconds between two looks of a job in one process for a request."""
PARKED_S = 1.0
"""Seconds that the coordinator may wait for the end of the job before it answers."""
ALL_TRAINED = "all steps were trained by then"
_FILE = "stop.json"


def stop_run(run: Path, *, timeout_s: float, token_file: Path | None = None, tls: Tls | None = None) -> list[str]:
    """Stops the job in `run`. Blocks until it has ended. Returns lines for the user.

    Raises:
        UserError: There is no such run; ConfigError: other users could have changed it.
        JobError: No job runs there, it failed meanwhile, or it did not end within `timeout_s` seconds.
        TransportError: Its coordinator cannot be reached.
    """
    deadline = Deadline(timeout_s)
    if not (run / "config.yaml").is_file():
        missing = "is not a run folder (it has no config.yaml)" if run.is_dir() else "there is no such folder"
        raise UserError(f"{run}: {missing}")
    check_ours(run)
    folder = RunReader(run)
    if (summary := folder.summary()) is not None:
        raise JobError(f"{run}: no job runs here; it {ended_text(summary)}")
    launched = launcher_there(run)
    if not launched and launched is not None and not living(folder):
        raise JobError(f"{run}: no process of this job is left; {resume_line(run)}")
    if launched and not stored_config(folder.path).servers:
        atomic_write(run / _FILE, f'{{"reason": "{REASON}"}}\n')
        with _withdrawn(run / _FILE):
            return _ended(folder, deadline)
    _ask(folder, min(ASK_S, timeout_s) if launched else 0.0, token_file=token_file, tls=tls)
    return _ended(folder, deadline)


def stop_at(coordinator: Endpoint, *, timeout_s: float) -> list[str]:
    """Stops the job of a coordinator whose run folder is not at hand. Otherwise like `stop_run`."""
    deadline = Deadline(timeout_s)
    request_stop(coordinator, REASON)
    while not deadline.over:
        try:
            status = fetch_status(coordinator, wait_s=min(PARKED_S, deadline.remaining_s))
        except TransportError as error:
            raise JobError(f"the coordinator at {coordinator} ended before it said how the job ended") from error
        if status.state in OVER:
            return _told(status)
    raise JobError(_late(timeout_s))


def ask_coordinator(coordinator: Endpoint, reason: str, *, limit_s: float) -> JobState:
    """Requests the stop, for up to `limit_s` seconds. Returns the state of the job then. Raises the error of the last
    attempt."""
    deadline = Deadline(limit_s)
    while True:
        try:
            return request_stop(coordinator, reason)
        except ShardkeepError as error:
            if not error.retryable or deadline.over:
                raise
        time.sleep(POLL_S)


@contextlib.contextmanager
def heard(run: Path, interrupts: Interrupts) -> Iterator[None]:
    """For a job in one process. Inside, a request in `run` stops the job as the first Ctrl-C does."""
    path, ended = run / _FILE, threading.Event()
    path.unlink(missing_ok=True)  # of an earlier start

    def look() -> None:
        while not ended.wait(LOOK_S):
            if path.exists():
                if not interrupts.count:
                    interrupts.request(REASON)
                return

    threading.Thread(target=look, name="stop-request", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextlib.contextmanager
def _withdrawn(path: Path) -> Iterator[None]:
    """Deletes the request at the end, so that it stops no later start."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _ask(folder: RunReader, limit_s: float, *, token_file: Path | None, tls: Tls | None) -> None:
    """Requests the stop, for up to `limit_s` seconds. Does nothing if the job is over by then."""
    coordinator = _coordinator(folder, token_file, wait_s=limit_s)
    if coordinator is None:
        return
    try:
        ask_coordinator(replace(coordinator, tls=tls), REASON, limit_s=limit_s)
    except TransportError as error:
        if folder.summary() is not None:
            return
        if tls is None and (needed := folder.tls_option()) is not None:
            raise UserError(f"the coordinator at {coordinator.address} uses TLS: add --tls {needed}") from None
        what = f"`shardkeep status {folder.path}` says what to do"
        raise JobError(f"the coordinator does not answer at {coordinator.address}; {what}") from error


def _coordinator(folder: RunReader, token_file: Path | None, *, wait_s: float) -> Endpoint | None:
    """The coordinator, once it listens; None = the job is over. Raises JobError."""
    deadline = Deadline(wait_s)
    while True:
        coordinator = folder.endpoint(token_file)
        if coordinator is not None or folder.summary() is not None:
            return coordinator
        if deadline.over:
            raise JobError(f"{folder.path}: no coordinator has listened in this folder yet")
        time.sleep(POLL_S)


def _ended(folder: RunReader, deadline: Deadline) -> list[str]:
    """Waits until the job is over and its processes on this machine have ended. Raises JobError."""
    seen = False  # none is, where all run on other machines
    while (here := _any_here(folder)) or folder.summary() is None:
        seen = seen or here
        if seen and not here and folder.summary() is None:
            raise JobError(f"{folder.path}: its processes were killed before the job had stopped")
        if deadline.over:
            raise JobError(_late(deadline.timeout_s))
        time.sleep(POLL_S)
    summary = folder.summary() or {}
    if summary["status"] == "failed":
        raise JobError(f"{folder.path}: the job {ended_text(summary)}")
    return [ended_text(summary), *_checkpoint_lines(folder.path, summary)]


def _any_here(folder: RunReader) -> bool:
    """Whether a process of the job runs on this machine."""
    return bool(launcher_there(folder.path) or living(folder))


def _checkpoint_lines(run: Path, summary: dict[str, Any]) -> list[str]:
    """What was saved, and how to continue with it."""
    if summary["status"] == "completed":
        return [ALL_TRAINED]
    newest = None
    with contextlib.suppress(ShardkeepError, OSError):  # `resume_line` says so
        newest = checkpoints_of(stored_config(run), run).latest()
    if newest is None:
        return [resume_line(run)]
    older = "" if newest.step >= int(summary["steps"]) else "; later steps are not in it"
    return [f"checkpoint: step {newest.step:,}{older}", resume_line(run)]


def _told(status: JobStatus) -> list[str]:
    """The lines about the end of a job whose run folder is not at hand."""
    if status.state == "failed":
        raise JobError(f"the job failed: {status.message}")
    if status.state == "completed":
        return [status.state, ALL_TRAINED]
    if (saved := RunView.of(None, status).checkpoint) is None:
        return [status.message]
    where = "`shardkeep status RUN` prints the command where the run folder is"
    return [status.message, f"checkpoint: step {saved.step:,}", f"to resume at step {saved.step:,}: {where}"]


def _late(timeout_s: float) -> str:
    return f"the job has not ended within {timeout_s:g} s (--timeout); it still stops, and the request stands"
