"""`shardkeep evaluate` and `shardkeep predict` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import app
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("commands")
    job = click_job(write_csv(folder / "train.csv", click_rows(400)))
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    return str(folder / "run")


def test_evaluate_prints_the_summarys_numbers_as_json_and_for_a_person(run: str) -> None:
    told = json.loads((Path(run) / "summary.json").read_text())
    code, out, error = invoke("evaluate", run, "--json")
    assert (code, error) == (0, "") and json.loads(out) == {"step": told["steps"]} | told["eval"]
    code, out, _ = invoke("evaluate", run, "--split", "train", "--model", str(told["steps"]))
    rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines())
    assert code == 0 and int(rows["samples"]) == 400 - told["eval"]["samples"] and 0 < float(rows["AUC"]) < 1


def test_what_a_person_reads_has_one_name_a_metric_and_no_spaces_at_the_ends_of_lines(run: str, tmp_path: Path) -> None:
    config, data = str(Path(run) / "config.yaml"), str(Path(run).parent / "train.csv")
    printed = [
        invoke("evaluate", run),
        invoke("evaluate", run, "--data", data, "--by", "user"),
        invoke("export", run, str(tmp_path / "model"), "--rows", "fp16"),
        invoke("tables", run),
        invoke("tables", run, "--table", "user"),
        invoke("status", run),
        invoke("estimate", config),
    ]
    for code, out, _ in printed:
        assert code == 0 and [line for line in out.splitlines() if line != line.rstrip()] == []
        assert "normalized_entropy" not in out and " 0.0 MB" not in out
    for _, out, _ in printed[:3]:
        assert "AUC" in out and "normalized entropy" in out and "auc" not in out


def test_predict_says_what_it_wrote_and_what_it_does_not_know(run: str, tmp_path: Path) -> None:
    rows = [row | {"user": "stranger"} for row in click_rows(20)]
    data, out_file = write_csv(tmp_path / "new.csv", rows), tmp_path / "scores.csv"
    code, out, error = invoke("predict", run, "--data", str(data), "--out", str(out_file), "--keep", "item")
    first, *rest = out.splitlines()
    assert (code, error) == (0, "") and first.startswith("20 rows scored by the model of step ")
    assert rest[0] == "user: 20 of 20 values (100 %) have no row"
    assert out_file.read_text().splitlines()[0] == '"item","score"' and out_file.read_text().count("\n") == 21


@every(
    ("arguments", "text"),
    [
        (("evaluate", "/nowhere"), "error: /nowhere: there is no such folder"),
        (("evaluate", "RUN", "--data", "/nowhere.csv"), "error: /nowhere.csv: no such file (--data)"),
        (
            ("predict", "RUN", "--data", "DATA", "--out", "x.csv", "--keep", "userr"),
            "has no column userr; did you mean",
        ),
        (("predict", "RUN", "--data", "DATA", "--out", "x.txt"), "error: --out x.txt: allowed: a name that ends in"),
    ],
    ids=["no run", "no file", "keep", "out"],
)
def test_wrong_arguments_are_one_line(run: str, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    data = write_csv(tmp_path / "data.csv", click_rows(3))
    code, out, error = invoke(*(a.replace("RUN", run).replace("DATA", str(data)) for a in arguments))
    assert code == 2 and not out and text in error and error.count("\n") == 1


@every("given", [("--model", "newest"), ("--split", "all")])
def test_unknown_choices_name_what_is_allowed(run: str, given: tuple[str, str]) -> None:
    code, _, error = invoke("evaluate", run, *given)
    assert code == 2 and "allowed:" in error
