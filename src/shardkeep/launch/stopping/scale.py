"""`shardkeep scale RUN`: stops a job, whose launcher then resumes it with other numbers of workers and servers."""

from __future__ import annotations

import json
from pathlib import Path

from shardkeep.base.errors import JobError, ShardkeepError, UserError
from shardkeep.base.files import atomic_write
from shardkeep.config import stored_config
from shardkeep.launch.stopping.stop import ask_coordinator
from shardkeep.run.folder import RunFolder
from shardkeep.run.next_steps import typed
from shardkeep.run.processes import launcher_there
from shardkeep.run.reader import check_ours

ASK_S = 20.0
"""Seconds to reach the coordinator: a replacement for a dead one may still be starting."""
_FILE = "scale.json"


def ask(run: Path, *, workers: int | None, servers: int | None) -> str:
    """Makes the launcher of the job in `run` resume with other numbers. Returns a sentence for the user.

    Raises:
        UserError: There is no such run, or it has no launcher.
        ConfigError: The job cannot have these numbers.
        JobError: The job is over.
        TransportError: The coordinator cannot be reached.
    """
    overrides = [f"{name}={n}" for name, n in (("workers", workers), ("servers", servers)) if n is not None]
    if not overrides:
        raise UserError("scale: no number is given; allowed: --workers N, --servers N, or both")
    check_ours(run)
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: is not a run folder (it has no config.yaml)")
    before, config = stored_config(run), stored_config(run, overrides)
    if not before.servers or not config.servers:
        raise UserError("scale: servers: 0 (a job in one process) cannot be scaled from or to; use --resume")
    if not before.checkpoint.on:
        raise UserError("scale: the job writes no checkpoints (checkpoint.every_steps: off) to resume from")
    folder = RunFolder(run)
    coordinator = folder.endpoint()
    if folder.summary() is not None or coordinator is None:
        raise JobError(f"{run}: no job runs here; use shardkeep train --resume {run} --set {' --set '.join(overrides)}")
    text, command = ", ".join(overrides), folder.coordinator_command()
    if not launcher_there(run):
        again = typed(command and [*command, *(word for each in overrides for word in ("--set", each))])
        raise UserError(
            f"{run}: no `shardkeep train` runs this job, so nothing would resume it with {text}; stop it by `shardkeep "
            f"stop {run}`, then start it and its roles again with these settings{again}"
        )
    atomic_write(run / _FILE, json.dumps(overrides) + "\n")
    try:
        state = ask_coordinator(coordinator, f"to resume with {text}", limit_s=ASK_S)
        if state.state not in ("stopping", "stopped"):
            raise JobError(f"{run}: the job is {state.state}{f': {state.message}' if state.message else ''}")
    except (ShardkeepError, KeyboardInterrupt):
        (run / _FILE).unlink(missing_ok=True)
        raise
    return f"the job stops with a checkpoint and resumes with {text}"


def taken(run: Path) -> list[str] | None:
    """Removes and returns the settings of the last request, each `a=b`; None = no request since the last call."""
    path = run / _FILE
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except (OSError, ValueError):
        return None
    return [str(override) for override in overrides]
