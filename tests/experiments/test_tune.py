"""Whole searches: trials as real jobs, killed ones, those that fail, and what is left in the end."""

from __future__ import annotations

import io
import json
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from shardkeep.base.errors import JobError, UserError
from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.config import load_config
from tests.support.cases import every
from tests.support.cluster import Cluster, within
from tests.support.full_disk import full_disk
from tests.support.tuning import RATES, ended_in, search, write_job

if TYPE_CHECKING:
    from shardkeep.experiments.tune import Search

pytestmark = pytest.mark.waits_for_processes


def with_checkpoints(folder: Path) -> set[str]:
    return {run.parent.name for run in (folder / "out" / "runs").glob("*/checkpoints")}


def scored_in(folder: Path) -> set[str]:
    """The trials whose model has read the test data."""
    summaries = (folder / "out" / "runs").glob("*/summary.json")
    return {path.parent.name for path in summaries if "test" in json.loads(path.read_text())}


def tune(found: Search, **options: Any) -> str:
    """What it printed."""
    from shardkeep.experiments.runner import run

    printed = io.StringIO()
    run(found, console=Console(file=printed, width=1000), **options)
    return printed.getvalue()


SPAWNED = {"servers": 1, "launch": {"start": "spawn"}}
"""No fork server, which takes seconds to start."""


def again(folder: Path, trials: int) -> Search:
    """The search of the same command."""
    from shardkeep.experiments.tune import Search, SearchedJob

    return Search(SearchedJob(folder / "job.yaml", [], [RATES], grid=False), folder / "out", trials)


@pytest.mark.slow
def test_the_best_of_the_trials_reads_the_test_data_once_and_no_other_keeps_a_model(tmp_path: Path) -> None:
    write_job(tmp_path, rows=1000)
    found = again(tmp_path, 4)
    printed = tune(found)
    best = found.best
    assert best is not None and found.done == 4
    assert with_checkpoints(tmp_path) == scored_in(tmp_path) == {best.trial}
    scored = json.loads((tmp_path / f"out/runs/{best.trial}/summary.json").read_text())
    assert best.value == scored["best"]["auc"] and f"{scored['test']['auc']:.5f} on the test data" in printed
    assert "4 of 4 trials, 0:00:00 left" in printed and f"best {best.value:.5f} (trial {best.trial})" in printed
    job = load_config(tmp_path / "out" / "best.yaml")
    assert job.tested and job == found.searched.chosen(best.settings)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    (tmp_path / "test.csv").write_text("other,columns\n1,2\n")
    assert f"{scored['test']['auc']:.5f} on the test data" in tune(again(tmp_path, 4))  # without a look at the file
    other = tmp_path / f"out/runs/{1 - min(int(best.trial), 1)}/summary.json"
    other.write_text(json.dumps({"status": "completed", "test": scored["test"]}))
    assert f"which trial {other.parent.name} has read before" in tune(again(tmp_path, 4))  # as an earlier best


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("marks", [("journal.jsonl", "runs/0/metrics.jsonl"), ("jobs/1.yaml", "best.yaml")])
def test_a_search_killed_twice_goes_on_with_the_same_command(
    tmp_path: Path, cluster: Cluster, marks: tuple[str, str]
) -> None:
    """`marks`: the files after which it is killed."""
    write_job(tmp_path, rows=1000)
    out = ["--out", str(tmp_path / "out")]
    command = ["tune", str(tmp_path / "job.yaml"), "--trials", "4", *out, "--over", RATES]
    known: list[str] = []
    for mark in marks:
        tuning = cluster.command(*command)
        within(200, (tmp_path / "out" / mark).exists, mark, partial(getattr, tuning, "running"))
        tuning.signal(signal.SIGKILL)
        tuning.end()
        ended = ended_in(tmp_path)
        assert ended[: len(known)] == known
        known = ended
    ended_well = cluster.command(*command).end(limit_s=400)
    assert ended_well.code == 0, ended_well
    assert sorted(ended_in(tmp_path)) == list("0123")
    assert with_checkpoints(tmp_path) == scored_in(tmp_path) and len(scored_in(tmp_path)) == 1


@pytest.mark.slow
def test_a_search_ends_when_all_settings_were_tried_and_a_trial_that_diverges_counts_as_bad_with_its_cause(
    tmp_path: Path,
) -> None:
    over = ["tower.optimizer.lr=0.0001,0.001,1e6", "train.max_bad_steps=1,2"]
    printed = tune(search(tmp_path, over, grid=True, **SPAWNED))
    assert "6 trials into " in printed and "6 of 6 trials, " in printed
    jobs = [load_config(path).tower.optimizer.lr for path in (tmp_path / "out/jobs").iterdir()]
    assert sorted(jobs) == [0.0001, 0.0001, 0.001, 0.001, 1e6, 1e6]
    assert "failed: the gradients of" in printed and "were not finite" in printed
    assert "were not finite" in (tmp_path / "out" / "report.html").read_text()
    assert read_yaml((tmp_path / "out" / "best.yaml").read_text())["tower"]["optimizer"]["lr"] < 1


@pytest.mark.chaos
def test_trials_that_run_when_the_time_is_over_stop_early(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no trial completed"):
        tune(search(tmp_path), minutes=0.0)
    assert not with_checkpoints(tmp_path)


@pytest.mark.chaos
def test_after_test_data_that_cannot_be_read_or_a_full_disk_the_same_command_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path)
    right = (tmp_path / "test.csv").read_bytes()
    (tmp_path / "test.csv").write_text("other,columns\n1,2\n")
    with pytest.raises(JobError, match=r"data\.test is not scored"):
        tune(again(tmp_path, 2))
    (tmp_path / "test.csv").write_bytes(right)
    assert "on the test data" in tune(again(tmp_path, 2))
    best = (tmp_path / "out/best.yaml").read_bytes()
    with pytest.raises((OSError, UserError), match="too large"), full_disk():
        tune(again(tmp_path, 4))
    assert (tmp_path / "out/best.yaml").read_bytes() == best
    tune(again(tmp_path, 4))
    assert sorted(ended_in(tmp_path)) == list("0123")


@every(
    ("changes", "says"),
    [
        ({"split": None}, "the job has no evaluation data, by which trials are compared"),
        ({"train": ["gone.csv"]}, "gone.csv"),
    ],
)
def test_a_job_that_cannot_be_searched_leaves_no_folder(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    from shardkeep.experiments.tune import Search, SearchedJob

    job = read_yaml(write_job(tmp_path, **SPAWNED).read_text())
    del job["train"]["early_stopping"]
    (tmp_path / "job.yaml").write_text(write_yaml(job | {"data": job["data"] | changes}))
    found = Search(SearchedJob(tmp_path / "job.yaml", [], [RATES], grid=True), tmp_path / "out", 1)
    with pytest.raises(UserError, match=says):
        tune(found)
    assert not (tmp_path / "out").exists()
