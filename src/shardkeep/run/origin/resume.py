"""`shardkeep train --resume RUN`: which settings may change, and where the job continues."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkeep.base.deadlines import Deadline
from shardkeep.base.errors import UserError
from shardkeep.config import JobConfig, stored_config
from shardkeep.ps.checkpoints.folder import Checkpoint
from shardkeep.ps.checkpoints.owner import last_owner
from shardkeep.ps.config import TableConfig
from shardkeep.ps.control.records import TRAINED
from shardkeep.run.checkpoints import checkpoints_of
from shardkeep.run.processes import living
from shardkeep.run.reader import RunReader, check_ours

MAY_CHANGE = (
    "servers", "workers", "threads", "launch", "transport", "liveness", "recovery", "profile",
    "telemetry", "web",
    "checkpoint", "eval", "train.epochs", "train.max_steps", "train.report_every_s", "train.max_bad_steps",
    "train.early_stopping.patience", "train.early_stopping.min_delta",
    "tower.compile", "tower.device", "tower.parallel", "tower.optimizer.schedule", "data.root", "data.train",
    "data.eval", "data.test", "data.source", "data.columns", "data.delimiter", "data.quote", "data.escape",
    "data.decimal", "data.cache", "data.accept", "data.refit",
)  # fmt: skip
"""Settings, or groups of them, that `--set` may change; the others would make it another job. Place and form of
the data may change because their fingerprint is compared (`assembly/checkpoint_facts.py`)."""

POLICIES = ("admit", "evict", "optimizer.schedule")
"""Settings of each table that may change, too."""

LEFTOVERS_S = 20.0
"""Seconds that processes of a run whose launcher was killed get to end: they notice by themselves."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that continues."""

    config: JobConfig
    checkpoint: Checkpoint
    changed: tuple[str, ...]
    """Settings that were changed, `a.b=value`."""

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
    before, config = stored_config(run), stored_config(run, overrides)
    changed = dict(_differences(_dumped(before, config.tables), _dumped(config, before.tables)))
    may_change = (*MAY_CHANGE, *(f"tables.{table}.{policy}" for table in config.tables for policy in POLICIES))
    for key in changed:
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in may_change):
            listed = ", ".join((*MAY_CHANGE, *(f"tables.TABLE.{policy}" for policy in POLICIES)))
            raise UserError(f"--set {key}: may not change when a job continues; allowed: {listed}")
    checkpoint = newest(config, run)
    if summary.get("status") in TRAINED and checkpoint.step == summary.get("steps"):
        _refuse_done(run, before, config, checkpoint, more=bool(changed.keys() & {"train.epochs", "train.max_steps"}))
    return Resumed(config, checkpoint, tuple(f"{key}={value}" for key, value in changed.items()))


def _dumped(config: JobConfig, named: Iterable[str]) -> dict[str, Any]:
    """A config as JSON types, with an empty entry for each table of `named` that it does not name."""
    found = config.model_dump(mode="json")
    nothing = TableConfig().model_dump(mode="json")
    return found | {"tables": dict.fromkeys(named, nothing) | found["tables"]}


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


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys whose values differ, with the new value."""
    for key in {**a, **b}:
        one, other, path = a.get(key), b.get(key), f"{above}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{path}.")
        elif one != other:
            yield path, other
