"""Values whose id has no row are counted alike in training, evaluate, predict and Predictor, and told by one rule."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardkeep
from shardkeep.cli.main import app
from shardkeep.inference.scoring import evaluate_run, predict_files
from shardkeep.run.reader import RunReader
from shardkeep.view.unseen_lines import unseen_lines, unseen_shares
from shardkeep.workers.data.sources.registry import open_data
from tests.support.click_files import COLUMNS, click_job, click_rows, write_csv
from tests.support.local_job import LocalJob

Row = dict[str, str]
ROWS = 320


def values_of(row: Row, feature: str) -> list[str]:
    """A missing text is a value of `user`; a list has only its entries."""
    return [row[feature]] if feature != "tags" else [tag for tag in row["tags"].split("|") if tag]


def expected(train: list[Row], scored: list[Row], *, least: int = 1) -> dict[str, list[int]]:
    """Values that fewer than `least` rows of training have, and all values."""
    found = {}
    for feature in ("user", "item", "tags"):
        seen = Counter(value for row in train for value in values_of(row, feature))
        values = [value for row in scored for value in values_of(row, feature)]
        found[feature] = [sum(seen[value] < least for value in values), len(values)]
    return found


def rows_of_both(count: int) -> tuple[list[Row], list[Row]]:
    """Rows of training, and rows to score with new users, new tags and the missing user, who is new too."""
    train, scored = click_rows(count), click_rows(151, seed=9)
    for n, row in enumerate(scored):
        if n % 3 == 0:
            row["user"] = f"stranger {n}" if n % 2 else ""
        row["tags"] += "|new" if n % 5 == 0 and row["tags"] else ""
    return train, scored


def job_of(folder: Path, count: int = ROWS, **changes: Any) -> tuple[shardkeep.JobConfig, list[Row], list[Row]]:
    train, scored = rows_of_both(count)
    job = click_job(write_csv(folder / "train.csv", train)) | changes
    job["data"] = {key: value for key, value in job["data"].items() if key != "split"}
    job["data"]["eval"] = str(write_csv(folder / "eval.csv", scored))
    return shardkeep.JobConfig.model_validate(job), train, scored


def test_two_workers_and_two_servers_count_what_one_process_counts(tmp_path: Path) -> None:
    for mode, ids in (("sync", "raw"), ("bounded", "coded")):
        two = {"servers": 2, "workers": 2, "consistency": {"mode": mode}, "compression": {"ids": ids}}
        config, train, scored = job_of(tmp_path, 120, **two)
        job = LocalJob(config, open_data(config.data, seed=config.seed))
        assert job.run()["eval"]["unseen"] == expected(train, scored)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `job_of` by the command, whose output is beside it."""
    folder = tmp_path_factory.mktemp("unseen")
    config = job_of(folder)[0]
    (folder / "job.yaml").write_text(config.to_yaml())
    done = CliRunner().invoke(app, ["train", str(folder / "job.yaml"), "--run-dir", str(folder / "run")])
    assert done.exit_code == 0
    (folder / "printed").write_text(done.output)
    return folder / "run"


def test_training_evaluate_predict_and_predictor_count_the_same(run: Path, tmp_path: Path) -> None:
    train, scored = rows_of_both(ROWS)
    wanted, file = expected(train, scored), run.parent / "eval.csv"
    assert wanted["user"][0] > 40 and wanted["tags"][0] > 10
    assert (RunReader(run).summary() or {})["eval"]["unseen"] == wanted
    assert evaluate_run(run)["unseen"] == wanted
    assert evaluate_run(run, files=[file], by="item")["unseen"] == wanted
    assert evaluate_run(run, split="train")["unseen"] == expected(train, train)
    assert predict_files(run, [file], tmp_path / "scores.csv").unseen == wanted
    predictor = shardkeep.load(run)
    assert {missing for missing, _ in predictor.unseen.values()} == {0}
    columns = {name: [row[name] for row in scored] for name in COLUMNS if name != "clicked"}
    for times in (1, 2):
        predictor.predict(columns)
        assert predictor.unseen == {name: [times * a, times * b] for name, (a, b) in wanted.items()}


def test_all_commands_tell_it_alike(run: Path, tmp_path: Path) -> None:
    wanted, file = expected(*rows_of_both(ROWS)), str(run.parent / "eval.csv")
    unseen = unseen_lines(wanted)
    assert [share.split()[0] for share in unseen_shares(wanted)] == ["user", "tags"]
    printed = [(run.parent / "printed").read_text()]
    for command in (
        ["evaluate", str(run), "--data", file, "--by", "item"],
        ["predict", str(run), "--data", file, "--out", str(tmp_path / "scores.csv")],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, command
        printed.append(done.output)
    for output in printed:
        assert [line.strip() for line in output.splitlines() if "values without a row" in line] == unseen, output
    done = CliRunner().invoke(app, ["evaluate", str(run), "--json"])
    assert json.loads(done.stdout)["unseen"] == wanted


def test_an_id_that_was_trained_and_not_admitted_has_no_row(tmp_path: Path) -> None:
    admit = {"default": {"dim": 4, "admit": {"min_count": 2}}}
    config, train, scored = job_of(tmp_path, 60, tables=admit, train={"batch_size": 1})
    summary = shardkeep.train(config, run_dir=tmp_path / "run", quiet=True)
    wanted = expected(train, scored, least=2)
    assert wanted["user"][0] > expected(train, scored)["user"][0]
    assert summary.eval is not None and summary.eval.unseen == wanted == evaluate_run(tmp_path / "run")["unseen"]


def test_one_line_names_three_features_from_a_share_on_the_largest_first() -> None:
    counts = {"few": [9, 1000], "none": [0, 0], "known": [0, 7], "edge": [10, 1000], "all": [1500, 1500]}
    assert unseen_lines(counts) == ["values without a row: all 100 % (1,500 of 1,500), edge 1 % (10 of 1,000)"]
    (line,) = unseen_lines({f"c{n:02}": [n, 100] for n in range(20)})
    assert line.startswith("values without a row: c19 19 % (19 of 100), c18") and line.endswith(
        "16 more (`unseen` has all)"
    )
    assert unseen_lines(3) == unseen_lines({"few": [9, 1000]}) == []
