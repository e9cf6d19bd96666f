"""The best evaluation and early stopping, by hand-made evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkeep.base.errors import ConfigError
from shardkeep.workers.collectives.collective import ThreadCollective
from shardkeep.workers.config import EarlyStoppingConfig, PlateauConfig
from shardkeep.workers.evaluation.history import EvaluationHistory
from tests.support.cases import every
from tests.support.ranks import run_ranks


def best_of(*values: float | None, **settings: Any) -> EvaluationHistory:
    metric = settings.get("metric", "auc")
    best = EvaluationHistory(EarlyStoppingConfig.model_validate(settings))
    for at, value in enumerate(values):
        best.add(10 * (at + 1), {metric: value})
    return best


@every(
    ("best", "step", "ends"),
    [
        (best_of(), None, False),
        (best_of(0.6), 10, False),
        (best_of(0.6, 0.7, 0.69), 20, False),
        (best_of(0.6, 0.7, 0.69, 0.7), 20, True),  # two are not better
        (best_of(0.6, 0.5, 0.61, 0.6), 30, False),
        (best_of(0.6, 0.604, 0.608, min_delta=0.005), 30, False),
        (best_of(0.6, 0.604, 0.604, min_delta=0.005), 10, True),
        (best_of(0.5, 0.4, 0.45, 0.41, metric="logloss"), 20, True),  # less is better
        (best_of(0.5, 0.4, 0.45, metric="logloss", patience=1), 20, True),
    ],
)
def test_the_best_evaluation_and_whether_the_job_ends(best: EvaluationHistory, step: int | None, ends: bool) -> None:
    assert (best.step, best.ends) == (step, ends)


@every("metric", ["auc", "auc/like"])
@every("key", ["early_stopping", "plateau"])
def test_a_watched_metric_that_is_undefined_is_an_error_at_once_that_names_it_and_the_cause(
    key: str, metric: str
) -> None:
    stopping, plateau = EarlyStoppingConfig.model_validate({"metric": metric}), PlateauConfig(metric=metric)
    best = EvaluationHistory(stopping) if key == "early_stopping" else EvaluationHistory(None, plateau)
    best.add(10, {metric: 0.6, metric.replace("auc", "logloss"): None})
    with pytest.raises(ConfigError) as caught:
        note = metric.replace("auc", "note")
        best.add(1020, {metric: None, note: "all 9 labels are 0; AUC needs both classes"})
    assert str(caught.value) == (
        f"train.{key}.metric: {metric} is undefined after 1,020 steps (all 9 labels are 0; AUC needs both classes); "
        "allowed: another metric, or evaluation data that define it"
    )


def test_a_step_that_is_evaluated_again_counts_once_and_a_job_that_goes_back_forgets() -> None:
    best = best_of(0.6, 0.5, 0.4)
    assert best.ends
    best.forget_after(20)
    assert not best.ends
    best.add(20, {"auc": 0.5})
    assert not best.ends and best.step == 10
    best.add(30, {"auc": 0.65})
    assert best.metrics() == {"step": 30, "auc": 0.65}


def test_a_checkpoint_or_a_file_of_the_process_before_gives_the_same_best(tmp_path: Path) -> None:
    best, other = best_of(0.6, 0.7, 0.69), best_of()
    other.load(best.facts()["evaluations"])
    assert other.facts() == best.facts() and best.facts()["best_step"] == 20
    other.load([[10, {"auc": None}], [20, {"auc": 0.6}], [30, {"auc": None}]])  # undefined ones of an earlier version
    assert (other.step, other.ends) == (20, False)
    best = best_of(0.6)
    best.keep_in(tmp_path / "evaluations.json")
    best.add(20, {"auc": 0.7})
    replacement = best_of()
    replacement.keep_in(tmp_path / "evaluations.json")
    assert replacement.facts() == best.facts() and best.step == 20
    best = EvaluationHistory(None)  # without stopping nothing is recorded
    best.keep_in(tmp_path / "other.json")
    best.add(10, {"auc": 0.6})
    assert (best.step, best.ends, best.metrics(), best.facts()) == (None, False, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.json"]


def test_ranks_take_the_evaluations_of_the_one_that_has_most() -> None:
    def work(collective: ThreadCollective) -> dict[str, Any]:
        best = best_of(0.6, 0.7) if collective.rank == 1 else best_of()
        best.share(collective)
        return best.facts()

    assert run_ranks(ThreadCollective.group(3), work) == [best_of(0.6, 0.7).facts()] * 3


@every(("metric", "mode"), [("auc", "max"), ("logloss", "min")])
@every(("patience", "min_delta"), [(1, 0.0), (2, 0.0), (3, 0.02)])
def test_the_learning_rate_factor_is_that_of_torch(metric: str, mode: Any, patience: int, min_delta: float) -> None:
    values = (0.5 + np.random.default_rng(5).normal(0, 0.05, 60)).tolist()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, 0.5, patience - 1, threshold=min_delta, threshold_mode="abs", min_lr=0.01, eps=0.0
    )  # its patience counts the evaluations before the one that lowers the rate
    config = {"metric": metric, "patience": patience, "min_delta": min_delta, "factor": 0.5, "min_factor": 0.01}
    best = EvaluationHistory(None, PlateauConfig.model_validate(config))
    found = []
    for at, value in enumerate(values):
        best.add(at + 1, {metric: value})
        torchs.step(value)
        assert best.lr_factor == pytest.approx(optimizer.param_groups[0]["lr"])
        found.append(best.lr_factor)
    assert len(set(found)) > 4 and found[-1] == 0.01
    best.forget_after(30)
    assert best.lr_factor == found[29]
    other = EvaluationHistory(None, PlateauConfig.model_validate(config))
    other.load(best.facts()["evaluations"])
    assert other.lr_factor == found[29] and (best.step, best.ends) == (None, False)


def test_a_metric_that_is_not_evaluated_is_one_line() -> None:
    best = EvaluationHistory(EarlyStoppingConfig(metric="auc/clicked"))
    with pytest.raises(ConfigError, match=r"metric: auc/clicked is not evaluated; allowed: auc, logloss$"):
        best.add(10, {"auc": 0.6, "logloss": 0.1, "samples": 3})
    with pytest.raises(ValueError, match="allowed: auc, "):
        EarlyStoppingConfig(metric="calibration")
