"""The config and the checkpoints of a trained run, for what uses its model. Loads no torch and no kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from shardkeep.base.errors import CheckpointError, UserError
from shardkeep.base.files import use_newest
from shardkeep.base.plugging.modules import search_last
from shardkeep.config import JobConfig, stored_config
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.reader import RunReader, check_ours

T = TypeVar("T")
Which = Literal["auto", "last", "best"] | int
"""A checkpoint of a run: the newest one, that of the best evaluation, or that of a step. "auto" is the best where
`train.early_stopping` has found one, and the newest else: the model whose test metrics training tells."""


def config_of(run: Path) -> JobConfig:
    """The config of a run; its own modules can be imported from then on. Raises UserError: it is no run folder."""
    if not (run / "config.yaml").is_file():
        why = "is not a run folder; it has no config.yaml" if run.is_dir() else "there is no such folder"
        if (run / "manifest.json").is_file():
            why += "; an export can be loaded, served, and used by predict and evaluate --data"
        raise UserError(f"{run}: {why}")
    check_ours(run)
    config = stored_config(run)
    folder = RunReader(run).code_folder
    if config.own_modules and folder is not None:
        search_last(folder)
    return config


def checkpoint_of(config: JobConfig, run: Path, which: Which) -> Checkpoint:
    """A checkpoint of a run. Raises UserError where there is none, CheckpointError where it is damaged."""
    checkpoints = checkpoints_of(config, run)
    steps = [step for step, _ in checkpoints.complete() if step]  # step 0 is the model of another run
    if not steps:
        own = "; a loop of your own writes them by client.checkpoint" if not config.data.source else ""
        hint = own or ("; checkpoint.every_steps is off" if not config.checkpoint.on else "")
        raise UserError(f"{run}: has no complete checkpoint in {checkpoints.folder}{hint}")
    best = 0 if config.train.early_stopping is None else checkpoints.load(steps[-1]).facts.get("best_step") or 0
    named = {"auto": best or steps[-1], "last": steps[-1], "best": best}
    step = which if isinstance(which, int) else named[which]
    if which == "best" and config.train.early_stopping is None:
        raise UserError("--model best: the job has no train.early_stopping, which keeps the best model; allowed: last")
    if step not in steps:
        gone = f"the best one (step {step}) is gone" if step else "no evaluation has found the best one"
        why = "there is no checkpoint of that step" if which == step else gone
        raise UserError(f"--model {which}: {why}; allowed: last, {', '.join(map(str, steps[-10:]))}")
    try:
        checkpoint = checkpoints.load(step)
        checkpoint.check_sizes()
    except CheckpointError as error:
        other = "; or name another model: --model last" if step == best != steps[-1] else ""
        raise CheckpointError(f"{error}{other}") from error
    return checkpoint


def with_checkpoint(run: Path, which: Which, use: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
    """Calls `use` with a checkpoint of a run that may write newer ones and delete older ones, as `use_newest`. Returns
    the checkpoint and the result. Raises UserError, CheckpointError, and what `use` raises."""
    config = config_of(run)
    return use_newest(lambda: checkpoint_of(config, run, which), use)
