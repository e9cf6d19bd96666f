"""`shardkeep compare`, `shardkeep report` and `shardkeep evaluate --importance` of runs that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.analysis.importance import FILE
from shardkeep.cli.main import app
from tests.support.click_files import click_job, click_rows, write_csv


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `a` and `b`, of the same rows, and `c`, whose evaluation rows are fewer."""
    folder = tmp_path_factory.mktemp("judged")
    job = click_job(write_csv(folder / "train.csv", click_rows(600)))
    changes: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"tables": {"default": {"dim": 4, "optimizer": {"name": "adagrad", "lr": 1.0}}}},
        "c": {"eval": job["eval"] | {"max_samples": 50}},
    }
    for name, change in changes.items():
        shardkeep.train(shardkeep.JobConfig.model_validate(job | change), run_dir=folder / name, quiet=True)
    return folder


def stored(html: Path) -> Any:
    """What a report has of its runs."""
    return json.loads(html.read_text(encoding="utf-8").split('id="stored">')[1].split("</script>")[0])


def test_compare_prints_results_settings_and_differences(folder: Path) -> None:
    code, out, error = invoke("compare", str(folder / "a"), str(folder / "b"))
    assert (code, error) == (0, "")
    summaries = [json.loads((folder / name / "summary.json").read_text())["eval"] for name in "ab"]
    lines = [line.split() for line in out.splitlines()]
    assert ["AUC", *(f"{one['auc']:.4f}" for one in summaries)] in lines
    (of_auc,) = [line for line in lines if "DeLong" in line]
    assert float(of_auc[4]) == pytest.approx(summaries[1]["auc"] - summaries[0]["auc"], abs=2e-5)
    assert of_auc[:4] == ["AUC", "b", "-", "a"] and float(of_auc[5]) < float(of_auc[4]) < float(of_auc[7])
    assert [line[-1] for line in lines if line[:1] == ["logloss"]][-1] == "bootstrap"
    (of_lr,) = [line for line in lines if line[:1] == ["tables.default.optimizer.lr"]]
    assert of_lr[1:] == ["0.05", "1.0"], "the first is the default"


def test_runs_with_other_evaluation_rows_are_refused_in_a_line_and_compared_on_a_file(folder: Path) -> None:
    code, out, error = invoke("compare", str(folder / "a"), str(folder / "c"))
    assert code == 2 and not out and error.count("\n") == 1
    assert "a and c have other evaluation rows (" in error and "--data FILE" in error
    data = write_csv(folder / "later.csv", click_rows(200, seed=9))
    code, out, error = invoke("compare", str(folder / "a"), str(folder / "c"), "--data", str(data))
    assert (code, error) == (0, "") and "no difference shown" in out


def test_rows_on_which_a_model_was_trained_are_told(folder: Path) -> None:
    _, out, _ = invoke("evaluate", str(folder / "a"), "--data", str(folder / "train.csv"))
    (note,) = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("note")]
    assert note == "the model was trained on rows of train.csv: its metrics on new ones are lower"
    both = [str(folder / name) for name in "ab"]
    _, out, _ = invoke("compare", *both, "--data", str(folder / "train.csv"))
    assert [line for line in out.splitlines() if line.startswith("note")] == [
        f"note: {name} was trained on rows of train.csv: its metrics on new ones are lower" for name in "ab"
    ]
    other = str(write_csv(folder / "other.csv", click_rows(50, seed=5)))
    assert "note" not in invoke("evaluate", both[0], "--data", other)[1]
    assert "note" not in invoke("compare", *both, "--data", other)[1]


def test_equal_runs_are_compared_without_an_empty_table(folder: Path) -> None:
    code, out, error = invoke("compare", str(folder / "a"), str(folder / "a"))
    assert (code, error) == (0, "") and "\nno setting differs\n" in out and "-0.00000" not in out


def test_one_run_is_compared_with_nothing(folder: Path) -> None:
    code, _, error = invoke("compare", str(folder / "a"))
    assert code == 2 and error == "error: shardkeep compare requires two runs or more\n"


def test_a_report_has_calibration_of_each_run_and_differences_of_all(folder: Path) -> None:
    html = folder / "report.html"
    assert invoke("report", str(folder / "a"), str(folder / "b"), "--html", str(html))[0] == 0
    found = stored(html)
    assert all(len(run["quality"]["calibration"]) == 10 for run in found["runs"])
    heads, first, *_ = found["compared"]["differences"]
    assert heads[0] == "metric" and first[:2] == ["AUC", "b - a"] and "note" not in found["compared"]
    assert invoke("report", str(folder / "a"), str(folder / "b"), "--html", str(html), "--no-scores")[0] == 0
    assert "quality" not in stored(html)["runs"][0] and "differences" not in stored(html)["compared"]


def test_a_report_of_runs_that_cannot_be_compared_says_why(folder: Path) -> None:
    html = folder / "report.html"
    assert invoke("report", str(folder / "a"), str(folder / "c"), "--html", str(html))[0] == 0
    found = stored(html)
    assert "a and c have other evaluation rows" in found["compared"]["note"] and "quality" in found["runs"][1]


def test_importance_is_a_table_a_picture_and_json(folder: Path) -> None:
    run = folder / "a"
    code, out, error = invoke("evaluate", str(run), "--importance")
    assert (code, error) == (0, "") and f"picture  {run / FILE}" in out and (run / FILE).exists()
    rows = [line.split() for line in out.splitlines()]
    table = rows[rows.index(["column", "AUC", "it", "is", "worth", "spread"]) + 1 :]
    assert {row[0] for row in table[:5]} == {"user", "item", "tags", "price", "age"} and table[0][0] == "user"
    data = str(write_csv(folder / "more.csv", click_rows(300, seed=4)))
    code, out, _ = invoke("evaluate", str(run), "--importance", "--data", data, "--by", "item", "--json")
    found = json.loads(out)
    assert code == 0 and found["samples"] == 300 and found["importance"]["columns"][0]["column"] == "user"
    assert found["importance"]["value"] == found["auc"] and len(found["by"]["groups"]) == 50
