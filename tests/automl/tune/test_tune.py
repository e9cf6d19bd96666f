"""Whole searches: trials as real jobs, killed ones, those that fail, and what is left in the end."""

from __future__ import annotations

import io
import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from shardkeep.base.errors import JobError, UserError
from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.config import load_config
from shardkeep.launch.out_folder import holding
from tests.support.cases import every
from tests.support.cluster import Cluster, within
from tests.support.full_disk import full_disk
from tests.support.tuning import (
    RATES,
    ended_in,
    plan,
    quick_plan,
    search_in,
    space,
    write_job,
)

if TYPE_CHECKING:
    from shardkeep.automl.tune.plan import Plan

pytestmark = pytest.mark.waits_for_processes


def with_checkpoints(folder: Path) -> set[str]:
    return {run.parent.name for run in (folder / "out" / "runs").glob("*/checkpoints")}


def scored_in(folder: Path) -> set[str]:
    """The trials whose model has read the test data."""
    summaries = (folder / "out" / "runs").glob("*/summary.json")
    return {path.parent.name for path in summaries if "test" in json.loads(path.read_text())}


def tune(found: Plan, **options: Any) -> None:
    from shardkeep.automl.tune.tune import tune

    tune(found, **options)


SPAWNED = {"servers": 1, "launch": {"start": "spawn"}}
"""No fork server, which takes seconds to start."""


def run(folder: Path, trials: int, *over: str, minutes: float | None = None, **changes: object) -> str:
    printed = io.StringIO()
    found = plan(folder, over, **changes)
    tune(found, out=folder / "out", trials=trials, minutes=minutes, console=Console(file=printed, width=1000))
    return printed.getvalue()


@pytest.mark.slow
def test_the_best_of_the_trials_reads_the_test_data_once_and_no_other_keeps_a_model(tmp_path: Path) -> None:
    printed = run(tmp_path, 4, RATES, rows=1000)
    search = search_in(tmp_path)
    best = search.best
    assert best is not None and len(search.ended) == 4
    curves = [list(trial.intermediate_values.values()) for trial in search.ended]
    assert all(curve == sorted(curve) for curve in curves)  # the best so far, which early stopping keeps
    assert with_checkpoints(tmp_path) == scored_in(tmp_path) == {str(best.number)}
    scored = json.loads((tmp_path / f"out/runs/{best.number}/summary.json").read_text())
    assert best.value == scored["best"]["auc"] and f"{scored['test']['auc']:.5f} on the test data" in printed
    assert "4 of 4 trials, best " in printed and "0:00:00 left" in printed
    job = load_config(tmp_path / "out" / "best.yaml")
    assert job.tested and job == search.plan.over(f"eval.every_steps={job.eval.every_steps}").chosen(best.params)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    (tmp_path / "test.csv").write_text("other,columns\n1,2\n")
    assert f"{scored['test']['auc']:.5f} on the test data" in run_again(tmp_path, 4)  # without a look at the file
    other = tmp_path / f"out/runs/{1 - min(best.number, 1)}/summary.json"
    other.write_text(json.dumps({"status": "completed", "test": scored["test"]}))
    printed = run_again(tmp_path, 4)
    assert f"which trial {other.parent.name} has read before" in printed  # as the best of an earlier start


def run_again(folder: Path, trials: int) -> str:
    printed = io.StringIO()
    tune(search_in(folder).plan, out=folder / "out", trials=trials, minutes=None, console=Console(file=printed))
    return printed.getvalue()


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("marks", [("journal.log", "runs/0/metrics.jsonl"), ("jobs/1.yaml", "best.yaml")])
def test_a_search_killed_twice_goes_on_with_the_same_command(
    tmp_path: Path, cluster: Cluster, marks: tuple[str, str]
) -> None:
    """`marks`: the files after which it is killed."""
    write_job(tmp_path, rows=1000)
    out = ["--out", str(tmp_path / "out")]
    command = ["tune", str(tmp_path / "job.yaml"), "--trials", "4", *out, "--over", RATES]
    known: list[int] = []
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
    search = search_in(tmp_path)
    assert search.best is not None and len(search.ended) == 4
    assert with_checkpoints(tmp_path) == scored_in(tmp_path) == {str(search.best.number)}


