"""The Python calls that run a whole job: `train` and `resume`. `shardkeep train` is the command for both."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from shardkeep.base.files import local
from shardkeep.config import JobConfig, load_config
from shardkeep.launch.frames import Frames, with_frames
from shardkeep.run.new_folder import default_run_dir
from shardkeep.view.callback import Callback, check_callbacks

if TYPE_CHECKING:
    from shardkeep.launch.trained_run import TrainedRun
    from shardkeep.run.trained import Which


def train(
    config: JobConfig | Mapping[str, Any] | str | Path,
    *,
    run_dir: str | Path | None = None,
    quiet: bool = False,
    from_run: str | Path | None = None,
    model: Which = "auto",
    callbacks: Sequence[Callback] = (),
    **frames: Unpack[Frames],
) -> TrainedRun:
    """Runs a whole job on this machine. Blocks until the job is over.

    Args:
        config: The job, what its YAML file would hold, or the path of that. Your own module:Class or module:function
            is searched in `data.root`, then beside the file, or beside the running script where there is none.
        run_dir: A new run folder; None = runs/NAME-DATE under the current folder.
        quiet: Prints nothing.
        from_run: The run folder whose rows and dense model the job begins with; None = it begins with new ones.
        model: The checkpoint of `from_run`.
        callbacks: Follow the job; called in this order, in this thread.
        frames: `train`, `eval` and `test`: data in memory in place of files of `config`, each a DataFrame of pandas or
            polars, a pyarrow Table, a dict of columns, or a list of dicts. They are written to `data` in the run
            folder, so the run can be resumed.

    Returns:
        The typed content of summary.json, such as `run.eval.auc` and `run.bytes.total`, with `run.run_dir` and
        `run.report()`.

    Raises:
        UserError: The input is wrong.
        JobError: The job failed or was stopped. The text names the process and the reason.
        Exception: A callback raised it. The job has stopped.
    """
    from shardkeep.launch.job import run_job
    from shardkeep.launch.trained_run import TrainedRun
    from shardkeep.run.origin.warm_start import plan_warm_start
    from shardkeep.view.screen import console

    callbacks = check_callbacks(callbacks)
    code_folder = Path(config).resolve().parent if isinstance(config, str | Path) else script_folder()
    job = config if isinstance(config, JobConfig) else load_config(config)
    path = Path(local(run_dir)) if run_dir is not None else default_run_dir(job.name)
    job = with_frames(job, frames, path)
    start = None if from_run is None else plan_warm_start(job, Path(from_run), model)
    summary = run_job(
        job,
        run_dir=path,
        console=console(quiet=quiet),
        code_folder=code_folder,
        start=start,
        callbacks=callbacks,
    )
    return TrainedRun.model_validate(summary)


def resume(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> TrainedRun:
    """Resumes a run from its newest complete checkpoint, in its folder. Blocks until the job is over.

    Args:
        run: The run folder.
        overrides: Settings to change, as `--set` takes them: `train.epochs=3`.
        quiet: Prints nothing.
        callbacks: As for `train`. Steps after the checkpoint are trained and reported again.

    Returns:
        As `train`.

    Raises:
        As `train`; UserError also if there is no checkpoint, or the job is done.
    """
    from shardkeep.launch import job
    from shardkeep.launch.trained_run import TrainedRun
    from shardkeep.view.screen import console

    callbacks = check_callbacks(callbacks)
    done = job.resume(Path(run), overrides=overrides, console=console(quiet=quiet), callbacks=callbacks)
    return TrainedRun.model_validate(done)


def script_folder() -> Path:
    """The folder of the running script; in a notebook or with `python -c`, the current folder."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()
