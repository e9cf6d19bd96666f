"""The folder of a new run: its default name, and where none may begin."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path

from shardkeep.base.config.differences import listed
from shardkeep.base.errors import UserError
from shardkeep.base.files import check_writable
from shardkeep.base.machine.owners import check_unshared
from shardkeep.base.system_errors import in_words
from shardkeep.config import JobConfig, stored_config
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.origin.resume import differing, with_shuffle_of
from shardkeep.run.reader import RunReader


def refuse_taken(path: str | Path, config: JobConfig | None = None) -> None:
    """Raises UserError if `path` is a file or holds a run, or if others could change what is made there. `config`: the
    new run's, to name what differs."""
    path = Path(path)
    try:
        str(path.absolute()).encode()  # the coordinator sends it
        if (path / "config.yaml").exists() or (path.exists() and not path.is_dir()):
            raise UserError(f"--run-dir {path}: {taken(path, config)}")
    except UnicodeEncodeError as error:
        raise UserError(f"--run-dir {in_words(error)}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--run-dir {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    check_unshared(path, what="--run-dir")
    try:
        check_writable(path)
    except OSError as error:
        raise UserError(f"--run-dir {path}: cannot be written ({error.strerror})") from error


def default_run_dir(name: str) -> Path:
    """runs/NAME-YYYYmmdd-HHMMSS under the current folder; a number is added where that exists."""
    base = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def taken(path: Path, config: JobConfig | None) -> str:
    """Why a run with this config cannot begin in a folder or file, and what continues with the one that is there."""
    if not (path / "config.yaml").exists():
        return "is a file; choose a folder"
    run = shlex.quote(str(path.absolute()))
    reader = RunReader(path)
    over = reader.summary() is not None
    command = None if over else reader.coordinator_command()
    if command is not None:
        died = f"if its coordinator died, continue by {shlex.join(command)}"
        return f"holds a job that has not ended; see `shardkeep status {run}`; {died}"
    before = stored_config(path)
    other = listed(differing(before, with_shuffle_of(before, config or before)))
    what = f"run with another config already (given: {other})" if other else "run already"
    if over and not checkpoints_of(before, path).complete():
        return f"holds a {what}, which ended before its first checkpoint; delete it, or choose another folder"
    resume = f"shardkeep train --resume {run}{' --set KEY=VALUE' if other else ''}"
    return f"holds a {what}; choose another folder, or resume the run there by `{resume}`"
