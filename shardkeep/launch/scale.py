"""`shardkeep scale RUN`: other numbers of workers and servers for a job that runs. It stops with a checkpoint and goes
on from there with new processes; the launcher does both."""

from __future__ import annotations

import json
import time
from pathlib import Path

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import JobError, ShardkeepError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.config import load_config
from shardkeep.ps.control.grpc.client import request_stop
from shardkeep.ps.control.grpc.endpoint import Endpoint
from shardkeep.ps.control.records import JobState
from shardkeep.run.folder import RunFolder
from shardkeep.run.processes import launcher_there
from shardkeep.run.reader import check_ours

ASK_S = 20.0
"""Seconds in which a coordinator must be there to hear of it: another may just be started for one that died."""
_RETRY_S = 0.2
_FILE = "scale.json"


def ask(run: Path, *, workers: int | None, servers: int | None) -> str:
    """Has the launcher of the job in `run` go on with other numbers; what will happen, in words.

    Raises UserError and ConfigError (no such run, one without a launcher, or numbers it cannot have), JobError (the job
    is over), TransportError (its coordinator cannot be reached)."""
    wanted = {name: count for name, count in (("workers", workers), ("servers", servers)) if count is not None}
    if not wanted:
        raise UserError("scale: says no number; allowed: --workers N, --servers N, or both")
    check_ours(run)
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: is no run folder (it has no config.yaml)")
    overrides = [f"{name}={count}" for name, count in wanted.items()]
    before, config = load_config(run / "config.yaml"), load_config(run / "config.yaml", overrides)
    if not before.servers or not config.servers:
        raise UserError("scale: a job in one process (servers: 0) cannot be scaled, nor become one; use --resume")
    if not before.checkpoint.every_steps:
        raise UserError("scale: the job writes no checkpoints (checkpoint.every_steps: 0), from which it could go on")
    folder = RunFolder(run)
    coordinator = folder.endpoint()
    if folder.summary() is not None or coordinator is None:
        raise JobError(f"{run}: no job runs here; use shardkeep train --resume {run} --set {' --set '.join(overrides)}")
    text = ", ".join(overrides)
    if not launcher_there(run):
        raise UserError(
            f"{run}: no `shardkeep train` runs this job, so nobody would go on with {text}; for roles by hand stop the "
            "coordinator, and start all anew with --start-step"
        )
    atomic_write(run / _FILE, json.dumps(overrides) + "\n")
    try:
        state = _stopped(coordinator, f"to go on with {text}")
        if state.state not in ("stopping", "stopped"):
            raise JobError(f"{run}: the job is {state.state}{f': {state.message}' if state.message else ''}")
    except (ShardkeepError, KeyboardInterrupt):
        (run / _FILE).unlink(missing_ok=True)
        raise
    return f"the job stops with a checkpoint, and goes on with {text}"


def taken(run: Path) -> list[str] | None:
    """The settings that somebody has asked for since the last call, `a=b`; None = nobody has."""
    path = run / _FILE
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, ValueError):
        return None
    return [str(override) for override in overrides]


def _stopped(coordinator: Endpoint, reason: str) -> JobState:
    """The state of the job once it was asked to stop. Raises what the last attempt raised."""
    deadline = Deadline(ASK_S)
    while True:
        try:
            return request_stop(coordinator, reason)
        except ShardkeepError as error:
            if not error.retryable or deadline.over:
                raise
        time.sleep(_RETRY_S)
