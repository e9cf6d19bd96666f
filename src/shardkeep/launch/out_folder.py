"""The folder of a command that runs many jobs: `--out` of `sweep` and `tune`. One command at a time is in it.

OUT/
  jobs/NAME.yaml   the config of each job, resolved
  runs/NAME/       the run folders
  logs/NAME.log    what `shardkeep train` printed
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write, make_folder, owner_lock
from shardkeep.base.machine.owners import check_unshared
from shardkeep.config import JobConfig
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.children import Child, child_environment
from shardkeep.launch.processes.starter import RoleCommand, Starter


@contextlib.contextmanager
def holding(out: Path, *, what: str) -> Iterator[None]:
    """Makes `out` with its folders, and keeps other commands out. `what`: the command. Raises UserError, also where
    others could change what is there."""
    check_unshared(out, what="--out")
    try:
        for folder in ("jobs", "runs", "logs"):
            make_folder(out.absolute() / folder)
        lock = owner_lock(out / ".lock", limit_s=0.0)
    except TimeoutError:
        raise UserError(f"--out {out}: another {what} is running in this folder") from None
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    try:
        yield
    finally:
        os.close(lock)


def start_job(starter: Starter, out: Path, name: str, config: JobConfig, code_folder: Path, *, number: int) -> Child:
    """Starts a job by `shardkeep train` in its folder; what an earlier attempt left is deleted. Raises OSError."""
    job, run, log = out / f"jobs/{name}.yaml", out / f"runs/{name}", out / f"logs/{name}.log"
    if run.exists():
        shutil.rmtree(run)
    log.unlink(missing_ok=True)
    atomic_write(job, config.to_yaml())
    code = ["--code", str(code_folder)] if config.own_modules else []
    env = child_environment(os.environ, threads=worker_threads(config))
    return starter.start(RoleCommand("train", number, [str(job), "--run-dir", str(run), *code], log, env))
