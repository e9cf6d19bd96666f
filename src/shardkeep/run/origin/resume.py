"""`shardkeep train --resume RUN`: which settings may change, and where the job continues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.base.config.differences import Difference, differences, listed
from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.base.settings import MayDiffer
from shardkeep.config import JobConfig, stored_config
from shardkeep.config.paths import covers, marked_keys, without_root
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.owner import last_owner
from shardkeep.ps.config import TableConfig
from shardkeep.ps.control.records import TRAINED
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.origin.code import PACKAGE, code_of
from shardkeep.run.processes import living
from shardkeep.run.reader import RunReader, check_ours

LEFTOVERS_S = 20.0
"""Seconds that processes of a run whose launcher was killed get to end: they notice by themselves."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that continues."""

    config: JobConfig
    checkpoint: Checkpoint
    changed: tuple[str, ...]
    """Settings that were changed, `a.b=value`, and files of the run's code."""

    def text(self) -> str:
        """One line for the user."""
        changed = f"; changed: {', '.join(self.changed)}" if self.changed else ""
        return f"at step {self.checkpoint.step:,} from {self.checkpoint.folder.name}{changed}"


def plan_resume(run: Path, overrides: Sequence[str] = ()) -> Resumed:
    """Reads a run's config and its newest complete checkpoint. Raises UserError (no such run, nothing to resume from, a
    setting that may not change), ConfigError and CheckpointError."""
    try:
        if not (run / "config.yaml").is_file():
            raise UserError(f"--resume {run}: is not a run folder; it has no config.yaml")
        check_ours(run, what="--resume")
        summary = RunReader(run).summary() or {}
    except OSError as error:
        raise UserError(f"--resume {run}: cannot be used ({error.strerror or error})") from error
    before = stored_config(run)
    config = with_shuffle_of(before, stored_config(run, overrides))
    changed = changes(before, config, given=f"--resume {run}: begin another job, or leave this out; --set")
    checkpoint = newest(config, run)
    if summary.get("status") in TRAINED and checkpoint.step == summary.get("steps"):
        more = any(each.key in ("train.epochs", "train.max_steps") for each in changed)
        _refuse_done(run, before, config, checkpoint, more=more)
    settings = [f"{each.key}={each.now}" for each in changed]
    return Resumed(config, checkpoint, (*settings, *changed_code(run, config)))


def changes(before: JobConfig, now: JobConfig, *, given: str) -> list[Difference]:
    """The settings that a job changes as it continues by any command. Only those with the mark `MayDiffer.STARTS` may
    change; another one makes it another job. Place and form of the data have it: their fingerprint is compared
    (`assembly/checkpoint_facts.py`).

    Raises UserError, whose message begins with `given`."""
    found, may = differing(before, now), marked_keys(JobConfig, MayDiffer.STARTS)
    if refused := [each for each in found if not covers(may, each.keys)]:
        allowed = ", ".join(".".join(keys).replace("*", "TABLE") for keys in may)
        raise UserError(f"{given} {listed(refused)}: may not change when a job continues; allowed: {allowed}")
    return found


def changed_code(run: Path, config: JobConfig) -> list[str]:
    """The files of the user's modules that differ from those with which the run began."""
    reader = RunReader(run)
    before, now = reader.code, code_of(config, reader.code_folder) if config.own_modules else {}
    return [name for name in sorted(before.keys() | now) if name != PACKAGE and before.get(name) != now.get(name)]


def differing(before: JobConfig, now: JobConfig) -> list[Difference]:
    """The settings that a config gives otherwise than the one before it, which may have found `data.fitted` itself."""
    found = differences(_dumped(before, now), _dumped(now, before))
    return [each for each in found if each.now is not None or each.key != "data.fitted"]


def with_shuffle_of(before: JobConfig, now: JobConfig) -> JobConfig:
    """A config whose `data.shuffle: auto` is what the job before it has decided."""
    shuffle = before.data.shuffle if now.data.shuffle == "auto" else now.data.shuffle
    return now.model_copy(update={"data": now.data.model_copy(update={"shuffle": shuffle})})


def _dumped(config: JobConfig, other: JobConfig) -> dict[str, Any]:
    """A config as JSON types without `data.root`, with an empty entry for each table that only the other one names."""
    found = without_root(config, Path(config.data.root), JobConfig).model_dump(mode="json", exclude={"data": {"root"}})
    nothing = TableConfig().model_dump(mode="json")
    return found | {"tables": dict.fromkeys(other.tables, nothing) | found["tables"]}


def _refuse_done(run: Path, before: JobConfig, config: JobConfig, checkpoint: Checkpoint, *, more: bool) -> None:
    """Raises UserError if a completed job would train no step. `more`: its epochs or steps were changed."""
    if (why := _early_end(config, checkpoint)) is not None:
        raise UserError(f"--resume {run}: {why}")
    if not more and _early_end(before, checkpoint) is None:
        raise UserError(
            f"--resume {run}: the job is done at step {checkpoint.step:,}; raise train.epochs or train.max_steps"
        )


def _early_end(config: JobConfig, checkpoint: Checkpoint) -> str | None:
    """Why early stopping ends the job at a checkpoint, and what continues it; None = it does not."""
    stopping = config.train.early_stopping
    if stopping is None:
        return None
    from shardkeep.workers.evaluation.history import EvaluationHistory  # loads torch

    best = EvaluationHistory(stopping)
    best.load(checkpoint.facts.get("evaluations", ()))
    if not best.ends:
        return None
    return (
        f"training stopped early at step {checkpoint.step:,}: {stopping.metric} has not improved in {best.since} "
        f"evaluation{'s' if best.since > 1 else ''} since step {best.step:,}; to train longer, "
        f"--set train.early_stopping.patience={best.since + stopping.patience}"
    )


def newest(config: JobConfig, run: Path) -> Checkpoint:
    """The newest complete checkpoint of a run, with all its files there. Raises UserError and CheckpointError."""
    checkpoints = checkpoints_of(config, run)
    check_owner(config, run)
    checkpoint = checkpoints.latest()
    if checkpoint is None:
        raise UserError(
            f"--resume {run}: there is no complete checkpoint in {checkpoints.folder}; "
            "delete the run folder and start the job again"
        )
    checkpoint.check_sizes()
    return checkpoint


def check_owner(config: JobConfig, run: Path) -> None:
    """Raises UserError when another run, which is there still, wrote last to the folder that the config names."""
    if (other := other_owner(config, run)) is not None:
        folder = checkpoints_of(config, run).folder
        raise UserError(f"{run}: the checkpoints in {folder} are those of another run, {other}; resume that one")


def other_owner(config: JobConfig, run: Path) -> str | None:
    """The run folder of another run, which is there still and wrote last to the folder that the config names."""
    if config.checkpoint.dir is None:
        return None
    owner = last_owner(checkpoints_of(config, run).folder)
    if owner is None or Path(owner.run).resolve() == run.resolve() or not (Path(owner.run) / "config.yaml").is_file():
        return None
    return owner.run


def await_leftovers(run: RunReader, limit_s: float = LEFTOVERS_S, *, option: str = "--resume") -> None:
    """Waits until no process of the run's last start is left on this machine. Raises UserError when one stays."""
    deadline = Deadline(limit_s)
    while left := living(run):
        if deadline.over:
            raise UserError(f"{option} {run.path}: process {left[0]['pid']} of this run is still there; end it first")
        time.sleep(0.1)
