"""Searches in a folder: a job of clicks with test data of its own, its command, and what is left of it.

Optuna takes a second to import, so functions import it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.base.yaml_text import write_yaml
from shardkeep.experiments.journal import Journal
from tests.support.click_files import click_job, click_rows, write_csv

if TYPE_CHECKING:
    from shardkeep.experiments.tune import Search, SearchedJob

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


def searched(
    folder: Path, over: Sequence[str] = (), *overrides: str, grid: bool = False, **changes: Any
) -> SearchedJob:
    from shardkeep.experiments.tune import SearchedJob

    return SearchedJob(write_job(folder, **changes), overrides, over, grid=grid)


def search(folder: Path, over: Sequence[str] = (), *overrides: str, grid: bool = False, **changes: Any) -> Search:
    from shardkeep.experiments.tune import Search

    return Search(searched(folder, over, *overrides, grid=grid, **changes), folder / "out", trials=30)


def space(found: SearchedJob, *over: str) -> dict[str, Any]:
    """What `--over` names; as defaults a key that the model lacks."""
    from shardkeep.automl.space import space_of

    return space_of(found.load, over, defaults=["model.layers=1..3"])


def ended_in(folder: Path) -> list[str]:
    """The trials that ended, of a search that may run or have been killed. Changes nothing."""
    copy = folder / "copy"
    copy.mkdir(exist_ok=True)
    shutil.copy(folder / "out" / "journal.jsonl", copy)
    return list(Journal(copy).ended)
