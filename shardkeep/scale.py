"""`shardkeep scale RUN`: other numbers of workers and servers for a job that runs. It stops with a checkpoint and goes
on from there with new processes; the launcher does both."""

from __future__ import annotations

import json
from pathlib import Path

from shardkeep.base.errors import JobError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.config import load_config
from shardkeep.ps.control.client import request_stop
from shardkeep.report import RunFolder

_FILE = "scale.json"


def ask(run: Path, *, workers: int | None, servers: int | None) -> str:
    """Has the launcher of the job in `run` go on with other numbers; what will happen, in words.

    Raises UserError and ConfigError (no such run, or numbers it cannot have), JobError (the job is over)."""
    wanted = {name: count for name, count in (("workers", workers), ("servers", servers)) if count is not None}
    if not wanted:
        raise UserError("scale: says no number; allowed: --workers N, --servers N, or both")
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
    atomic_write(run / _FILE, json.dumps(overrides) + "\n")
    text = ", ".join(overrides)
    state = request_stop(coordinator, f"to go on with {text}")
    if state.state not in ("stopping", "stopped"):
        (run / _FILE).unlink(missing_ok=True)
        raise JobError(f"{run}: the job is {state.state}{f': {state.message}' if state.message else ''}")
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
