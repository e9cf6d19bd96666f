"""`shardkeep evaluate`, `predict`, `compare` and `report` of runs that were trained, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardkeep
from shardkeep.analysis.importance import FILE
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.invoked import invoke


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
        shardkeep.train(job | change, run_dir=folder / name, quiet=True)
    return folder


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


# ---- one run ----


def test_evaluate_prints_the_summarys_numbers_as_json_and_for_a_person(folder: Path) -> None:
    run, summary = folder / "a", summary_of(folder / "a")
    code, out, error = invoke("evaluate", run, "--json")
    assert (code, error) == (0, "") and json.loads(out) == {"step": summary["steps"]} | summary["eval"]
    code, out, _ = invoke("evaluate", run, "--split", "train", "--model", summary["steps"])
    rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines())
    assert code == 0 and int(rows["samples"]) == 600 - summary["eval"]["samples"] and 0 < float(rows["AUC"]) < 1


def test_what_a_person_reads_has_one_name_a_metric_and_no_spaces_at_the_ends_of_lines(
    folder: Path, tmp_path: Path
) -> None:
    run = folder / "a"
    printed = [
        invoke("evaluate", run, "--data", folder / "train.csv", "--by", "user"),
        invoke("export", run, tmp_path / "model", "--rows", "fp16"),
        invoke("tables", run),
        invoke("tables", run, "--table", "user"),
        invoke("status", run),
        invoke("estimate", run / "config.yaml"),
    ]
    for code, out, _ in printed:
        assert code == 0 and [line for line in out.splitlines() if line != line.rstrip()] == []
        assert "normalized_entropy" not in out and " 0.0 MB" not in out
    for _, out, _ in printed[:2]:
        assert "AUC" in out and "normalized entropy" in out and "auc" not in out


def test_predict_says_what_it_wrote_and_what_it_does_not_know(folder: Path, tmp_path: Path) -> None:
    rows = [row | {"user": "stranger"} for row in click_rows(20)]
    data, out_file = write_csv(tmp_path / "new.csv", rows), tmp_path / "scores.csv"
    code, out, error = invoke("predict", folder / "a", "--data", data, "--out", out_file, "--keep", "item")
    first, *rest = out.splitlines()
    assert (code, error) == (0, "") and first.startswith("20 rows scored by the model of step ")
    assert rest[0] == "values without a row: user 100 % (20 of 20)"
    assert out_file.read_text().splitlines()[0] == '"item","score"' and out_file.read_text().count("\n") == 21


@every(
    ("words", "text"),
    [
        ("evaluate /nowhere", "error: /nowhere: there is no such folder"),
        ("evaluate RUN --data /nowhere.csv", "error: /nowhere.csv: no such file (--data)"),
        ("evaluate RUN --model newest", "allowed:"),
        ("evaluate RUN --split all", "allowed:"),
        ("predict RUN --data DATA --out x.csv --keep userr", "has no column userr; did you mean"),
        ("predict RUN --data DATA --out x.txt", "error: --out x.txt: allowed: a name that ends in"),
        ("compare RUN", "error: shardkeep compare requires two runs or more"),
    ],
)
def test_wrong_arguments_are_one_line(folder: Path, words: str, text: str) -> None:
    filled = words.replace("RUN", str(folder / "a")).replace("DATA", str(folder / "train.csv"))
    code, out, error = invoke(*filled.split())
    assert code == 2 and not out and text in error and error.lower().count("error: ") == 1


def test_importance_is_a_table_a_picture_and_json(folder: Path) -> None:
    run = folder / "a"
    code, out, error = invoke("evaluate", run, "--importance")
    assert (code, error) == (0, "") and f"picture  {run / FILE}" in out and (run / FILE).exists()
    rows = [line.split() for line in out.splitlines()]
    table = rows[rows.index(["column", "AUC", "it", "is", "worth", "spread"]) + 1 :]
    assert {row[0] for row in table[:5]} == {"user", "item", "tags", "price", "age"} and table[0][0] == "user"
    data = write_csv(folder / "more.csv", click_rows(300, seed=4))
    code, out, _ = invoke("evaluate", run, "--importance", "--data", data, "--by", "item", "--json")
    found = json.loads(out)
    assert code == 0 and found["samples"] == 300 and found["importance"]["columns"][0]["column"] == "user"
    assert found["importance"]["value"] == found["auc"] and len(found["by"]["groups"]) == 50


# ---- several runs ----


def test_compare_prints_results_settings_and_differences(folder: Path) -> None:
    code, out, error = invoke("compare", folder / "a", folder / "b")
    assert (code, error) == (0, "")
    summaries = [summary_of(folder / name)["eval"] for name in "ab"]
    lines = [line.split() for line in out.splitlines()]
    assert ["AUC", *(f"{one['auc']:.4f}" for one in summaries)] in lines
    (of_auc,) = [line for line in lines if "DeLong" in line]
    assert float(of_auc[4]) == pytest.approx(summaries[1]["auc"] - summaries[0]["auc"], abs=2e-5)
    assert of_auc[:4] == ["AUC", "b", "-", "a"] and float(of_auc[5]) < float(of_auc[4]) < float(of_auc[7])
    assert [line[-1] for line in lines if line[:1] == ["logloss"]][-1] == "bootstrap"
    (of_lr,) = [line for line in lines if line[:1] == ["tables.default.optimizer.lr"]]
    assert of_lr[1:] == ["0.05", "1.0"], "the first is the default"
    code, out, _ = invoke("compare", folder / "a", folder / "a")
    assert code == 0 and "\nno setting differs\n" in out and "-0.00000" not in out


def reported(folder: Path, *runs: str, options: tuple[str, ...] = ()) -> Any:
    html = folder / "report.html"
    assert invoke("report", *(folder / run for run in runs), *options, "--html", html)[0] == 0
    return json.loads(html.read_text(encoding="utf-8").split('id="stored">')[1].split("</script>")[0])


def test_a_report_has_calibration_of_each_run_and_differences_of_all(folder: Path) -> None:
    found = reported(folder, "a", "b")
    assert all(len(run["quality"]["calibration"]) == 10 for run in found["runs"])
    heads, first, *_ = found["compared"]["differences"]
    assert heads[0] == "metric" and first[:2] == ["AUC", "b - a"] and "note" not in found["compared"]
    found = reported(folder, "a", "b", options=("--no-scores",))
    assert "quality" not in found["runs"][0] and "differences" not in found["compared"]


def test_runs_with_other_evaluation_rows_are_refused_in_a_line_and_a_report_says_why(folder: Path) -> None:
    code, out, error = invoke("compare", folder / "a", folder / "c")
    assert code == 2 and not out and error.count("\n") == 1
    assert "a and c have other evaluation rows (" in error and "--data FILE" in error
    found = reported(folder, "a", "c")
    assert "a and c have other evaluation rows" in found["compared"]["note"] and "quality" in found["runs"][1]


def test_rows_on_which_a_model_was_trained_are_told_where_metrics_are_of_a_file(folder: Path) -> None:
    seen = "was trained on rows of train.csv: its metrics on new ones are lower"
    _, out, _ = invoke("evaluate", folder / "a", "--data", folder / "train.csv")
    assert [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("note")] == [f"the model {seen}"]
    _, out, _ = invoke("compare", folder / "a", folder / "b", "--data", folder / "train.csv")
    notes = [line for line in out.splitlines() if line.startswith("note")]
    assert notes == [f"note: a {seen}", f"note: b {seen}"]
    other = write_csv(folder / "other.csv", click_rows(100, seed=5))
    code, out, error = invoke("compare", folder / "a", folder / "c", "--data", other)
    assert (code, error) == (0, "") and "no difference shown" in out and "note" not in out
