"""What a search tries: the values of `--over`, defaults that the job's model has, and the configs that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.config.over import Range, combinations
from tests.support.cases import every
from tests.support.tuning import searched, space

if TYPE_CHECKING:
    from shardkeep.experiments.tune import SearchedJob

ROWS = "tables.default.optimizer.lr"
PARAMS = {"tower.optimizer.lr": 0.02, "model.hidden": "[4, 4]", "tables.default.dim": 6, "model.norm": "batch"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> SearchedJob:
    return searched(tmp_path_factory.mktemp("job"))


def test_over_names_the_values_of_a_key(found: SearchedJob) -> None:
    over = {
        "model.dropout=0,0.1,1e-3,0.1": ("0", "0.1", "0.001"),
        "model.hidden=[8],[16, 4]": ("[8]", "[16, 4]"),
        "model.norm=none,layer": ("none", "layer"),
        "train.clip_norm=null,1.0": ("null", "1"),
        "train.batch_size=16,32": ("16", "32"),
        "tower.optimizer.lr=log:1e-4..1e-2": Range(1e-4, 1e-2, log=True),
        "tower.optimizer.weight_decay=0..0.5": Range(0.0, 0.5),
        "tables.default.dim=1..8": Range(1, 8),
        "eval.every_steps=log:1..64": Range(1, 64, log=True),
    }
    assert space(found, *over) == {text.partition("=")[0]: values for text, values in over.items()}


@every(
    ("text", "says"),
    [
        ("model.dropuot=0,0.1", "model.dropuot: unknown key with name: dlrm; did you mean dropout?"),
        ("tower.optimiser.lr=1,2", "tower.optimiser: unknown key; did you mean optimizer?"),
        ("model.dropout=0,2", "model.dropout: 2 is not allowed; allowed: a number of at least 0 and below 1"),
        ("model.dropout=0.5..1", "model.dropout: 1.0 is not allowed"),
        ("model.dropout=0.5..0.1", "allowed: LOW up to HIGH, and with log: above 0"),
        ("tower.optimizer.lr=log:0..1", "allowed: LOW up to HIGH, and with log: above 0"),
        ("tower.optimizer.lr=a..b", "could not convert"),
        ("model.dropout", "is not of the form KEY=A,B,C, KEY=LOW..HIGH or KEY=log:LOW..HIGH"),
        ("model.hidden=[8],[4", "a bracket is not closed"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_before_any_trial(found: SearchedJob, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space(found, text)
    line = str(caught.value)
    assert line.startswith(f"--over {text}: ") and says in line and "\n" not in line, line


def test_a_key_that_is_named_twice_is_refused_unless_both_say_the_same(found: SearchedJob) -> None:
    once = space(found, "model.dropout=0,0.1")
    assert space(found, "model.dropout=0,0.1", "model.dropout=0,0.10") == once
    with pytest.raises(ConfigError, match=r"^--over model.dropout=0..0.5: names a key twice$"):
        space(found, "model.dropout=0,0.1", "model.dropout=0..0.5")


ADAGRAD = {"default": {"optimizer": "adagrad", "init": {"name": "normal", "std": 0.1}}}


@every(
    ("over", "changes", "has", "lacks"),
    [
        ([], {"model": {"name": "dcn_v2"}},
         {ROWS, "tower.optimizer.lr", "model.hidden", "model.dropout", "model.norm", "tables.default.dim",
          "model.cross_layers"}, {"model.attention.layers"}),
        ([], {"model": {"name": "autoint"}}, {ROWS, "model.attention.layers"}, {"model.cross_layers"}),
        (["model.name=dnn,masknet"], {}, {"model.hidden"}, {"model.norm"}),  # what both have
        ([], {"model": "lr", "tables": {}}, {ROWS}, {"tables.default.dim", "model.hidden"}),  # rows of one weight
        ([], {"tables": ADAGRAD}, {ROWS}, {"tables.default.init.scale"}),  # excluded by a setting of the job
    ],
)  # fmt: skip
def test_defaults_are_the_keys_that_the_job_has(
    tmp_path: Path, over: list[str], changes: dict[str, Any], has: set[str], lacks: set[str]
) -> None:
    keys = searched(tmp_path, over, **changes).space.keys()
    assert has <= keys and not lacks & keys


def test_the_job_s_own_values_are_in_the_defaults_and_come_first(tmp_path: Path) -> None:
    tables = {"default": {"optimizer": {"name": "sgd", "lr": 2.5}, "dim": 5}}
    found = searched(tmp_path, ["model.dropout=0.1,0.2"], "tower.optimizer.lr=0.03", tables=tables)
    assert found.own == (
        {
            ROWS: 2.5,
            "tower.optimizer.lr": 0.03,
            "tower.optimizer.weight_decay": "0",
            "tables.default.optimizer.weight_decay": "0",
            "tables.default.init.scale": "null",
            "tables.default.dim": "5",
            "model.hidden": "[9, 5]",
            "model.norm": "none",
            "model.init": "dlrm",
        }
    )  # a dropout of 0 is none of the values that --over names


@every(
    ("over", "says"),
    [
        (["model.dropout=0..0.5"], "--over model.dropout=0..0.5: has no end of values for --grid; allowed: KEY=A,B,C"),
        ([], "--grid: has nothing to combine; allowed: with --over KEY=A,B,C"),
    ],
)
def test_a_grid_needs_lists(tmp_path: Path, over: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        searched(tmp_path, over, grid=True)
    assert str(caught.value) == says


def test_a_trial_is_the_job_with_its_settings_and_leaves_the_test_data_unread(
    found: SearchedJob, tmp_path: Path
) -> None:
    chosen, trial = found.chosen(PARAMS), found.trial(PARAMS)
    for job in (chosen, trial):
        assert (job.tower.optimizer.lr, job.model.hidden, job.table("default").dim) == (0.02, [4, 4], 6)  # type: ignore[union-attr]
    assert (chosen.tested, trial.tested) == (True, False)
    assert (trial.web.has_page, trial.checkpoint.keep) == (False, 1)
    assert chosen.checkpoint.keep == 3
    found = searched(tmp_path, ["model.norm=batch"], "threads=auto", "launch.affinity=auto", grid=True)
    job = found.trial({})
    assert (job.threads, job.launch.affinity.wanted) == (1, False), "trials share cores where the job takes all"


@every(("epochs", "steps", "first"), [(20, 62, 5), (20, "epoch", 1), (2, 62, 1), (6, 62, 3), (1, 10, 3), (1, 62, 1)])
def test_a_trial_may_stop_after_an_epoch_or_sooner_where_there_are_few_evaluations(
    tmp_path: Path, epochs: int, steps: str | int, first: int
) -> None:
    job = [f"train.epochs={epochs}", "train.batch_size=8", f"eval.every_steps={steps}"]
    found = searched(tmp_path, ["model.dropout=0,0.1"], *job, grid=True)
    assert found.first_look(steps=310 * epochs) == first


@every(
    ("overrides", "metric", "sign"),
    [
        ([], "auc", 1),
        (["train.early_stopping.metric=logloss"], "logloss", -1),
        (["train.early_stopping=null", "eval.metrics=[calibration, logloss, auc]"], "logloss", -1),
    ],
)
def test_the_metric_is_that_of_early_stopping_or_the_first_that_can_be_compared(
    tmp_path: Path, overrides: list[str], metric: str, sign: int
) -> None:
    found = searched(tmp_path, ["model.dropout=0,0.1"], *overrides, grid=True)
    assert (found.metric, found.sign) == (metric, sign)


def test_a_range_of_fractions_has_no_combinations() -> None:
    assert list(combinations({"a": ("x",), "b": Range(0.0, 1.0)})) == []
