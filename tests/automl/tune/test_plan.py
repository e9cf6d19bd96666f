"""The configs of a search: that of a trial, and that of best.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkeep.base.errors import ConfigError
from tests.support.tuning import plan

PARAMS = {"tower.optimizer.lr": 0.02, "model.hidden": "[4, 4]", "tables.default.dim": 6, "model.norm": "batch"}


def test_a_trial_is_the_job_with_its_settings_and_leaves_the_test_data_unread(tmp_path: Path) -> None:
    found = plan(tmp_path)
    chosen, trial = found.chosen(PARAMS), found.trial(PARAMS)
    for job in (chosen, trial):
        assert (job.tower.optimizer.lr, job.model.hidden, job.table("default").dim) == (0.02, [4, 4], 6)  # type: ignore[union-attr]
    assert (chosen.tested, trial.tested) == (True, False)
    assert (trial.web.has_page, trial.checkpoint.keep) == (False, 1)
    assert chosen.checkpoint.keep == 3


def test_trials_share_cores_where_the_job_takes_all(tmp_path: Path) -> None:
    job = plan(tmp_path, [], "threads=auto", "launch.affinity=auto").trial({})
    assert (job.threads, job.launch.affinity.wanted) == (1, False)


@pytest.mark.parametrize(
    ("epochs", "every", "first"),
    [(20, 62, 5), (20, "epoch", 1), (2, 62, 1), (6, 62, 3), (1, 10, 3), (1, 62, 1)],
    ids=str,
)
def test_a_trial_may_stop_after_an_epoch_or_sooner_where_there_are_few_evaluations(
    epochs: int, every: str | int, first: int, tmp_path: Path
) -> None:
    found = plan(tmp_path, train={"epochs": epochs, "batch_size": 8}, eval={"every_steps": every})
    assert found.first_look(steps=310 * epochs) == first


def test_settings_that_do_not_go_together_are_the_trial_s_error(tmp_path: Path) -> None:
    model = {"bottom": [7], "hidden": [9], "norm": "batch"}
    found = plan(tmp_path, ["model.norm=none,batch", "model.sync_norm=true,false"], model=model)
    with pytest.raises(ConfigError, match="sync_norm: has no effect"):
        found.trial({"model.norm": "none", "model.sync_norm": "true"})


@pytest.mark.parametrize(
    ("changes", "metric", "sign"),
    [
        ({}, "auc", 1),
        ({"train": {"early_stopping": {"metric": "logloss"}}}, "logloss", -1),
        ({"train": {}, "eval": {"metrics": ["calibration", "logloss", "auc"]}}, "logloss", -1),
    ],
    ids=["default", "early stopping", "first that can be compared"],
)
def test_the_metric_is_that_of_early_stopping_or_the_first(
    tmp_path: Path, changes: dict[str, object], metric: str, sign: int
) -> None:
    found = plan(tmp_path, **changes)
    assert (found.metric, found.sign) == (metric, sign)