@pytest.mark.slow
def test_a_search_ends_when_all_settings_were_tried_and_a_trial_that_diverges_counts_as_bad_with_its_cause(
    tmp_path: Path,
) -> None:
    found, printed = quick_plan(tmp_path, **SPAWNED), io.StringIO()
    over = "tower.optimizer.lr=0.0001,0.001,1e6", "train.max_bad_steps=1,2"
    found = replace(found, grid=False, space=space(found, *over))
    tune(found, out=tmp_path / "out", trials=30, minutes=None, console=Console(file=printed, width=1000))
    assert "6 trials, " in printed.getvalue() and "6 of 6 trials, best " in printed.getvalue()
    jobs = [load_config(path).tower.optimizer.lr for path in (tmp_path / "out/jobs").iterdir()]
    assert sorted(jobs) == [0.0001, 0.0001, 0.001, 0.001, 1e6, 1e6]
    assert "failed: the gradients of" in printed.getvalue() and "were not finite" in printed.getvalue()
    assert "were not finite" in (tmp_path / "out" / "report.html").read_text()
    assert read_yaml((tmp_path / "out" / "best.yaml").read_text())["tower"]["optimizer"]["lr"] < 1


@pytest.mark.chaos
def test_trials_that_run_when_the_time_is_over_stop_early(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no trial completed"):
        run(tmp_path, 4, minutes=0.0)
    assert not with_checkpoints(tmp_path)


@pytest.mark.chaos
def test_after_test_data_that_cannot_be_read_or_a_full_disk_the_same_command_goes_on(tmp_path: Path) -> None:
    searching, right = plan(tmp_path, [RATES]), (tmp_path / "test.csv").read_bytes()
    (tmp_path / "test.csv").write_text("other,columns\n1,2\n")
    with pytest.raises(JobError, match=r"data\.test is not scored"):
        tune(searching, out=tmp_path / "out", trials=2, minutes=None, console=Console(quiet=True))
    (tmp_path / "test.csv").write_bytes(right)
    assert "on the test data" in run_again(tmp_path, 2)
    best = (tmp_path / "out/best.yaml").read_bytes()
    with pytest.raises(OSError, match="too large"), full_disk():
        run_again(tmp_path, 4)
    assert (tmp_path / "out/best.yaml").read_bytes() == best
    run_again(tmp_path, 4)
    assert ended_in(tmp_path) == [0, 1, 2, 3]


def test_a_folder_with_another_search_at_work_is_refused(tmp_path: Path) -> None:
    found = quick_plan(tmp_path, **SPAWNED)
    with (
        holding(tmp_path / "out", what="search"),
        pytest.raises(UserError, match="another search is running in this folder"),
    ):
        tune(found, out=tmp_path / "out", trials=1, minutes=None, console=Console(quiet=True))


@every(
    ("changes", "says"),
    [
        ({"eval_fraction": 0.0}, "the job has no evaluation data, by which trials are compared"),
        ({"train": ["gone.csv"]}, "gone.csv"),
    ],
)
def test_a_job_that_cannot_be_searched_leaves_no_folder(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    from shardkeep.automl.tune.plan import plan_of

    job = read_yaml(write_job(tmp_path, **SPAWNED).read_text())
    del job["train"]["early_stopping"]
    (tmp_path / "job.yaml").write_text(write_yaml(job | {"data": job["data"] | changes}))
    found = plan_of(tmp_path / "job.yaml", [], [RATES], grid=True)
    with pytest.raises(UserError, match=says):
        tune(found, out=tmp_path / "out", trials=1, minutes=None, console=Console(quiet=True))
    assert not (tmp_path / "out").exists()
