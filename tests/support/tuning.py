"""Searches in a folder: a job of clicks with test data of its own, its command, and what is left of it.

Optuna takes a second to import, so functions import it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.yaml_text import write_yaml
from tests.support.click_files import click_job, click_rows, write_csv

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from shardkeep.automl.tune.plan import Plan
    from shardkeep.automl.tune.search import Search

RATES = "tower.optimizer.lr=0.0001,0.001,0.01"


def write_job(folder: Path, *, rows: int = 300, **changes: Any) -> Path:
    """job.yaml with four epochs and early stopping, and its files."""
    job = click_job(write_csv(folder / "clicks.csv", click_rows(rows)))
    write_csv(folder / "test.csv", click_rows(200, seed=8))
    job["data"]["test"] = "test.csv"
    job["train"] |= {"epochs": 4, "early_stopping": {"patience": 4}}
    path = folder / "job.yaml"
    path.write_text(write_yaml(job | changes))
    return path


def plan(folder: Path, over: Sequence[str] = (), *overrides: str, grid: bool = False, **changes: Any) -> Plan:
    from shardkeep.automl.tune.plan import plan_of

    return plan_of(write_job(folder, **changes), overrides, over, grid=grid)


def quick_plan(folder: Path, *overrides: str, **changes: Any) -> Plan:
    """A plan that tries two values and no defaults, which are read with the job again and again."""
    return plan(folder, ["model.dropout=0,0.1"], *overrides, grid=True, **changes)


def space(plan: Plan, *over: str) -> dict[str, Any]:
    """What `--over` names; as defaults a key that the model lacks."""
    from shardkeep.automl.tune.space import space_of

    return space_of(plan.load, over, defaults=["model.layers=1..3"])


def open_search(plan: Plan, out: Path) -> Search:
    from shardkeep.automl.tune.search import Search

    return Search(plan, out)


def search_in(folder: Path) -> Search:
    """The search that a command has left, opened as the same command would."""
    from shardkeep.automl.tune.plan import plan_of
    from shardkeep.workers.data.sources.registry import open_data

    plan = plan_of(folder / "job.yaml", [], [RATES])
    data = open_data(plan.job.data, seed=plan.job.seed).fingerprint
    return open_search(replace(plan, data=data), folder / "out")


def ended_in(folder: Path) -> list[int]:
    """The trials that ended, of a search that may run or have been killed. Changes nothing."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.trial import TrialState

    copy = shutil.copy(folder / "out" / "journal.log", folder / "journal.copy")
    study = optuna.load_study(study_name="tune", storage=JournalStorage(JournalFileBackend(str(copy))))
    return numbers(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))


def numbers(trials: Sequence[FrozenTrial]) -> list[int]:
    return [trial.number for trial in trials]
